"""A guide put after another guide that it never saw: what reading some of it again repairs.

    python experiments/recompute/chunk.py --dtype bfloat16

Each builtin guide is prefilled alone, turned to its place after another guide, and asked its
questions there; shares are of the guide's own tokens, the text before it being exact. Writes
results/chunk.json.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from experiments.recompute.curve import Curve, write
from kvtransfer import KVCache, LanguageModel, load, prefill, read_guides, relocate, score
from kvtransfer.evaluation.conditions import Arm
from kvtransfer.evaluation.evaluate import BUILTIN_GUIDES
from kvtransfer.evaluation.guide_items import ask
from kvtransfer.guides.guide import Choice, Guide
from kvtransfer.guides.recompute import LAYERS, recompute
from kvtransfer.guides.seam import split
from kvtransfer.measures.agreement import kl, nll

SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
PARTNER = 7
"""How many guides further in the file the text stands that a guide is put after."""
BETWEEN = "\n\n"


@dataclass(frozen=True, slots=True)
class Placed:
    """A guide after another one."""

    guide: Guide
    text: str
    ids: Int[Tensor, "1 t"]
    before: int
    """Tokens of the text before it."""

    def graft(self, model: LanguageModel) -> KVCache:
        """Both prefilled apart, the second turned to its place."""
        first = prefill(model, self.ids[:, : self.before])
        second = relocate(model, prefill(model, self.ids[:, self.before :]), self.before)
        positions = torch.cat((first.positions, second.positions), dim=1)
        return replace(
            first,
            keys=tuple(map(_joined, first.keys, second.keys)),
            values=tuple(map(_joined, first.values, second.values)),
            positions=positions,
            rotations=model.rotary(positions),
            approximate="a guide read without the text before it",
        )

    def answers(self, model: LanguageModel) -> Int[Tensor, "1 s"]:
        """The ids of all questions with their answers, which follow the guide."""
        asked = "".join(
            item.prompt
            + (item.choices[item.answer] if isinstance(item, Choice) else f" {item.expect}")
            for item in self.guide.items
        )
        return split(model.tokenizer, self.text, asked, seam="back-off").live[None]


def placed(model: LanguageModel, guides: tuple[Guide, ...]) -> Iterator[Placed]:
    """Every guide after its partner, cut at a token boundary that all its questions share."""
    for index, guide in enumerate(guides):
        opening = guides[(index + PARTNER) % len(guides)].text + BETWEEN
        before = len(split(model.tokenizer, opening, guide.text, seam="back-off").hidden)
        text = opening + guide.text
        hidden = split(model.tokenizer, text, guide.items[0].prompt, seam="back-off").hidden
        yield Placed(guide, text, hidden[None], before)


def measure(model: LanguageModel, each: Placed, questions: int, layers: int) -> dict[str, Any]:
    """NLL and KL on the answers, and which questions are answered right, under every arm."""
    own, graft = prefill(model, each.ids), each.graft(model)
    repaired = {
        f"{share:.0%}": recompute(model, each.ids, graft, share, after=each.before, layers=layers)
        for share in SHARES
    }
    live = each.answers(model)
    best = score(model, live, own)[0]
    found: dict[str, Any] = {}
    alone = prefill(model, each.ids[:, : each.before])
    for name, cache in {"own": own, **repaired, "none": alone}.items():
        logits = best if name == "own" else score(model, live, cache)[0]
        hidden = cache.tokens if name != "none" else each.before
        arm, right = Arm(model, cache), []
        for item in [item for item in each.guide.items if isinstance(item, Choice)][:questions]:
            if (
                len(split(model.tokenizer, each.text, item.prompt, seam="back-off").hidden)
                != each.ids.shape[1]
            ):
                raise ValueError(f"{each.guide.name}: {item.prompt!r} has a seam of its own")
            text = each.text if name != "none" else each.text[: -len(each.guide.text)]
            right.append(float(ask(arm, text, hidden, item)[0]))
        found[name] = {
            "nll": float(nll(logits[:-1], live[0, 1:]).mean()),
            "kl_to_own": float(kl(best, logits).mean()),
        } | ({"accuracy": sum(right) / len(right)} if right else {})
    return found


def exactness(each: Placed, dtype: str) -> float:
    """The largest difference of logits between a share of 1 and a prefill."""
    model = load("smollm2-135m", dtype=dtype)
    live = each.answers(model)
    made = recompute(model, each.ids, each.graft(model), 1.0)
    return float(
        (score(model, live, made) - score(model, live, prefill(model, each.ids))).abs().max()
    )


def main() -> None:
    """Measure every guide, and write the curve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--guides", type=int, default=20)
    parser.add_argument("--questions", type=int, default=5, help="of each guide, with choices")
    parser.add_argument("--layers", type=int, default=LAYERS, help="looked at to choose tokens")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, default=Path("chunk.json"))
    asked = parser.parse_args()
    model = load("smollm2-135m", dtype=asked.dtype)
    guides = read_guides(BUILTIN_GUIDES)
    curve = Curve(worst="0%")
    everything = list(placed(model, guides))[: asked.guides]
    for each in everything:
        curve.add(measure(model, each, asked.questions, asked.layers))
        print(each.guide.name, each.before, each.ids.shape[1] - each.before, flush=True)
    write(
        asked.out,
        curve,
        {
            "model": "smollm2-135m",
            "dtype": asked.dtype,
            "layers_looked_at": asked.layers,
            "questions_a_guide": asked.questions,
            "tokens_before": [each.before for each in everything],
            "tokens": [each.ids.shape[1] - each.before for each in everything],
            "largest_logit_difference_at_100%_float32": exactness(everything[0], "float32"),
        },
    )


def _joined(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat((first, second), dim=2)


if __name__ == "__main__":
    main()
