"""A rotation undoes itself, in both pairings, whole or partial, stretched or not."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch import Tensor

from kvtransfer.geometry.rotation import Rotation
from kvtransfer.geometry.spec import Pairing


def table(pairs: int, pairing: Pairing, *, stretch: float = 1.0) -> Rotation:
    frequencies = 100.0 ** -(torch.arange(pairs) / pairs)
    angles = (torch.arange(6)[:, None] * frequencies)[None]
    return Rotation(angles.cos() * stretch, angles.sin() * stretch, pairing)


def keys(width: int = 8, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(1, 2, 6, width, generator=torch.Generator().manual_seed(0)).to(dtype)


PAIRINGS: list[Pairing] = ["half", "interleaved"]


@pytest.mark.parametrize("pairing", PAIRINGS)
@given(pairs=st.integers(1, 4), stretch=st.floats(0.5, 2.0))
def test_undo_inverts_apply_and_apply_undo(pairing: Pairing, pairs: int, stretch: float) -> None:
    rotation, original = table(pairs, pairing, stretch=stretch), keys()

    torch.testing.assert_close(rotation.undo(rotation.apply(original)), original)
    torch.testing.assert_close(rotation.apply(rotation.undo(original)), original)


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_a_pair_turns_as_a_complex_number_does(pairing: Pairing) -> None:
    rotation, original = table(4, pairing), keys()
    left, right = (
        (slice(0, 4), slice(4, 8)) if pairing == "half" else (slice(0, 8, 2), slice(1, 8, 2))
    )

    turned = rotation.apply(original).numpy()

    x = original.numpy()
    z = (x[..., left] + 1j * x[..., right]) * (rotation.cos + 1j * rotation.sin).numpy()[:, None]
    np.testing.assert_allclose(turned[..., left], z.real, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(turned[..., right], z.imag, rtol=1e-5, atol=1e-6)


def test_the_pairings_are_not_the_same() -> None:
    half, interleaved = (table(4, pairing).apply(keys()) for pairing in PAIRINGS)

    assert not torch.allclose(half, interleaved, atol=0.1)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_not_rotated_passes_bit_for_bit(pairing: Pairing, dtype: torch.dtype) -> None:
    original = keys(dtype=dtype)

    turned = table(3, pairing).apply(original)

    assert turned.dtype == dtype
    assert torch.equal(turned[..., 6:], original[..., 6:])
    assert not torch.equal(turned[..., :6], original[..., :6])


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_a_stretch_lengthens_keys_and_undo_takes_it_out(pairing: Pairing) -> None:
    original = keys()

    turned = table(4, pairing, stretch=1.25).apply(original)

    torch.testing.assert_close(turned.norm(dim=-1), 1.25 * original.norm(dim=-1))


def test_bfloat16_keys_are_turned_in_float32_and_rounded_once() -> None:
    rotation, narrow = table(4, "half"), keys(dtype=torch.bfloat16)

    expected = rotation.apply(narrow.float()).bfloat16()

    assert torch.equal(rotation.apply(narrow), expected)


def test_scores_depend_on_how_far_apart_two_tokens_are_only() -> None:
    query, key = keys()[:, :, :1].expand(-1, -1, 6, -1), keys()[:, :, 1:2].expand(-1, -1, 6, -1)
    rotation = table(4, "half")

    scores = rotation.apply(query) @ rotation.apply(key).mT

    torch.testing.assert_close(scores[..., 1:, 1:], scores[..., :-1, :-1], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(scores[..., 0, 1:], scores[..., 0, :-1], atol=0.1)


def test_an_unknown_pairing_cannot_turn_anything() -> None:
    with pytest.raises(ValueError, match="which dims pair"):
        Rotation(torch.ones(1, 6, 4), torch.zeros(1, 6, 4), "unknown")


def test_shapes_are_checked_while_testing() -> None:
    with pytest.raises(TypeCheckError):
        Rotation(torch.ones(1, 6, 4), torch.zeros(1, 7, 4))
