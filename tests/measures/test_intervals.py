"""Our bootstrap is scipy's, paired, with one fixed seed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kvtransfer.measures import intervals
from kvtransfer.measures.intervals import Column, interval, mean, mean_exp, mean_ratio
from kvtransfer.report import Estimate


def items(n: int, *, seed: int = 0) -> Column:
    """Skewed, like NLLs."""
    return np.random.default_rng(seed).gamma(2.0, size=n)


def scipys(
    statistic: Callable[..., Any], *columns: Column, paired: bool
) -> tuple[float, float, float]:
    """scipy's percentile interval, and its standard error."""
    found = stats.bootstrap(
        columns,
        statistic,
        n_resamples=5_000,
        paired=paired,
        vectorized=True,
        method="percentile",
        rng=np.random.default_rng(1),
    )
    low, high = found.confidence_interval
    return float(low), float(high), float(found.standard_error)


def assert_close(found: Estimate | None, expected: tuple[float, float, float]) -> None:
    """To a quarter of a standard error: five times what two runs of 5,000 resamples differ by."""
    low, high, error = expected
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert abs(found.low - low) < error / 4
    assert abs(found.high - high) < error / 4


@pytest.mark.parametrize("n", [8, 64])
@pytest.mark.parametrize(
    ("ours", "statistic"),
    [
        (mean, lambda x, axis=-1: x.mean(axis)),
        (mean_exp, lambda x, axis=-1: np.exp(x.mean(axis))),
    ],
    ids=["mean", "mean_exp"],
)
def test_an_interval_is_scipys_percentile_bootstrap(
    n: int, ours: Callable[[Column], Estimate], statistic: Callable[..., Any]
) -> None:
    x = items(n)

    found = ours(x)

    assert found.value == pytest.approx(float(statistic(x)))
    assert found.n == n
    assert_close(found, scipys(statistic, x, paired=False))


def ratio(above: Column, below: Column, axis: int = -1) -> Any:
    return above.mean(axis) / below.mean(axis)


def test_a_ratio_resamples_both_columns_of_an_item_together() -> None:
    below = items(40)
    above = 0.8 * below + 0.05 * items(40, seed=1)

    assert_close(mean_ratio(above, below), scipys(ratio, above, below, paired=True))


def test_resampling_the_columns_apart_would_be_far_less_sure() -> None:
    below = items(40)
    above = 0.8 * below + 0.05 * items(40, seed=1)

    found = mean_ratio(above, below)
    low, high, _ = scipys(ratio, above, below, paired=False)

    assert found is not None
    assert found.low is not None
    assert found.high is not None
    assert high - low > 5 * (found.high - found.low)


def test_two_statistics_of_as_many_items_see_the_same_resamples() -> None:
    x = items(16)

    found, doubled = mean(x), mean(2 * x)

    assert doubled == Estimate(2 * found.value, 2 * _low(found), 2 * _high(found), 16)
    assert mean(x) == found


@given(
    x=st.lists(st.floats(-100, 100), min_size=2, max_size=12),
    shift=st.floats(-100, 100),
)
def test_shifting_every_item_shifts_the_interval(x: list[float], shift: float) -> None:
    column = np.array(x)

    found, moved = mean(column), mean(column + shift)

    for a, b in (
        (found.value, moved.value),
        (_low(found), _low(moved)),
        (_high(found), _high(moved)),
    ):
        assert b - a == pytest.approx(shift, abs=1e-9)


def test_one_item_has_no_interval() -> None:
    assert mean(np.array([2.5])) == Estimate(2.5, None, None, 1)


def test_equal_items_have_an_interval_of_no_width() -> None:
    assert mean(np.array([2.5, 2.5, 2.5])) == Estimate(2.5, 2.5, 2.5, 3)


def test_where_resamples_leave_a_ratio_undefined_there_is_no_interval() -> None:
    found = mean_ratio(np.array([1.0, 1.0, 1.0]), np.array([0.0, 0.0, 3.0]))

    assert found == Estimate(1.0, None, None, 3)


def test_a_share_of_nothing_is_no_number() -> None:
    assert mean_ratio(np.array([1.0, 2.0]), np.array([1.0, -1.0])) is None


def test_a_lower_level_gives_a_narrower_interval_inside() -> None:
    x = items(32)

    wide, narrow = mean(x), interval(lambda x: x.mean(-1), x, level=0.5)

    assert _low(wide) < _low(narrow) < wide.value < _high(narrow) < _high(wide)


@pytest.mark.parametrize("columns", [([1.0, 2.0], [1.0]), ([], [])], ids=["unequal", "empty"])
def test_columns_that_cannot_be_paired_are_refused(columns: tuple[list[float], ...]) -> None:
    with pytest.raises(ValueError, match="cannot be paired"):
        mean_ratio(*(np.array(column) for column in columns))


def _low(estimate: Estimate) -> float:
    assert estimate.low is not None
    return estimate.low


def _high(estimate: Estimate) -> float:
    assert estimate.high is not None
    return estimate.high


def test_how_many_numbers_are_resampled_at_a_time_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = mean(items(37))

    monkeypatch.setattr(intervals, "BLOCK", 1_000)

    assert mean(items(37)) == whole


def test_groups_are_resampled_each_for_itself() -> None:
    column = np.array([0.0] * 10 + [1.0] * 30)

    def average(x: Column) -> Column:
        return np.asarray(x.mean(-1))

    mixed = interval(average, column)
    apart = interval(average, column, strata=(10, 30))

    assert (apart.low, apart.value, apart.high) == (0.75, 0.75, 0.75)
    assert mixed.low is not None and mixed.low < 0.75
    assert interval(average, column, strata=(40,)) == mixed
    with pytest.raises(ValueError, match="groups of"):
        interval(average, column, strata=(10, 20))
