"""A guide put after another guide that it never saw: what reading some of it again repairs.

    python experiments/recompute/chunk.py --dtype bfloat16

Each builtin guide is prefilled alone, turned to its place after another guide, and asked its
questions there; shares are of the guide's own tokens, the text before it being exact. A guide that
is put after several others is still one item: its figures are means over them. Writes
results/chunk.json.
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
from jaxtyping import Int
from torch import Tensor

from experiments.recompute.curve import Curve, save, show
from kvtransfer import KVCache, LanguageModel, load, prefill, read_guides, relocate, score
from kvtransfer.evaluation.conditions import Arm
from kvtransfer.evaluation.evaluate import BUILTIN_GUIDES
from kvtransfer.evaluation.guide_items import ask
from kvtransfer.guides.guide import Choice, Guide
from kvtransfer.guides.recompute import LAYERS, recompute
from kvtransfer.guides.seam import split
from kvtransfer.measures.agreement import kl, nll

SHARES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
ASKED = ("own", "0%", "15%", "20%", "none")
"""The arms that are asked questions, which takes longest."""
PARTNERS = (7, 3)
"""How many guides further in the file the texts stand that a guide is put after, one at a time."""
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


def placed(model: LanguageModel, guides: tuple[Guide, ...], index: int, partner: int) -> Placed:
    """A guide after its partner, cut at a token boundary that it shares with its first question."""
    guide = guides[index]
    opening = guides[(index + partner) % len(guides)].text + BETWEEN
    before = len(split(model.tokenizer, opening, guide.text, seam="back-off").hidden)
    text = opening + guide.text
    hidden = split(model.tokenizer, text, guide.items[0].prompt, seam="back-off").hidden
    return Placed(guide, text, hidden[None], before)


def measure(
    model: LanguageModel, each: Placed, questions: int, layers: int
) -> dict[str, dict[str, float]]:
    """NLL and KL on the answers, and the share of questions answered right, under every arm."""
    own, graft = prefill(model, each.ids), each.graft(model)
    repaired = {
        f"{share:.0%}": recompute(model, each.ids, graft, share, after=each.before, layers=layers)
        for share in SHARES
    }
    alone = prefill(model, each.ids[:, : each.before])
    live, items = each.answers(model), choices(each)[:questions]
    best = score(model, live, own)[0]
    found = {}
    for name, cache in {"own": own, **repaired, "none": alone}.items():
        logits = best if name == "own" else score(model, live, cache)[0]
        found[name] = {
            "nll": float(nll(logits[:-1], live[0, 1:]).mean()),
            "kl_to_own": float(kl(best, logits).mean()),
        }
        if items and name in ASKED:
            text = each.text
            if name == "none":  # a question right after the other guide has a seam of its own
                text = each.text.removesuffix(each.guide.text)
                hidden = split(model.tokenizer, text, items[0].prompt, seam="back-off").hidden
                cache = prefill(model, hidden[None])
            found[name]["accuracy"] = answered(model, text, cache, items)
    return found


def choices(each: Placed) -> list[Choice]:
    """The guide's questions that are answered by choosing."""
    return [item for item in each.guide.items if isinstance(item, Choice)]


def answered(model: LanguageModel, text: str, cache: KVCache, items: list[Choice]) -> float:
    """The share of questions that are answered right after ``text``, which ``cache`` holds."""
    right = []
    for item in items:
        hidden = len(split(model.tokenizer, text, item.prompt, seam="back-off").hidden)
        right.append(ask(Arm(model, cache.prefix(hidden)), text, hidden, item)[0])
    return fmean(right)


def averaged(found: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Means over the places of a guide, of every arm and metric."""
    return {
        arm: {metric: fmean(one[arm][metric] for one in found) for metric in metrics}
        for arm, metrics in found[0].items()
    }


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
    parser.add_argument("--partners", type=int, nargs="+", default=PARTNERS, help="see PARTNERS")
    parser.add_argument("--questions", type=int, default=12, help="of each guide, at most")
    parser.add_argument("--layers", type=int, default=LAYERS, help="looked at to choose tokens")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, default=Path("chunk.json"))
    asked = parser.parse_args()
    model = load("smollm2-135m", dtype=asked.dtype)
    guides = read_guides(BUILTIN_GUIDES)
    curve = Curve(worst="0%")
    everything = [
        [placed(model, guides, index, partner) for partner in asked.partners]
        for index in range(len(guides[: asked.guides]))
    ]
    settings = {
        "model": "smollm2-135m",
        "dtype": asked.dtype,
        "layers_looked_at": asked.layers,
        "partners": list(asked.partners),
        "questions": [len(choices(places[0])[: asked.questions]) for places in everything],
        "tokens_before": [[each.before for each in places] for places in everything],
        "tokens": [places[0].ids.shape[1] - places[0].before for places in everything],
        "largest_logit_difference_at_100%_float32": exactness(everything[0][0], "float32"),
    }
    for places in everything:
        found = [measure(model, each, asked.questions, asked.layers) for each in places]
        curve.add(averaged(found))
        save(asked.out, curve, settings)
        print(places[0].guide.name, flush=True)
    show(curve)


def _joined(first: Tensor, second: Tensor) -> Tensor:
    return torch.cat((first, second), dim=2)


if __name__ == "__main__":
    main()
