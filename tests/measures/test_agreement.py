"""The measures of a prediction are torch's and scipy's."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import spatial, special
from torch import Tensor
from torch.nn import functional

from kvtransfer.measures.agreement import cosine, kl, nll, top1_agreement


def logits(*, seed: int = 0, scale: float = 3.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (scale * torch.randn(7, 11, generator=torch.Generator().manual_seed(seed))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_nll_is_cross_entropy_in_float32_whatever_the_logits_come_in(dtype: torch.dtype) -> None:
    predicted, ids = logits(dtype=dtype), torch.arange(7)

    found = nll(predicted, ids)

    assert found.dtype == torch.float32
    expected = functional.cross_entropy(predicted.float(), ids, reduction="none")
    torch.testing.assert_close(found, expected)


def test_kl_is_the_sum_of_scipys_relative_entropies() -> None:
    own, other = logits(), logits(seed=1)
    p, q = (special.softmax(x.double().numpy(), axis=-1) for x in (own, other))

    expected = torch.from_numpy(special.rel_entr(p, q).sum(-1)).float()

    torch.testing.assert_close(kl(own, other), expected, rtol=1e-5, atol=1e-6)


def test_kl_is_torchs_kl_div_with_the_arguments_the_right_way_round() -> None:
    own, other = logits(), logits(seed=1)

    divergence = functional.kl_div(
        other.log_softmax(-1), own.log_softmax(-1), reduction="none", log_target=True
    )

    torch.testing.assert_close(kl(own, other), divergence.sum(-1))
    assert not torch.allclose(kl(own, other), kl(other, own), rtol=0.01)  # it has a direction


@given(seed=st.integers(0, 10_000), scale=st.floats(0.01, 30))
def test_kl_is_never_negative_and_zero_for_the_same_prediction(seed: int, scale: float) -> None:
    own, other = logits(seed=seed, scale=scale), logits(seed=seed + 1, scale=scale)

    assert bool((kl(own, other) >= -1e-5).all())
    # Adding a constant to all logits predicts the same.
    torch.testing.assert_close(kl(own, own + 2.0), torch.zeros(7), rtol=0, atol=1e-4)


def test_top1_agrees_where_both_rank_one_token_first() -> None:
    own = torch.tensor([[0.0, 2.0, 1.0], [5.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    other = torch.tensor([[1.0, 9.0, 8.0], [0.0, 0.1, 0.0], [0.0, 0.0, 0.2]])

    assert top1_agreement(own, other).tolist() == [True, False, True]


def test_cosine_is_one_minus_scipys_distance() -> None:
    a, b = logits(), logits(seed=1)

    expected = [
        1 - spatial.distance.cosine(x.numpy(), y.numpy()) for x, y in zip(a, b, strict=True)
    ]

    torch.testing.assert_close(cosine(a, b), torch.tensor(expected, dtype=torch.float32))


def test_cosine_ignores_length_and_keeps_leading_axes() -> None:
    a = logits().view(7, 1, 11).expand(7, 2, 11)

    torch.testing.assert_close(cosine(a, 3 * a), torch.ones(7, 2))
    torch.testing.assert_close(cosine(a, -a), -torch.ones(7, 2))


def test_nothing_has_a_direction_that_agrees_with_anything() -> None:
    assert cosine(torch.zeros(2, 3), torch.ones(2, 3)).tolist() == [0.0, 0.0]
