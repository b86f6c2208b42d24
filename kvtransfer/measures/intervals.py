"""Paired bootstrap 95 % intervals: items are resampled, all conditions of an item together.

Percentile intervals (Efron & Tibshirani 1993, ch. 13) from a fixed seed, so that a report is
repeatable; two statistics of the same n see the same resamples, and are so paired.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvtransfer.report import Estimate

RESAMPLES = 5_000
SEED = 20_260_803

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
    statistic: Callable[..., Column | np.float64], *columns: Column, level: float = 0.95
) -> Estimate:
    """The statistic of the columns, one number an item in each, with its interval.

    Args:
        statistic: Takes the columns, reduces their last axis; it must also work on two axes.
        columns: One row per item, the same items in each.
        level: Coverage.

    With one item, or where resamples leave the statistic undefined, there is no interval.
    """
    n = len(columns[0])
    if n == 0 or any(len(column) != n for column in columns):
        raise ValueError(f"columns of {[len(column) for column in columns]} items cannot be paired")
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(*columns))
        if n == 1:
            return Estimate(value, None, None, n)
        draws = np.random.default_rng(SEED).integers(n, size=(RESAMPLES, n))
        resampled = statistic(*(column[draws] for column in columns))
        tail = 50 * (1 - level)
        low, high = np.percentile(resampled, [tail, 100 - tail])
    if not (np.isfinite(low) and np.isfinite(high)):
        return Estimate(value, None, None, n)
    return Estimate(value, float(low), float(high), n)


__all__ = ["RESAMPLES", "SEED", "interval", "mean", "mean_exp", "mean_ratio"]
