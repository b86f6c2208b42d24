"""Train one of the zoo's tiny models from scratch, on text that every Python carries.

    python experiments/tiny/train.py tiny-4l --out kvtransfer/zoo_assets/tiny-4l

The recipe is this folder: settings and seeds in recipes.py, rows in rows.py. A batch is a pure
function of the model's name, its seed and the step, so an interrupted run goes on from its
checkpoint as if nothing had happened.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import attention
import torch
from measure import heldout_nll, recall
from publish import publish
from recipes import RECIPES, Recipe
from rows import ANSWER, Corpus, batch, end
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import LlamaForCausalLM
from vocabulary import train_tokenizer

from kvtransfer.fitting.texts import builtin

RESULTS = Path(__file__).parent / "results"


def train(
    recipe: Recipe, corpus: Corpus, heldout: Corpus, *, checkpoint: Path, compiled: bool
) -> LlamaForCausalLM:
    """Run the recipe, logging as it goes."""
    torch.manual_seed(recipe.seed)
    tokenizer = corpus.tokenizer
    model = LlamaForCausalLM(recipe.config(vocabulary=len(tokenizer), end_of_text=end(tokenizer)))
    model.set_attn_implementation(attention.NAME)
    optimizer = _optimizer(model, recipe)
    state: dict[str, Any] = {"step": 0, "seconds": 0.0}
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    log = RESULTS / f"{recipe.name}.log.jsonl"
    log.parent.mkdir(parents=True, exist_ok=True)
    if state["step"] == 0:
        log.write_text("")

    def token_losses(ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        losses = cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        return losses.view(ids.shape[0], -1)

    losses = torch.compile(token_losses, dynamic=False) if compiled else token_losses
    started, seen = time.monotonic() - state["seconds"], []
    for step in range(state["step"], recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        loss, parts = _loss(losses, recipe, corpus, step)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        seen.append(parts)
        done = step + 1
        if done % recipe.every and done < recipe.steps:
            continue
        prose, answers = torch.stack(seen).nanmean(0).tolist()
        seen.clear()
        state = {"step": done, "seconds": time.monotonic() - started}
        line = state | {"train_loss": prose, "answer_loss": answers} | _validate(model, heldout)
        with log.open("a") as file:
            file.write(json.dumps({k: round(v, 4) for k, v in line.items()}) + "\n")
        torch.save(
            state | {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint
        )
    return model


def _optimizer(model: LlamaForCausalLM, recipe: Recipe) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    gains = [p for p in model.parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, betas=recipe.betas, weight_decay=recipe.weight_decay, fused=True
    )


def _loss(
    losses: Callable[[Tensor], Tensor], recipe: Recipe, corpus: Corpus, step: int
) -> tuple[Tensor, Tensor]:
    """The weighted loss, and beside it the plain loss of the prose rows and of the answers."""
    length = recipe.length(step)
    rng = Random(f"{recipe.name}/{recipe.seed}/{step}")
    rows = batch(rng, corpus, rows=recipe.tokens // length, length=length)
    weights = torch.tensor([row.weights for row in rows])[:, 1:]
    prose = torch.tensor([row.kind == "prose" for row in rows])
    nll = losses(torch.tensor([row.ids for row in rows]))
    plain = nll.detach()
    parts = torch.stack((plain[prose].mean(), plain[weights == ANSWER].mean()))
    return (nll * weights).sum() / weights.sum(), parts


def _validate(model: LlamaForCausalLM, heldout: Corpus) -> dict[str, float]:
    with torch.autocast("cpu", torch.bfloat16):
        return {
            "validation_loss": heldout_nll(model, heldout, length=512, limit=16).value,
            "recall_accuracy": recall(model, heldout, seed="validation", n=128).value,
        }


def main() -> None:
    """Parse, train, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=[recipe.name for recipe in RECIPES])
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument(
        "--checkpoint", type=Path, help="file to go on from, by default beside --out"
    )
    parser.add_argument("--compile", action="store_true", help="torch.compile: a quarter faster")
    given = parser.parse_args()
    recipe = next(recipe for recipe in RECIPES if recipe.name == given.model)
    checkpoint = given.checkpoint or given.out.with_suffix(".checkpoint")
    checkpoint.parent.mkdir(parents=True, exist_ok=True)

    tokenizer = train_tokenizer(builtin("fit"), positions=recipe.positions)
    corpus, heldout = (Corpus.of(builtin(s), tokenizer) for s in ("fit", "heldout"))
    model = train(recipe, corpus, heldout, checkpoint=checkpoint, compiled=given.compile)
    publish(recipe, model, heldout, given.out)
    checkpoint.unlink()


if __name__ == "__main__":
    main()
