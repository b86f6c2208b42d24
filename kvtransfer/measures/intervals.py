"""Paired bootstrap 95 % intervals: items are resampled, all conditions of an item together.

Percentile intervals (Efron & Tibshirani 1993, ch. 13) from a fixed seed, so that a report is
repeatable; two statistics of the same n see the same resamples, and are so paired.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvtransfer.report import Estimate

RESAMPLES = 5_000
SEED = 20_260_803
BLOCK = 2_000_000
"""Numbers that are resampled at a time."""

Column = NDArray[np.float64]


def mean(items: Column) -> Estimate:
    """The mean over items."""
    return interval(lambda x: x.mean(-1), items)


def mean_exp(items: Column) -> Estimate:
    """The exponential of the mean: perplexity, from each item's NLL."""
    return interval(lambda x: np.exp(x.mean(-1)), items)


def mean_ratio(above: Column, below: Column) -> Estimate | None:
    """Mean of ``above`` over mean of ``below``; None where there is nothing to be a share of."""
    if len(below) and below.mean() == 0:
        return None
    return interval(lambda a, b: a.mean(-1) / b.mean(-1), above, below)


def interval(
    statistic: Callable[..., Column | np.float64],
    *columns: Column,
    level: float = 0.95,
    strata: Sequence[int] = (),
) -> Estimate:
    """The statistic of the columns, one number an item in each, with its interval.

    Args:
        statistic: Takes the columns, reduces their last axis; it must also work on two axes.
        columns: One row per item, the same items in each.
        level: Coverage.
        strata: How many items each of some groups has, one group after another in the columns;
            items are then resampled within their group, and stay where they stand.

    With one item, or where resamples leave the statistic undefined, there is no interval.
    """
    n = len(columns[0])
    if n == 0 or any(len(column) != n for column in columns):
        raise ValueError(f"columns of {[len(column) for column in columns]} items cannot be paired")
    sizes = list(strata) or [n]
    if sum(sizes) != n or min(sizes) < 1:
        raise ValueError(f"groups of {sizes} items, and {n} items")
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(*columns))
        if max(sizes) == 1:
            return Estimate(value, None, None, n)
        random = np.random.default_rng(SEED)
        starts = np.cumsum([0, *sizes[:-1]])
        # In blocks, for 5,000 resamples of a large benchmark would fill the memory.
        blocks = np.diff([*range(0, RESAMPLES, max(1, BLOCK // n)), RESAMPLES])
        parts = []
        for rows in blocks:
            drawn = [
                start + random.integers(size, size=(rows, size))
                for start, size in zip(starts, sizes, strict=True)
            ]
            draws = np.concatenate(drawn, axis=1)
            parts.append(statistic(*(column[draws] for column in columns)))
        resampled = np.concatenate(parts)
        tail = 50 * (1 - level)
        low, high = np.percentile(resampled, [tail, 100 - tail])
    if not (np.isfinite(low) and np.isfinite(high)):
        return Estimate(value, None, None, n)
    return Estimate(value, float(low), float(high), n)


__all__ = ["RESAMPLES", "SEED", "interval", "mean", "mean_exp", "mean_ratio"]
