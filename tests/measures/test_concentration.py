"""Concentration is 1 for an error that knows nothing of attention, and tells where others lie."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvtransfer.measures.concentration import key_concentration, value_concentration

HEADS, TOKENS, QUERIES, WIDTH = 2, 4000, 64, 8


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def queries(*, directions: int = WIDTH, seed: int = 1) -> Tensor:
    """They look along the first directions of a random basis, along each twice as hard as along
    the next."""
    sizes = torch.tensor([2.0**-i if i < directions else 0.0 for i in range(WIDTH)])
    return normal(HEADS, QUERIES, WIDTH, seed=seed) * sizes @ basis()


def basis() -> Tensor:
    """One direction a row."""
    found: Tensor = torch.linalg.qr(normal(WIDTH, WIDTH, seed=7)).Q
    return found


def attention(*, tokens: int = 20, seed: int = 2) -> Tensor:
    return (3 * normal(HEADS, QUERIES, tokens, seed=seed)).softmax(-1)


def test_an_isotropic_key_error_is_neutral_whatever_the_queries() -> None:
    found = key_concentration(normal(HEADS, TOKENS, WIDTH), queries())

    torch.testing.assert_close(found, torch.ones(HEADS), rtol=0, atol=0.06)


def test_queries_that_look_everywhere_alike_make_every_key_error_neutral() -> None:
    error = normal(HEADS, TOKENS, 1) * basis()[0]
    everywhere = basis().expand(HEADS, -1, -1)

    torch.testing.assert_close(key_concentration(error, everywhere), torch.ones(HEADS))


def test_a_key_error_along_the_top_query_direction_weighs_most() -> None:
    looked = queries()
    _, sizes, directions = torch.linalg.svd(looked, full_matrices=False)
    share = WIDTH * sizes.square() / sizes.square().sum(-1, keepdim=True)
    noise = normal(HEADS, 50, 1)

    for index in range(WIDTH):
        error = noise * directions[:, index, None]
        torch.testing.assert_close(
            key_concentration(error, looked), share[:, index], rtol=1e-3, atol=1e-4
        )
    assert bool((share[:, 0] > 4).all())
    assert bool((share[:, -1] < 0.01).all())


def test_a_key_error_that_no_query_looks_along_weighs_nothing() -> None:
    hidden, read = normal(HEADS, 50, 3) @ basis()[5:], normal(HEADS, 50, 3) @ basis()[2:5]
    looked = queries(directions=5)

    torch.testing.assert_close(
        key_concentration(hidden, looked), torch.zeros(HEADS), rtol=0, atol=1e-5
    )
    assert bool((key_concentration(read, looked) > 0.01).all())


def test_it_is_the_papers_sum_over_singular_vectors() -> None:
    error, looked = normal(HEADS, 50, WIDTH) @ torch.diag(torch.arange(WIDTH) + 0.5), queries()
    _, sizes, directions = torch.linalg.svd(looked, full_matrices=False)
    energy = (error @ directions.mT).square().sum(1)

    weighted = (sizes.square() * energy).sum(-1) / sizes.square().sum(-1)

    torch.testing.assert_close(key_concentration(error, looked), weighted / energy.mean(-1))


def test_it_is_the_squared_error_of_scores_over_what_its_size_promises() -> None:
    error, looked = normal(HEADS, 50, WIDTH), queries()
    scores = (looked @ error.mT).square().sum((1, 2))
    sizes = error.square().sum((1, 2)) * looked.square().sum((1, 2))

    torch.testing.assert_close(key_concentration(error, looked), WIDTH * scores / sizes)


@given(seed=st.integers(0, 1000), larger=st.floats(0.01, 100), turned=st.booleans())
def test_neither_size_nor_a_common_basis_matters(seed: int, larger: float, turned: bool) -> None:
    error, looked = normal(HEADS, 30, WIDTH, seed=seed), queries(seed=seed)
    turn = torch.linalg.qr(normal(WIDTH, WIDTH, seed=seed + 1)).Q if turned else torch.eye(WIDTH)

    again = key_concentration(larger * error @ turn, looked @ turn / larger)

    torch.testing.assert_close(again, key_concentration(error, looked), rtol=1e-3, atol=1e-4)


def test_a_basis_of_the_error_alone_matters() -> None:
    """So keys and queries must stand in one space: both rotated, or neither."""
    error, looked = normal(HEADS, 30, 1) * basis()[0], queries()
    swapped = error @ basis().mT @ basis().flip(0)

    assert bool((key_concentration(error, looked) > 2).all())
    assert bool((key_concentration(swapped, looked) < 0.1).all())


def test_even_attention_makes_every_value_error_neutral() -> None:
    error = normal(HEADS, 20, WIDTH) * torch.arange(1, 21)[:, None]

    found = value_concentration(error, torch.full((HEADS, QUERIES, 20), 1 / 20))

    torch.testing.assert_close(found, torch.ones(HEADS))


def test_value_errors_of_one_size_are_neutral_whatever_attention_does() -> None:
    error = torch.nn.functional.normalize(normal(HEADS, 20, WIDTH), dim=-1)

    torch.testing.assert_close(value_concentration(error, attention()), torch.ones(HEADS))


def test_a_value_error_on_the_only_token_read_weighs_as_much_as_there_are_tokens() -> None:
    weights = torch.zeros(HEADS, QUERIES, 20)
    weights[..., 3] = 0.7  # a sink takes the rest
    on, off = torch.zeros(2, HEADS, 20, WIDTH)
    on[:, 3], off[:, 4] = 1.0, 1.0

    assert value_concentration(on, weights).tolist() == pytest.approx([20.0] * HEADS)
    assert value_concentration(off, weights).tolist() == [0.0] * HEADS


def test_it_is_the_squared_error_of_outputs_where_token_errors_are_orthogonal() -> None:
    sizes = torch.arange(1.0, 21)
    error, weights = torch.diag(sizes).expand(HEADS, -1, -1), attention()
    output = (weights @ error).square().sum((1, 2))
    alike = weights.square().sum((1, 2)) * sizes.square().mean()

    torch.testing.assert_close(value_concentration(error, weights), output / alike)


def test_heads_are_measured_apart() -> None:
    error, looked, weights = normal(HEADS, 20, WIDTH), queries(), attention()
    louder = error * torch.tensor([1.0, 50.0])[:, None, None] * torch.arange(20)[:, None]

    for head in range(HEADS):
        one = slice(head, head + 1)
        torch.testing.assert_close(
            key_concentration(louder, looked)[one], key_concentration(louder[one], looked[one])
        )
        torch.testing.assert_close(
            value_concentration(louder, weights)[one],
            value_concentration(louder[one], weights[one]),
        )


def test_no_error_lies_nowhere() -> None:
    error = torch.zeros(HEADS, 20, WIDTH)
    error[1] = 1.0

    assert key_concentration(error, queries()).isnan().tolist() == [True, False]
    assert value_concentration(error, attention()).isnan().tolist() == [True, False]


def test_half_precision_is_summed_in_single() -> None:
    error, looked = 300 * normal(HEADS, 20, WIDTH), 300 * queries()

    found = key_concentration(error.half(), looked.half())

    assert found.dtype == torch.float32
    torch.testing.assert_close(found, key_concentration(error, looked), rtol=1e-2, atol=1e-2)
