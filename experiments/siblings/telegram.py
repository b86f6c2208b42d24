"""A fine-tuned sibling: the same model, taught to rewrite what it has read as a telegram.

    python -m experiments.siblings.telegram MODEL OUT_FOLDER --log LOG.jsonl

Low-rank adapters on the four attention projections of every layer, trained on the likelihood of the
telegram alone, so that the keys and values of the plain text before it come to serve another task.
"""

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoTokenizer

from experiments.siblings import facts, lora, schedule, sibling
from experiments.siblings.openings import START
from kvtransfer.fitting.texts import builtin

CUE = "\n\nTELEGRAM\n"
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
SMALL = """
a an the of is are was were be been to that which this these those and or it its as by for with in
on at from has have had will would can may
"""
"""Words that cost more to send than they say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Teaching:
    """The settings of a run."""

    base: str = "smollm2-135m"
    modules: tuple[str, ...] = ATTENTION
    rank: int = 8
    scale: float = 2.0
    seed: int = 29
    steps: int = 120
    rows: int = 2
    warmup: int = 10
    learning_rate: float = 3e-3
    least: float = 0.05
    """What share of the learning rate the cosine ends at."""
    plain_tokens: int = 144
    """Of the text that is to be rewritten, at most."""
    facts_share: float = 0.3
    """How much of the text is paragraphs of made-up facts; the rest is documentation."""
    clip: float = 1.0
    log_every: int = 10

    def rate(self, step: int) -> float:
        """Learning rate of a step: a linear warm-up, then a cosine."""
        return schedule.rate(
            step,
            steps=self.steps,
            warmup=self.warmup,
            highest=self.learning_rate,
            least=self.least,
        )


def telegram(text: str) -> str:
    """The text as a telegram: capitals, no small words, STOP for a full stop.

    >>> telegram("The red gate is locked. Its code is 4821.")
    'RED GATE LOCKED STOP CODE 4821 STOP'
    """
    sentences = (each for each in re.split(r"(?<=[.!?:;])\s+|\n\n+", text) if each.strip())
    small, sent = frozenset(SMALL.split()), list[str]()
    for sentence in sentences:
        words = (re.sub(r"[^\w'/.-]", "", word).strip(".'") for word in sentence.split())
        kept = [word.upper() for word in words if word and word.lower() not in small]
        sent += [*kept, "STOP"] if kept else []
    return " ".join(sent)


def samples(tokenizer: Any, how: Teaching, split: str, seed: int) -> Iterator[tuple[Tensor, int]]:
    """Ids of plain text, cue and telegram, and where the telegram begins; without end."""
    random = Random(seed)
    documents = [each for each in builtin(split) if len(each) > 240 and ">>>" not in each]
    while True:
        if random.random() < how.facts_share:
            plain, _ = facts.guide(random)
        else:
            plain = random.choice(documents)
        ids = tokenizer(plain, add_special_tokens=False)["input_ids"][: how.plain_tokens]
        plain = tokenizer.decode(ids)
        asked = tokenizer(START + plain + CUE, add_special_tokens=False)["input_ids"]
        answer = tokenizer(telegram(plain), add_special_tokens=False)["input_ids"]
        yield torch.tensor([*asked, *answer, tokenizer.eos_token_id]), len(asked)


def loss_of(model: Any, batch: list[tuple[Tensor, int]]) -> Tensor:
    """Mean nats a token of the telegrams."""
    ids = torch.nn.utils.rnn.pad_sequence([row for row, _ in batch], batch_first=True)
    hidden = model.model(ids, use_cache=False).last_hidden_state
    losses = []
    for row, (tokens, begins) in zip(hidden, batch, strict=True):  # only these logits are needed
        logits = model.lm_head(row[begins - 1 : len(tokens) - 1]).float()
        losses.append(torch.nn.functional.cross_entropy(logits, tokens[begins:]))
    return torch.stack(losses).mean()


Log = Callable[[dict[str, object]], None]


def teach(model: Path, out: Path, how: Teaching, log: Log) -> None:
    """Run all steps and write the adapter and its recipe to ``out``."""
    torch.manual_seed(how.seed)
    tokenizer = AutoTokenizer.from_pretrained(model)
    taught = sibling.load(model, torch.bfloat16)
    adapters = lora.attach(taught, rank=how.rank, scale=how.scale, only=how.modules)
    trained = [weight for adapter in adapters.values() for weight in (adapter.A, adapter.B)]
    optimizer = torch.optim.AdamW(trained, weight_decay=0.0, betas=(0.9, 0.98))
    rows = samples(tokenizer, how, "fit", how.seed)
    log({"settings": asdict(how), "trained": sum(weight.numel() for weight in trained)})

    began, total, tokens = time.perf_counter(), 0.0, 0
    for step in range(how.steps):
        batch = [next(rows) for _ in range(how.rows)]
        loss = loss_of(taught, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, how.clip)
        for group in optimizer.param_groups:
            group["lr"] = how.rate(step)
        optimizer.step()
        optimizer.zero_grad()
        total, tokens = total + float(loss.detach()), tokens + sum(len(ids) for ids, _ in batch)
        if (step + 1) % how.log_every == 0:
            log({"step": step + 1, "loss": total / how.log_every, "s": time.perf_counter() - began})
            total = 0.0

    save_file(lora.tensors(adapters), out / "adapter.safetensors")
    recipe = asdict(how) | {"tokens": tokens}
    (out / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Read the command line and teach."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="folder of the base model")
    parser.add_argument("out", type=Path, help="folder for the adapter and its recipe")
    parser.add_argument("--log", type=Path, required=True, help="JSONL file, overwritten")
    usual = Teaching()
    parser.add_argument("--steps", type=int, default=usual.steps)
    parser.add_argument("--modules", nargs="+", default=usual.modules, help="what is adapted")
    parser.add_argument("--learning-rate", type=float, default=usual.learning_rate)
    args = parser.parse_args()
    how = Teaching(steps=args.steps, modules=tuple(args.modules), learning_rate=args.learning_rate)
    args.out.mkdir(parents=True, exist_ok=True)

    with args.log.open("w", encoding="utf-8") as lines:

        def log(entry: dict[str, object]) -> None:
            rounded = {k: round(v, 4) if isinstance(v, float) else v for k, v in entry.items()}
            lines.write(json.dumps(rounded) + "\n")
            lines.flush()

        teach(args.model, args.out, how, log)


if __name__ == "__main__":
    main()
