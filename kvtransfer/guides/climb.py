"""Let the arms of the ladder follow one history, and record where they differ.

Every arm reads what B writes: greedily in the first row, by drawing with a seed in each other one.
As long as an arm would choose what B chose, that is its own free run too; where it first chooses
otherwise, its free run ends. So one pass shows both, the logits on the same history and the first
token at which free runs part.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvtransfer.guides.arms import Arm
from kvtransfer.guides.gap import CacheGap
from kvtransfer.measures.nucleus import draw, nucleus, top_overlap, total_variation

PAIRS = (("A", "B"), ("B", "D"), ("B2", "D"), ("D", "P"))
"""Which arms are compared."""

OWED = frozenset({("B2", "D"), ("D", "P")})
"""Pairs that compute the same numbers in the same shapes: any difference is a fault."""

WIDTH = 25
"""How many best tokens are compared where two arms part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """The first token at which the free runs of two arms part, in one row."""

    guide: str
    pair: tuple[str, str]
    seed: int | None
    """None in the greedy row."""
    position: int
    """Of the token, counted from the first one that is written."""
    tokens: tuple[int, int]
    same_best: bool
    """Whether both have the same likeliest token."""
    overlap: int
    """Of the 25 best tokens of each (or all, where there are fewer)."""
    difference: float
    """Largest difference of a logit."""
    variation: float
    """Total variation of what the sampler may draw, after nucleus filtering."""
    margin: float
    """By how much the first arm's best token leads, in logits."""
    by_logits: bool
    """Whether the second arm's logits, with the first one's number, give the second one's token;
    if not, it drew in another way."""


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Two arms on one guide, at every step and in every row at which both have logits."""

    guide: str
    pair: tuple[str, str]
    tokens: tuple[int, int]
    """How many ids each has read of guide and prompt."""
    same_ids: bool
    gap: CacheGap | None
    """How far their caches lie apart after the prompt."""
    first: float = 0.0
    """Largest difference of the first token's logits."""
    first_flip: float | None = None
    """The first arm's margin, if the first token's likeliest differs."""
    difference: float = 0.0
    """Largest difference of a logit on the same history."""
    compared: int = 0
    """Steps, each row's counted."""
    equal: int = 0
    """Of these, in how many all logits have the same bits."""
    margins: list[float]
    """The first arm's margin between its two best tokens, at each of them."""
    flips: list[float]
    """The same where the likeliest tokens differ."""
    largest: float = 0.0
    """Largest absolute logit."""
    rows: int = 0
    partings: list[Parting]

    @property
    def owed(self) -> bool:
        """Whether the two owe each other the same bits."""
        return self.pair in OWED


def climb(
    arms: Mapping[str, Arm],
    *,
    guide: str,
    hidden: int,
    tokens: int,
    seeds: tuple[int, ...],
    top_p: float,
    progress: Callable[[], None] = lambda: None,
) -> tuple[Comparison, ...]:
    """Compare the arms of PAIRS that are there, over ``tokens`` steps.

    Args:
        arms: By name; B, whose history all follow, among them. They are used up.
        guide: Its name, for the record.
        hidden: Ids of the guide, which the arms may have read apart.
        tokens: To write; the end of sequence does not end a row.
        seeds: Of the drawn rows.
        top_p: Of the nucleus they draw from.
        progress: Called after every step.
    """
    rows = 1 + len(seeds)
    found = [_begin(arms, pair, guide, hidden, rows) for pair in PAIRS if {*pair} <= arms.keys()]
    for arm in arms.values():
        arm.widen(rows)
    history = torch.empty(rows, 0, dtype=torch.long)
    for step in range(tokens):
        logits: dict[str, Tensor] = {}
        for name, arm in arms.items():
            read = arm.first.expand(rows, -1) if step == 0 else arm.follow(history)
            if read is not None:
                logits[name] = read
        chosen = {
            name: _choose(each, arms[name].uniform[:, step], top_p) for name, each in logits.items()
        }
        for comparison in found:
            if {*comparison.pair} <= logits.keys():
                _look(comparison, arms, logits, chosen, step, seeds, top_p)
        history = torch.cat((history, chosen["B"][:, None]), dim=1)
        progress()
    return tuple(found)


def numbers(seeds: tuple[int, ...], tokens: int) -> Float[Tensor, "n t"]:
    """What is drawn by: for every seed, a number from 0 to 1 a step."""
    rows = (
        torch.rand(tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.double)
        for seed in seeds
    )
    return torch.stack([torch.empty(tokens, dtype=torch.double), *rows])[1:]


def _choose(
    logits: Float[Tensor, "r v"], uniform: Float[Tensor, " n"], top_p: float
) -> Int[Tensor, " r"]:
    best = logits[:1].argmax(-1)
    if not len(uniform):
        return best
    return torch.cat((best, draw(nucleus(logits[1:], top_p), uniform)))


def _begin(
    arms: Mapping[str, Arm], pair: tuple[str, str], guide: str, hidden: int, rows: int
) -> Comparison:
    one, other = arms[pair[0]], arms[pair[1]]
    layers = one.layers(), other.layers()
    return Comparison(
        guide=guide,
        pair=pair,
        tokens=(len(one.ids), len(other.ids)),
        same_ids=torch.equal(one.ids, other.ids),
        gap=CacheGap.between(layers[0], layers[1], hidden) if layers[0] and layers[1] else None,
        margins=[],
        flips=[],
        partings=[],
        rows=rows,
    )


def _look(
    into: Comparison,
    arms: Mapping[str, Arm],
    logits: Mapping[str, Tensor],
    chosen: Mapping[str, Tensor],
    step: int,
    seeds: tuple[int, ...],
    top_p: float,
) -> None:
    (one, other), (ours, theirs) = into.pair, (chosen[name] for name in into.pair)
    a, b = logits[one], logits[other]
    apart = (a - b).abs().amax(-1)
    best = a.topk(2, dim=-1).values
    margins = (best[:, 0] - best[:, 1]).tolist()
    flips = [
        margin for margin, flipped in zip(margins, a.argmax(-1) != b.argmax(-1), strict=True)
        if flipped
    ]  # fmt: skip
    if step == 0:  # all rows are one there
        into.first, into.first_flip = float(apart[0]), flips[0] if flips else None
    into.difference = max(into.difference, float(apart.max()))
    into.compared += len(a)
    # Equal and not only nearly so: 0.0 and −0.0 differ in bits, and in nothing that follows.
    into.equal += int((apart == 0).sum())
    into.margins += margins
    into.flips += flips
    into.largest = max(into.largest, float(a.abs().max()), float(b.abs().max()))
    parted = {parting.seed for parting in into.partings}
    for row in (ours != theirs).nonzero()[:, 0].tolist():
        seed = None if row == 0 else seeds[row - 1]
        if seed in parted:
            continue
        this, that = a[row : row + 1], b[row : row + 1]
        by_logits = row == 0 or bool(
            draw(nucleus(that, top_p), arms[one].uniform[row - 1 : row, step]) == theirs[row]
        )
        into.partings.append(
            Parting(
                guide=into.guide,
                pair=into.pair,
                seed=seed,
                position=step,
                tokens=(int(ours[row]), int(theirs[row])),
                same_best=bool(this.argmax() == that.argmax()),
                overlap=int(top_overlap(this, that, WIDTH)),
                difference=float(apart[row]),
                variation=float(total_variation(nucleus(this, top_p), nucleus(that, top_p))),
                margin=margins[row],
                by_logits=by_logits,
            )
        )
