"""The nucleus is the smallest set that has enough chance, and a draw from it is fair."""

import pytest
import torch
from torch import Tensor

from kvtransfer.measures.nucleus import FIRST_LOOK, draw, nucleus, top_overlap, total_variation


def logits(rows: int, words: int, spread: float = 3.0) -> Tensor:
    return spread * torch.randn(rows, words, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.95, 1.0])
@pytest.mark.parametrize("words", [1, 2, 40, 3 * FIRST_LOOK])
@pytest.mark.parametrize("spread", [3.0, 0.01])
def test_it_is_the_smallest_set_with_enough_chance(top_p: float, words: int, spread: float) -> None:
    given = logits(3, words, spread)

    found = nucleus(given, top_p)

    for row, kept in zip(given.softmax(-1).double(), found, strict=True):
        order = row.argsort(descending=True)
        size = int((kept > 0).sum())
        assert set(kept.nonzero()[:, 0].tolist()) == set(order[:size].tolist())
        assert row[order[:size]].sum() >= top_p - 1e-6
        assert size == 1 or row[order[: size - 1]].sum() < top_p
        torch.testing.assert_close(kept[order[:size]], row[order[:size]] / row[order[:size]].sum())


def test_draws_come_as_often_as_their_chance() -> None:
    chances = nucleus(logits(1, 12), 0.9)
    uniform = (torch.arange(10_000) + 0.5).double() / 10_000

    drawn = draw(chances.expand(10_000, -1), uniform)

    shares = torch.bincount(drawn, minlength=12).double() / 10_000
    torch.testing.assert_close(shares, chances[0], atol=2e-4, rtol=0)
    assert not bool(chances[0, drawn].eq(0).any())


@pytest.mark.parametrize("uniform", [0.0, 1 - 1e-12])
def test_at_the_edges_a_draw_is_a_token_with_chance(uniform: float) -> None:
    chances = torch.tensor([[0.0, 0.25, 0.75, 0.0]], dtype=torch.double)

    token = int(draw(chances, torch.tensor([uniform], dtype=torch.double)))

    assert token == (1 if uniform == 0.0 else 2)


def test_total_variation_is_the_chance_that_moves() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [0.2, 0.3, 0.5]])
    q = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.0, 1.0], [0.2, 0.3, 0.5]])

    torch.testing.assert_close(total_variation(p, q), torch.tensor([0.25, 1.0, 0.0]))


def test_overlap_counts_the_best_that_both_have() -> None:
    a = torch.tensor([[9.0, 8.0, 7.0, 0.0, 1.0]])
    b = torch.tensor([[9.0, 0.0, 7.0, 8.0, 1.0]])

    assert top_overlap(a, b, 3).tolist() == [2]
    assert top_overlap(a, b, 25).tolist() == [5]  # there are no more
