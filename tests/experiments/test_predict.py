"""The statistics of what predicts transfer are scipy's and scikit-learn's."""

from typing import Any

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from experiments.predict import association
from kvtransfer.measures.intervals import Column

RANDOM = np.random.default_rng(3)
X: Column = RANDOM.normal(size=24)
Y: Column = X + RANDOM.normal(size=24)
TIED: Column = np.round(X)
GOOD = Y > 0.3


@pytest.mark.parametrize("x", [X, TIED], ids=["plain", "tied"])
def test_correlations_are_scipys(x: Column) -> None:
    assert association.pearson(x, Y) == pytest.approx(stats.pearsonr(x, Y).statistic)
    assert association.spearman(x, Y) == pytest.approx(stats.spearmanr(x, Y).statistic)
    assert association.pearson(x, Y) != pytest.approx(association.spearman(x, Y))


def test_ranks_are_scipys_on_every_row() -> None:
    rows = np.stack([TIED, X, -TIED])

    np.testing.assert_array_equal(association.ranks(rows), stats.rankdata(rows, axis=-1))


@pytest.mark.parametrize("kind", ["pearson", "spearman"])
def test_an_interval_of_a_correlation_is_scipys_percentile_bootstrap(kind: str) -> None:
    correlation = getattr(association, kind)
    theirs_of: dict[str, Any] = {"pearson": stats.pearsonr, "spearman": stats.spearmanr}

    def statistic(x: Column, y: Column) -> float:
        return float(theirs_of[kind](x, y).statistic)

    found = association.correlated(correlation, X, Y)
    theirs = stats.bootstrap(
        (X, Y),
        statistic,
        paired=True,
        vectorized=False,
        n_resamples=2_000,
        method="percentile",
        random_state=1,
    ).confidence_interval

    assert found.n == 24
    assert found.low == pytest.approx(theirs.low, abs=0.06)
    assert found.high == pytest.approx(theirs.high, abs=0.06)
    unpaired = association.correlated(correlation, X, RANDOM.permutation(Y))
    assert unpaired.low is not None
    assert unpaired.low < 0 < theirs.low


@pytest.mark.parametrize("x", [X, TIED], ids=["plain", "tied"])
def test_auc_is_scikit_learns(x: Column) -> None:
    found = association.auc_interval(x, GOOD)

    assert association.auc(x, GOOD) == pytest.approx(roc_auc_score(GOOD, x))
    assert found.value == pytest.approx(roc_auc_score(GOOD, x))
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.value <= found.high <= 1
    assert association.auc(-x, GOOD) == pytest.approx(1 - found.value)


def test_an_auc_s_interval_is_scipys_with_both_kinds_resampled_apart() -> None:
    found = association.auc_interval(X, GOOD)

    def chance(good: Column, bad: Column) -> float:
        return float((good[:, None] > bad).mean())

    theirs = stats.bootstrap(
        (X[GOOD], X[~GOOD]),
        chance,
        vectorized=False,
        n_resamples=2_000,
        method="percentile",
        random_state=1,
    ).confidence_interval

    assert found.low == pytest.approx(theirs.low, abs=0.03)
    assert found.high == pytest.approx(theirs.high, abs=0.03)


def test_where_all_are_alike_there_is_nothing_to_tell_apart() -> None:
    with pytest.raises(ValueError, match="nothing to tell apart"):
        association.auc(X, np.ones(24, dtype=bool))


def test_a_threshold_has_the_best_balanced_accuracy_of_all() -> None:
    at = association.threshold(X, GOOD)
    tried = [balanced_accuracy_score(GOOD, x <= X) for x in X]

    assert balanced_accuracy_score(GOOD, at <= X) == pytest.approx(max(tried))
    assert min(tried) < max(tried)
    assert at not in X


def test_left_out_is_what_a_loop_over_all_others_gives() -> None:
    right = []
    for i in range(24):
        kept = np.arange(24) != i
        right.append((X[i] >= association.threshold(X[kept], GOOD[kept])) == GOOD[i])

    assert association.left_out(X, GOOD) == pytest.approx(np.mean(right))


def test_what_one_family_alone_shows_is_no_more_there_without_it() -> None:
    """Within each family score and usefulness are unrelated; one family is just better."""
    score = np.array([0.0, 1, 2, 3, 10, 11, 12, 13])
    usable = np.array([False] * 4 + [True] * 4)
    families = ["a"] * 4 + ["b"] * 4

    assert association.left_out(score, usable) == 1
    assert association.left_out(score, usable, families) == 0
    worth = np.array([1.0, 0, 0, 1, 11, 10, 10, 11])
    assert association.pearson(score, worth) > 0.9
    without = association.without_each(association.pearson, score, worth, families)
    assert without == pytest.approx({"a": 0, "b": 0})
