"""What the ladder's comparisons mean, rung by rung: equal, noise, parted by noise, or a fault.

Two arms may owe each other the same bits, and then any difference is a fault. Or they compute the
same numbers in other shapes; then they differ by rounding, and how much of it this model makes is
measured: it is what recomputing (A) and decoding on a cache (B) differ by, where nothing was split
or saved. In half precision that is enough to turn a near-tie, so there the likeliest tokens are
compared only where one leads by more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from kvtransfer.guides.climb import Comparison, Parting

Rung = Literal["token ids", "first logits", "same history", "greedy", "sampling"]
RUNGS: tuple[Rung, ...] = ("token ids", "first logits", "same history", "greedy", "sampling")
"""In the order of the ladder: each means something only where those before it hold."""

Status = Literal["equal", "noise", "parted", "fault"]
Cause = Literal[
    "arithmetic", "tokenization", "positions", "mask", "contents", "decoding", "caching", "sampling"
]

CAUSES: dict[Cause, str] = {
    "arithmetic": "arithmetic: the same sums in another order",
    "tokenization": "tokenization: the two read other token ids",
    "positions": "cache positions: keys are turned to other positions than they should stand at",
    "mask": "the attention mask: what goes in is the same, and attention sees other tokens of it",
    "contents": "cache contents: the cache holds other numbers than the model makes of the guide",
    "decoding": "cache positions or mask of what is written: the prompt's cache is right",
    "caching": "cached decoding itself, with nothing split or saved: its positions or its mask",
    "sampling": "sampling: the same logits and another draw",
}

TOLERANCE = 1e-4
"""Largest difference of logits that other shapes explain in float32, unless the model's own noise
is more."""

GROSS = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Largest difference between recomputing and decoding, over the largest logit, that is arithmetic
still. Beyond it the model's own cached decoding is not what it computes without a cache."""

GROSS_ROUNDED = 0.25
"""The same in half precision, where SmolLM2 reaches 0.05."""

CACHE_NOISE = {torch.float32: 1e-3, torch.float64: 1e-3}
"""Relative difference of a cache's blocks that other shapes explain."""

