"""Heal a model that lost layers: train low-rank adapters to predict as the full model does.

    python -m experiments.siblings.sample MODEL samples.safetensors
    python -m experiments.siblings.heal MODEL samples.safetensors ADAPTER_FOLDER --log LOG.jsonl

The folder's adapter is rewritten every ``save_every`` steps, so that a run cut short leaves one.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from experiments.siblings import corpus, lora, schedule, sibling
from experiments.siblings.objective import FullModel, losses


@dataclass(frozen=True, slots=True, kw_only=True)
class Healing:
    """The settings of a run."""

    base: str = "smollm2-135m"
    drop_layers: tuple[int, ...] = sibling.DROPPED
    rank: int = 32
    scale: float = 2.0
    """What B @ A is multiplied by, known elsewhere as alpha / rank."""
    seed: int = 17
    steps: int = 1100
    warmup: int = 30
    learning_rate: float = 8e-4
    least: float = 0.02
    """What share of the learning rate the cosine ends at."""
    rows: int = 2
    length: int = 512
    text_weight: float = 0.3
    """Weight of the text's own likelihood beside the KL's 1."""
    clip: float = 1.0
    log_every: int = 10
    save_every: int = 50

    def rate(self, step: int) -> float:
        """Learning rate of a step: a linear warm-up, then a cosine."""
        return schedule.rate(
            step,
            steps=self.steps,
            warmup=self.warmup,
            highest=self.learning_rate,
            least=self.least,
        )


Log = Callable[[dict[str, object]], None]


def heal(model: Path, samples: Path, out: Path, how: Healing, log: Log) -> None:
    """Run all steps, writing the adapter and its recipe to ``out`` on the way."""
    torch.manual_seed(how.seed)
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = corpus.rows(tokenizer, samples, how.length, how.seed)
    counts = {kind: len(tokens) for kind, tokens in rows.items()}
    order = corpus.order(counts, how.seed)
    log({"settings": asdict(how), "rows": counts, "shares": corpus.SHARES})

    full = FullModel(sibling.load(model, torch.bfloat16))
    healed = sibling.load(model, torch.bfloat16, without=how.drop_layers)
    adapters = lora.attach(healed, rank=how.rank, scale=how.scale)
    trained = [weight for adapter in adapters.values() for weight in (adapter.A, adapter.B)]
    optimizer = torch.optim.AdamW(trained, weight_decay=0.0, betas=(0.9, 0.98))

    began = time.perf_counter()
    sums = torch.zeros(2)
    for step in range(how.steps):
        names = [next(order) for _ in range(how.rows)]
        tokens = torch.stack([rows[kind][index] for kind, index in names])
        wanted = [full.of(name, row) for name, row in zip(names, tokens, strict=True)]
        kl, text = losses(healed(tokens, use_cache=False).logits, tokens, wanted)
        (kl + how.text_weight * text).backward()
        torch.nn.utils.clip_grad_norm_(trained, how.clip)
        for group in optimizer.param_groups:
            group["lr"] = how.rate(step)
        optimizer.step()
        optimizer.zero_grad()

        done = step + 1
        sums += torch.stack((kl.detach(), text.detach()))
        if done % how.log_every == 0:
            means = dict(zip(("kl", "text"), (sums / how.log_every).tolist(), strict=True))
            log({"step": done, **means, "rate": how.rate(step), "s": time.perf_counter() - began})
            sums.zero_()
        if done % how.save_every == 0 or done == how.steps:
            write(out, adapters, how, done)


def write(out: Path, adapters: dict[str, lora.Adapted], how: Healing, steps: int) -> None:
    """Put the adapter and what made it into ``out``, never leaving half a file there."""
    unfinished = out / "adapter.unfinished"
    save_file(lora.tensors(adapters), unfinished, metadata={"steps": str(steps)})
    unfinished.replace(out / "adapter.safetensors")
    recipe = {
        "base": how.base,
        "drop_layers": list(how.drop_layers),
        "rank": how.rank,
        "seed": how.seed,
        "steps": steps,
        "tokens": steps * how.rows * how.length,
    }
    (out / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Read the command line and heal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="folder of the full model")
    parser.add_argument("samples", type=Path, help="what sample.py wrote")
    parser.add_argument("out", type=Path, help="folder for the adapter and its recipe")
    parser.add_argument("--log", type=Path, required=True, help="JSONL file, overwritten")
    parser.add_argument("--steps", type=int, default=Healing().steps)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    with args.log.open("w", encoding="utf-8") as lines:

        def log(entry: dict[str, object]) -> None:
            rounded = {k: round(v, 6) if isinstance(v, float) else v for k, v in entry.items()}
            lines.write(json.dumps(rounded) + "\n")
            lines.flush()

        heal(args.model, args.samples, args.out, Healing(steps=args.steps), log)


if __name__ == "__main__":
    main()
