"""Moments are a sum: of any batches, in any order, at any offset."""

from collections.abc import Sequence
from functools import reduce
from itertools import pairwise
from operator import add
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvtransfer.fitting.band import Band
from kvtransfer.fitting.layout import Layout, Piece
from kvtransfer.fitting.moments import Moments
from kvtransfer.fitting.sums import Sums

FIELDS = ("mean_x", "mean_y", "xx", "xy", "yy")


def sample(n: int = 64, p: int = 5, q: int = 3, *, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(n, p, generator=random, dtype=torch.float64)
    y = x[:, :1] + torch.randn(n, q, generator=random, dtype=torch.float64)
    return x + offset, y + offset


def assert_same(found: Moments, expected: Moments, *, rtol: float = 1e-10) -> None:
    assert found.n == expected.n
    for field in FIELDS:
        a, b = getattr(found, field), getattr(expected, field)
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * float(b.abs().max()))


def sums(p: int, q: int, *, cuts: Sequence[int] = (), **how: Any) -> Sums:
    """Of p source features, cut into pieces, and q target features."""
    ends = pairwise((0, *cuts, p))
    sources = [Piece(start, stop, 0) for start, stop in ends]
    return Sums(Layout.over(sources, [Piece(0, q, 0)], Band(None, 1, 1)), **how)


@pytest.mark.parametrize(
    ("p", "cuts"), [(1, ()), (2, (1,)), (5, ()), (5, (1, 2, 3, 4)), (7, (3,)), (9, (2, 4, 8))]
)
def test_moments_are_numpys_whatever_pieces_the_scatter_is_made_of(
    p: int, cuts: tuple[int, ...]
) -> None:
    x, y = sample(p=p)
    gathered = sums(p, 3, cuts=cuts)
    gathered.add(x, y)

    found = gathered.moments().dense()

    assert_same(found, Moments.of(x, y))

    joint = np.cov(np.hstack([x, y]).T, ddof=0).reshape(p + 3, p + 3) * 64
    torch.testing.assert_close(found.mean_x, x.mean(0))
    torch.testing.assert_close(found.mean_y, y.mean(0))
    torch.testing.assert_close(found.xx, torch.from_numpy(joint[:p, :p]))
    torch.testing.assert_close(found.xy, torch.from_numpy(joint[:p, p:]))
    torch.testing.assert_close(found.yy, torch.from_numpy(joint[p:, p:]).diagonal())


@given(
    cuts=st.lists(st.integers(0, 64), max_size=6),
    order=st.randoms(use_true_random=False),
    offset=st.sampled_from([0.0, 1e3]),
)
def test_how_a_corpus_is_batched_does_not_matter(
    cuts: list[int], order: Random, offset: float
) -> None:
    x, y = sample(offset=offset)
    batches = list(zip(x.tensor_split(sorted(cuts)), y.tensor_split(sorted(cuts)), strict=True))
    order.shuffle(batches)
    gathered = sums(5, 3, cuts=(2,))

    for batch in batches:
        gathered.add(*batch)
    added = reduce(add, (Moments.of(*batch) for batch in batches if len(batch[0])))

    whole = Moments.of(x, y)
    assert_same(gathered.moments().dense(), whole)
    assert_same(added, whole)


def test_no_rows_are_the_zero_of_the_sum() -> None:
    nothing, something = Moments.of(*sample(0)), Moments.of(*sample())

    assert nothing.n == 0
    assert_same(nothing + something, something)
    assert_same(something + nothing, something)


def test_an_offset_of_a_thousand_costs_no_digits_of_the_scatter() -> None:
    here, far = Moments.of(*sample()), Moments.of(*sample(offset=1e3))

    for field in ("xx", "xy", "yy"):
        torch.testing.assert_close(getattr(far, field), getattr(here, field), rtol=1e-9, atol=1e-9)


def test_the_textbook_shortcut_would_lose_them_in_float32() -> None:
    x, _ = sample(offset=1e3)
    rows = x.float()
    gathered = sums(5, 5, products=torch.float32)
    gathered.add(rows, rows)

    shortcut = rows.mT @ rows - 64 * torch.outer(rows.mean(0), rows.mean(0))

    expected = Moments.of(*sample()).xx
    scale = float(expected.abs().max())
    assert float((shortcut.double() - expected).abs().max()) > 0.05 * scale
    assert float((gathered.moments().dense().xx - expected).abs().max()) < 1e-4 * scale


def test_twins_left_out_of_a_batch_stand_at_their_mean_in_it() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(30, 3, generator=generator, dtype=torch.float64)
    order = torch.randperm(20, generator=generator)
    gathered = sums(4, 3, twins=True)
    gathered.add(x[:20], y[:20], order=order)
    gathered.add(x[20:], y[20:])

    twin = torch.cat((y[:20][order], y[:20].mean(0).expand(10, 3)))
    expected = Moments.of(x, torch.cat((y, twin), dim=1))
    assert_same(gathered.moments().dense(), expected)


def test_float32_products_are_close_and_double_ones_closer() -> None:
    x, y = sample(n=4_096)
    single, double = sums(5, 3, products=torch.float32), sums(5, 3)
    for batch in zip(x.split(512), y.split(512), strict=True):
        single.add(*batch)
        double.add(*batch)

    whole, rounded = Moments.of(x, y), single.moments().dense()

    assert_same(double.moments().dense(), whole, rtol=1e-12)
    assert_same(rounded, whole, rtol=1e-6)
    assert rounded.xx.dtype == torch.float64
    assert not torch.allclose(rounded.xx, whole.xx, rtol=1e-12)  # they were in single precision


def test_the_scatter_of_float32_products_is_symmetric() -> None:
    x, y = sample(p=7)
    gathered = sums(7, 3, cuts=(4,), products=torch.float32)
    gathered.add(x, y)

    scatter = gathered.moments().dense().xx

    assert torch.equal(scatter, scatter.mT)


@settings(max_examples=30)
@given(
    x=st.lists(st.integers(0, 4), min_size=1, max_size=7),
    y=st.lists(st.integers(0, 2), min_size=1, max_size=4),
)
def test_selecting_features_is_selecting_columns_in_the_order_given(
    x: list[int], y: list[int]
) -> None:
    rows = sample()

    found = Moments.of(*rows).select(torch.tensor(x), torch.tensor(y))

    assert_same(found, Moments.of(rows[0][:, x], rows[1][:, y]))
