"""Held-out R² is scikit-learn's, and a reduced map is the best of its rank."""

import pytest
import torch
from sklearn.metrics import r2_score
from torch import Tensor

from kvtransfer.fitting.affine import Affine, LowRank, r2, reduce_rank
from kvtransfer.fitting.moments import Moments
from kvtransfer.fitting.solvers import Ridge

HEADS, WIDTH = 2, 3


def sample(n: int, *, seed: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=random, dtype=torch.float64) * torch.logspace(-1, 1, 5) + 1
    slope = torch.randn(5, 6, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    noise = torch.randn(n, 6, generator=random, dtype=torch.float64)
    # Dims of very different variance, so that weighing them by it matters.
    return x.double(), (x.double() @ slope + noise) * torch.logspace(-1, 1, 6).double()


def fitted() -> tuple[Affine, Moments]:
    moments = Moments.of(*sample(60, seed=0))
    return Ridge(1e-3).solve(moments), moments


def test_r2_is_scikit_learns_variance_weighted_score_of_each_head_on_held_out_rows() -> None:
    affine, _ = fitted()
    x, y = sample(40, seed=1)

    found = r2(affine, Moments.of(x, y), heads=HEADS)

    predicted = affine(x).view(-1, HEADS, WIDTH)
    for head in range(HEADS):
        expected = r2_score(
            y.view(-1, HEADS, WIDTH)[:, head],
            predicted[:, head],
            multioutput="variance_weighted",
        )
        assert float(found[head]) == pytest.approx(expected, abs=1e-9)


def test_the_mean_of_the_rows_explains_nothing_and_worse_is_negative() -> None:
    moments = Moments.of(*sample(40, seed=1))
    weight = torch.zeros(5, 6, dtype=torch.float64)

    mean = r2(Affine(weight, moments.mean_y), moments, heads=HEADS)
    off = r2(Affine(weight, moments.mean_y + 50), moments, heads=HEADS)

    torch.testing.assert_close(mean, torch.zeros(HEADS, dtype=torch.float64), rtol=0, atol=1e-12)
    assert bool((off < 0).all())


def test_a_head_that_never_varies_is_explained_by_its_value_alone() -> None:
    x, y = sample(40, seed=1)
    y[:, :WIDTH] = 2.0
    moments = Moments.of(x, y)
    weight = torch.zeros(5, 6, dtype=torch.float64)

    right, wrong = (
        r2(Affine(weight, torch.full((6,), value, dtype=torch.float64)), moments, heads=HEADS)
        for value in (2.0, 2.1)
    )

    assert float(right[0]) == 1.0
    assert float(wrong[0]) == 0.0


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_a_reduced_map_is_the_truncated_svd_of_the_whitened_fit(rank: int) -> None:
    affine, moments = fitted()
    x, _ = sample(60, seed=0)

    reduced = reduce_rank(affine, moments, rank)

    # With S = LLᵀ the scatter of x, ‖X(W − V)‖ over centred rows is ‖Lᵀ(W − V)‖: Eckart–Young.
    root = torch.linalg.cholesky(moments.xx)
    u, s, vh = torch.linalg.svd(root.mT @ affine.weight, full_matrices=False)
    best = torch.linalg.solve(root.mT, u[:, :rank] * s[:rank] @ vh[:rank])
    torch.testing.assert_close(reduced.down @ reduced.up, best)
    lost = ((affine(x) - reduced(x)) ** 2).sum()
    torch.testing.assert_close(lost, (s[rank:] ** 2).sum())


def test_the_svd_of_the_weight_itself_would_lose_more() -> None:
    affine, moments = fitted()
    x, _ = sample(60, seed=0)
    u, s, vh = torch.linalg.svd(affine.weight, full_matrices=False)
    naive = u[:, :2] * s[:2] @ vh[:2]

    reduced = reduce_rank(affine, moments, 2)

    centred = x - x.mean(0)
    lost = ((affine(x) - reduced(x)) ** 2).sum()
    assert float((centred @ (affine.weight - naive)).square().sum()) > 1.5 * float(lost)


@pytest.mark.parametrize("rank", [5, 6, 64])
def test_full_rank_is_the_same_map(rank: int) -> None:
    affine, moments = fitted()
    x, _ = sample(10, seed=3)

    torch.testing.assert_close(reduce_rank(affine, moments, rank)(x), affine(x))


def test_a_reduced_map_sends_mean_to_mean() -> None:
    affine, moments = fitted()

    torch.testing.assert_close(reduce_rank(affine, moments, 1)(moments.mean_x), moments.mean_y)


def test_parameters_are_counted() -> None:
    affine, moments = fitted()

    assert affine.parameters == 5 * 6 + 6
    assert reduce_rank(affine, moments, 2).parameters == 5 * 2 + 2 * 6 + 6


def test_maps_work_in_the_dtype_of_their_rows_and_keep_leading_axes() -> None:
    affine, moments = fitted()
    x, _ = sample(12, seed=3)
    rows = x.float().view(3, 4, 5)

    for each in (affine, reduce_rank(affine, moments, 6)):
        assert isinstance(each, Affine | LowRank)
        single = each.float()
        assert single.bias.dtype == torch.float32
        assert single(rows).shape == (3, 4, 6)
        torch.testing.assert_close(
            single(rows).double().flatten(0, 1), affine(x), rtol=1e-4, atol=1e-4
        )
