"""Our ridge is scikit-learn's, from moments alone, and it refuses what rows cannot determine."""

from functools import reduce
from operator import add

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LinearRegression
from sklearn.linear_model import Ridge as SklearnRidge
from torch import Tensor

from kvtransfer.errors import UnderdeterminedFit
from kvtransfer.fitting.affine import Affine
from kvtransfer.fitting.moments import Moments
from kvtransfer.fitting.solvers import SOLVERS, Ridge


def sample(n: int = 200, p: int = 6, q: int = 4, *, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows with unequal variances, an offset and noise."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(n, p, generator=random, dtype=torch.float64) * torch.logspace(-1, 1, p) + 3
    slope = torch.randn(p, q, generator=random, dtype=torch.float64)
    noise = torch.randn(n, q, generator=random, dtype=torch.float64)
    return x.double(), x.double() @ slope - 2 + 0.3 * noise


def assert_is(fitted: Affine, oracle: "SklearnRidge | LinearRegression") -> None:
    weight, bias = torch.from_numpy(oracle.coef_.T), torch.from_numpy(oracle.intercept_)
    torch.testing.assert_close(fitted.weight, weight, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(fitted.bias, bias, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("strength", [1e-2, 1.0, 300.0])
def test_absolute_strength_is_scikit_learns_alpha(strength: float) -> None:
    x, y = sample()

    fitted = Ridge(strength, scale="absolute").solve(Moments.of(x, y))

    assert_is(fitted, SklearnRidge(alpha=strength, fit_intercept=True, solver="svd").fit(x, y))


@pytest.mark.parametrize("strength", [1e-3, 0.5])
def test_relative_strength_is_a_share_of_the_mean_diagonal(strength: float) -> None:
    x, y = sample()
    moments = Moments.of(x, y)

    fitted = Ridge(strength).solve(moments)

    alpha = strength * float(((x - x.mean(0)) ** 2).sum(0).mean())
    assert_is(fitted, SklearnRidge(alpha=alpha, fit_intercept=True, solver="svd").fit(x, y))
    torch.testing.assert_close(fitted.weight, Ridge(alpha, scale="absolute").solve(moments).weight)


def test_no_strength_is_ordinary_least_squares() -> None:
    x, y = sample()

    assert_is(Ridge(0.0).solve(Moments.of(x, y)), LinearRegression().fit(x, y))


@given(scale=st.floats(1e-3, 1e3), repeats=st.integers(1, 4))
def test_relative_strength_means_the_same_for_large_features_and_for_many_rows(
    scale: float, repeats: int
) -> None:
    x, y = sample()
    plain = Ridge(0.1).solve(Moments.of(x, y))

    grown = Ridge(0.1).solve(Moments.of((scale * x).repeat(repeats, 1), y.repeat(repeats, 1)))

    torch.testing.assert_close(grown(scale * x), plain(x))


def test_absolute_strength_does_not() -> None:
    x, y = sample()
    ridge = Ridge(10.0, scale="absolute")

    plain, grown = ridge.solve(Moments.of(x, y)), ridge.solve(Moments.of(0.01 * x, y))

    assert not torch.allclose(grown(0.01 * x), plain(x), rtol=0.01)


@settings(max_examples=25)
@given(cuts=st.lists(st.integers(1, 199), max_size=5, unique=True), flip=st.booleans())
def test_the_order_of_batches_does_not_matter(cuts: list[int], flip: bool) -> None:
    x, y = sample()
    pieces = zip(x.tensor_split(sorted(cuts)), y.tensor_split(sorted(cuts)), strict=True)
    batches = [Moments.of(*each) for each in pieces]

    fitted = Ridge().solve(reduce(add, reversed(batches) if flip else batches))

    whole = Ridge().solve(Moments.of(x, y))
    torch.testing.assert_close(fitted.weight, whole.weight)
    torch.testing.assert_close(fitted.bias, whole.bias)


@pytest.mark.parametrize("strength", [0.0, 1e-3])
@pytest.mark.parametrize("n", [2, 6])
def test_no_more_rows_than_features_is_refused_with_both_numbers(n: int, strength: float) -> None:
    with pytest.raises(UnderdeterminedFit, match=rf"\b{n} rows .* \b6 coefficients") as caught:
        Ridge(strength).solve(Moments.of(*sample(n)))

    assert caught.value.hint is not None
    assert "at least 7 rows" in caught.value.hint


def test_one_row_more_than_features_is_enough() -> None:
    x, y = sample(7)

    torch.testing.assert_close(Ridge(0.0).solve(Moments.of(x, y))(x), y, rtol=1e-6, atol=1e-6)


COLLINEAR = {
    "twice the same": lambda x: torch.cat((x, x[:, :1]), 1),
    "a sum of others": lambda x: torch.cat((x, x[:, :3].sum(1, keepdim=True)), 1),
    "a constant": lambda x: torch.cat((x, torch.full_like(x[:, :1], 0.1)), 1),
}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("dependent", COLLINEAR)
def test_features_that_depend_on_each_other_need_strength(dependent: str, seed: int) -> None:
    x, y = sample(seed=seed)
    moments = Moments.of(COLLINEAR[dependent](x), y)

    with pytest.raises(UnderdeterminedFit) as caught:
        Ridge(0.0).solve(moments)

    assert caught.value.hint is not None
    assert "raise strength" in caught.value.hint
    Ridge(1e-9).solve(moments)  # and a little of it is enough


@pytest.mark.parametrize("strength", [-1e-9, float("nan")])
def test_a_negative_strength_is_a_mistake(strength: float) -> None:
    with pytest.raises(ValueError, match="strength must be"):
        Ridge(strength)


def test_the_command_lines_solvers_are_named() -> None:
    assert SOLVERS["ridge"] is Ridge