CACHE_NOISE_ROUNDED = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one pair of arms shows on one rung."""

    pair: tuple[str, str]
    rung: Rung
    status: Status
    cause: Cause | None
    """Of what is not equal."""
    measured: str
    """In words short enough for a table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How much rounding makes of a logit, in one dtype and attention implementation."""

    measured: float
    """Largest difference between recomputing and decoding on a cache."""
    largest: float
    """Largest absolute logit."""
    dtype: torch.dtype

    @property
    def exact(self) -> bool:
        """Whether logits can be held to a tolerance, and not only to clear leads."""
        return self.dtype in GROSS

    @property
    def gross(self) -> float:
        """Beyond it, a difference between A and B is none of arithmetic."""
        return GROSS.get(self.dtype, GROSS_ROUNDED) * self.largest

    @property
    def tolerance(self) -> float:
        """Largest difference that is noise between arms that read in other shapes."""
        if self.exact:
            # A is looked at on few steps, the others on all: they may differ by somewhat more.
            own = 2 * self.measured if self.measured > TOLERANCE else TOLERANCE
            return min(own, max(TOLERANCE, self.gross))
        step = torch.finfo(self.dtype).eps * self.largest  # of the largest logit
        return min(max(self.measured, step), self.gross)

    @property
    def lead(self) -> float:
        """A margin above this is clear: one token can gain, and the other lose, the tolerance."""
        return 2 * self.tolerance

    @classmethod
    def of(cls, comparisons: Sequence[Comparison], dtype: torch.dtype) -> "Noise":
        """As the pair A and B shows it."""
        alone = [each.difference for each in comparisons if each.pair == ("A", "B")]
        return cls(
            measured=max(alone, default=0.0),
            largest=max((each.largest for each in comparisons), default=0.0),
            dtype=dtype,
        )


def judge(comparisons: Sequence[Comparison], noise: Noise) -> tuple[Finding, ...]:
    """One finding a rung and pair, in the order of the rungs."""
    pairs = list(dict.fromkeys(each.pair for each in comparisons))
    found = {
        pair: list(_climbed([each for each in comparisons if each.pair == pair], noise))
        for pair in pairs
    }
    return tuple(found[pair][rung] for rung in range(len(RUNGS)) for pair in pairs)


def _climbed(guides: Sequence[Comparison], noise: Noise) -> Iterator[Finding]:
    """The five findings on one pair. A fault on an earlier rung is the cause of later ones."""
    pair, owed = guides[0].pair, guides[0].owed
    fault: Cause | None = None

    def finding(rung: Rung, status: Status, cause: Cause | None, measured: str) -> Finding:
        return Finding(pair=pair, rung=rung, status=status, cause=cause, measured=measured)

    other = [each for each in guides if not each.same_ids]
    if other:
        fault = "tokenization"
        one = other[0]
        counts = " and ".join(map(str, one.tokens))
        yield finding("token ids", "fault", fault, f"{counts} ids that differ: {one.guide}")
    else:
        yield finding("token ids", "equal", None, "the same")

    apart = max(each.first for each in guides)
    flips = [each.first_flip for each in guides if each.first_flip is not None]
    status = _status(apart, flips, owed, noise, pair)
    if status == "fault":
        fault = fault or _cause(guides, owed, noise)
    cause = None if status == "equal" else fault if status == "fault" else "arithmetic"
    yield finding("first logits", status, cause, _difference(apart, status))

    apart = max(each.difference for each in guides)
    flips = [margin for each in guides for margin in each.flips]
    status = _status(apart, flips, owed, noise, pair)
    if status == "fault":
        fault = fault or _cause(guides, owed, noise)
    steps = sum(each.compared for each in guides)
    measured = f"{_difference(apart, status)} in {steps:,} steps"
    if not noise.exact and status != "equal":
        clear = sum(margin > noise.lead for each in guides for margin in each.margins)
        turned = sum(margin > noise.lead for margin in flips)
        measured += f"; best token the same in {clear - turned:,} of {clear:,} with a clear lead"
    cause = None if status == "equal" else fault if status == "fault" else "arithmetic"
    yield finding("same history", status, cause, measured)

    greedy = [p for each in guides for p in each.partings if p.seed is None]
    drawn = [p for each in guides for p in each.partings if p.seed is not None]
    runs = len(guides), sum(each.rows - 1 for each in guides)
    for rung, partings, count in (("greedy", greedy, runs[0]), ("sampling", drawn, runs[1])):
        causes = [cause_of(each, fault, owed, noise) for each in partings]
        found = next((each for each in causes if each != "arithmetic"), None)
        state: Status = "equal" if not partings else "parted" if found is None else "fault"
        cause = None if not partings else found or "arithmetic"
        text = f"same tokens in {count - len(partings)} of {count} runs" if count else "no runs"
        if partings:
            text += f"; first part at token {min(each.position for each in partings)}"
        yield finding(rung, state, cause, text)  # type: ignore[arg-type]


def cause_of(parting: Parting, fault: Cause | None, owed: bool, noise: Noise) -> Cause:
    """Why two free runs part, where ``fault`` is what lower rungs show."""
    if not parting.by_logits:
        return "sampling"
    if fault is not None:
        return fault
    if owed or (parting.seed is None and parting.margin > noise.lead):
        return "decoding"
    return "arithmetic"


def _status(
    apart: float, flips: Sequence[float], owed: bool, noise: Noise, pair: tuple[str, str]
) -> Status:
    if apart == 0:
        return "equal"
    if owed or not apart < float("inf"):  # NaN is not below it either
        return "fault"
    if pair == ("A", "B"):
        return "noise" if apart <= max(noise.gross, TOLERANCE) else "fault"
    if noise.exact:
        return "noise" if apart <= noise.tolerance else "fault"
    return "fault" if any(margin > noise.lead for margin in flips) else "noise"


def _cause(guides: Sequence[Comparison], owed: bool, noise: Noise) -> Cause:
    """What the caches say of the first guide whose caches say anything."""
    if guides[0].pair == ("A", "B"):
        return "caching"
    small = 0.0 if owed else CACHE_NOISE.get(noise.dtype, CACHE_NOISE_ROUNDED)
    causes = (each.gap.cause(small) for each in guides if each.gap is not None)
    return next((cause for cause in causes if cause is not None), "decoding")


def _difference(apart: float, status: Status) -> str:
    if status == "equal":
        return "same bits"
    return f"up to {shown(apart)} apart"


def shown(number: float) -> str:
    """A difference of logits, in two digits."""
    return f"{number:.1e}" if 0 < number < 0.01 else f"{number:.2g}"
