"""How well one number foretells another: correlations, and how cleanly a threshold separates.

Everything works on the last axis, so that a bootstrap can hand in all resamples at once.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvtransfer.measures.intervals import RESAMPLES, SEED, Column, interval
from kvtransfer.report import Estimate


def pearson(x: Column, y: Column) -> Column:
    """Correlation of numbers; NaN where either does not vary."""
    x, y = (each - each.mean(-1, keepdims=True) for each in (x, y))
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Column = (x * y).sum(-1) / np.sqrt((x**2).sum(-1) * (y**2).sum(-1))
    return found


def spearman(x: Column, y: Column) -> Column:
    """Correlation of ranks."""
    return pearson(ranks(x), ranks(y))


def ranks(x: Column) -> Column:
    """From 1; equal numbers share the mean of their ranks."""
    below = (x[..., None, :] < x[..., :, None]).sum(-1)
    equal = (x[..., None, :] == x[..., :, None]).sum(-1)
    found: Column = below + (equal + 1) / 2
    return found


Correlation = Callable[[Column, Column], Column]


def correlated(correlation: Correlation, x: Column, y: Column) -> Estimate:
    """With its 95 % interval, pairs being resampled."""
    return interval(correlation, x, y)


def without_each(
    correlation: Correlation, x: Column, y: Column, families: Sequence[str]
) -> dict[str, float]:
    """The correlation with each family left out in turn: pairs of one family are not independent.

    NaN where what is left does not vary.
    """
    of = np.array(families)
    return {
        family: float(correlation(x[of != family], y[of != family]))
        for family in dict.fromkeys(families)
    }


def auc(score: Column, usable: NDArray[np.bool_]) -> float:
    """The chance that a usable one scores above another that is not; a tie counts half.

    Raises:
        ValueError: all are usable, or none is.
    """
    return float(_wins(*_apart(score, usable)).mean())


def auc_interval(score: Column, usable: NDArray[np.bool_]) -> Estimate:
    """With its 95 % interval: each of both kinds is resampled, so that neither dies out."""
    good, bad = _apart(score, usable)
    random = np.random.default_rng(SEED)
    wins = _wins(good, bad)
    rows, columns = (
        random.integers(len(each), size=(RESAMPLES, len(each))) for each in (good, bad)
    )
    draws = wins[rows[:, :, None], columns[:, None, :]].mean((1, 2))
    low, high = np.percentile(draws, [2.5, 97.5])
    return Estimate(float(wins.mean()), float(low), float(high), len(score))


def threshold(score: Column, usable: NDArray[np.bool_]) -> float:
    """Where to part: halfway between two neighbours, at the best balanced accuracy.

    Of several such places the middle one; for scores that rise with usefulness.
    """
    good, bad = _apart(score, usable)
    values = np.unique(score)
    if len(values) == 1:
        return float(values[0])
    places = (values[:-1] + values[1:]) / 2
    right = [((good >= at).mean() + (bad < at).mean()) / 2 for at in places]
    best = np.flatnonzero(np.isclose(right, max(right)))
    return float(places[best[len(best) // 2]])


def left_out(
    score: Column, usable: NDArray[np.bool_], groups: Sequence[object] | None = None
) -> float:
    """Accuracy where each is judged by a threshold that was chosen without it.

    With ``groups``, without all of its group.
    """
    right = []
    for i, others in _others(len(score), groups):
        kept = usable[others]
        if kept.all() or not kept.any():  # nothing to part: what all others are, it is
            right.append(bool(usable[i] == kept[0]))
            continue
        right.append(bool((score[i] >= threshold(score[others], kept)) == usable[i]))
    return sum(right) / len(right)


def _others(n: int, groups: Sequence[object] | None) -> Iterator[tuple[int, NDArray[np.intp]]]:
    of = list(range(n)) if groups is None else list(groups)
    for i in range(n):
        yield i, np.array([j for j in range(n) if of[j] != of[i]])


def _apart(score: Column, usable: NDArray[np.bool_]) -> tuple[Column, Column]:
    if usable.all() or not usable.any():
        raise ValueError("there is nothing to tell apart: all are usable, or none is")
    return score[usable], score[~usable]


def _wins(good: Column, bad: Column) -> Column:
    over = good[:, None] - bad
    return np.where(over > 0, 1.0, np.where(over == 0, 0.5, 0.0))
