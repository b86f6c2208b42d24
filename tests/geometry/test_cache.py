"""A cache is a value: whole, checked when made, and never changed."""

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvtransfer.errors import CacheLayoutError, RotationError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.geometry.rotation import Rotation


def blocks(shapes: list[tuple[int, ...]], seed: int = 0) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(*shape, generator=random) for shape in shapes)


def rotation(tokens: int = 5, batch: int = 1) -> Rotation:
    angles = torch.arange(tokens)[:, None] * torch.tensor([1.0, 0.1, 0.01])
    angles = angles.expand(batch, -1, -1)
    return Rotation(angles.cos(), angles.sin())


def cache(tokens: int = 5, batch: int = 1, **changed: Any) -> KVCache:
    """Two layers; the first turns 6 of its 8 key dims, the second none."""
    given: dict[str, Any] = {
        "keys": blocks([(batch, 2, tokens, 8)] * 2),
        "values": blocks([(batch, 2, tokens, 8)] * 2, seed=1),
        "positions": torch.arange(tokens).expand(batch, -1),
        "keys_are": "cached",
        "rotations": (rotation(tokens, batch), None),
        "model": "abc",
    }
    return KVCache(**(given | changed))


def same(a: KVCache, b: KVCache) -> bool:
    return all(
        map(torch.equal, (*a.keys, *a.values, a.positions), (*b.keys, *b.values, b.positions))
    )


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"keys": (), "values": ()}, "0 key layers, 0 value layers"),
        ({"values": blocks([(1, 2, 5, 8)])}, "2 key layers, 1 value layers"),
        ({"rotations": (None,)}, "1 rotations for 2 layers"),
        ({"keys": blocks([(1, 2, 5, 8), (1, 2, 4, 8)])}, r"disagree on length: \[4, 5\]"),
        ({"values": blocks([(1, 2, 4, 8)] * 2)}, r"disagree on length: \[4, 5\]"),
        ({"positions": torch.arange(4)[None]}, r"\(1, 2, 5, 8\) with positions of shape \(1, 4\)"),
        ({"positions": torch.arange(10).view(2, 5)}, r"with positions of shape \(2, 5\)"),
        ({"keys": blocks([(2, 2, 5, 8)] * 2)}, r"\(2, 2, 5, 8\) with positions of shape \(1, 5\)"),
        (
            {"keys": tuple(b.bfloat16() for b in blocks([(1, 2, 5, 8)] * 2))},
            r"several dtypes: \['torch.bfloat16', 'torch.float32'\]",
        ),
    ],
)
def test_a_cache_that_does_not_hold_together_is_refused_with_both_values(
    changed: dict[str, Any], says: str
) -> None:
    with pytest.raises(CacheLayoutError, match=says):
        cache(**changed)


def test_layers_may_differ_in_heads_and_width_and_keys_from_values() -> None:
    mixed = cache(keys=blocks([(1, 2, 5, 8), (1, 4, 5, 6)]), values=blocks([(1, 1, 5, 3)] * 2))

    assert [block.shape[1:] for block in mixed.keys] == [(2, 5, 8), (4, 5, 6)]


def test_a_cache_reads_as_a_sequence_of_layers() -> None:
    whole = cache()

    assert len(whole) == 2
    assert [keys is whole[i][0] for i, (keys, _) in enumerate(whole)] == [True, True]
    assert (whole.tokens, whole.batch, whole.dtype) == (5, 1, torch.float32)
    assert whole.nbytes == 2 * 2 * (2 * 5 * 8) * 4
    assert "2 layers × 2 heads × 5 tokens × 8" in repr(whole)


def test_nothing_in_a_cache_can_be_set() -> None:
    with pytest.raises(FrozenInstanceError):
        cache().keys = ()  # type: ignore[misc]


def test_as_content_is_content_and_asked_again_changes_nothing() -> None:
    given = cache()
    content = given.as_content()

    assert same(content, given.content())
    assert content.as_content() is content


def test_content_and_rotated_are_inverse() -> None:
    original = cache()

    content = original.content()
    back = content.rotated((rotation(), None))

    assert content.keys_are == "content"
    assert not torch.allclose(content.keys[0], original.keys[0])
    assert torch.equal(content.keys[1], original.keys[1])  # a layer without RoPE
    for a, b in zip(back.keys, original.keys, strict=True):
        torch.testing.assert_close(a, b)
    assert all(map(torch.equal, back.values, original.values))


@pytest.mark.parametrize(
    ("act", "says"),
    [
        (lambda c: c.content().content(), "content keys already"),
        (lambda c: c.rotated((None, None)), "rotated already"),
        (lambda c: replace(c, rotations=None).content(), "no record of the rotation"),
    ],
)
def test_turning_twice_or_blindly_is_refused(act: Callable[[KVCache], KVCache], says: str) -> None:
    with pytest.raises(RotationError, match=says) as caught:
        act(cache())

    assert caught.value.hint


@given(first=st.integers(0, 5), second=st.integers(0, 5))
def test_a_prefix_of_a_prefix_is_the_shorter_prefix(first: int, second: int) -> None:
    if second > first:
        first, second = second, first
    whole = cache()

    part = whole.prefix(first).prefix(second)

    assert same(part, whole.prefix(second))
    assert part.tokens == second


def test_a_prefix_can_still_be_turned_back() -> None:
    whole = cache()

    part = whole.prefix(3)

    assert torch.equal(part.content().keys[0], whole.content().keys[0][:, :, :3])
    assert part.model == whole.model


@pytest.mark.parametrize("tokens", [-1, 6])
def test_a_prefix_longer_than_the_cache_is_refused_with_both_lengths(tokens: int) -> None:
    with pytest.raises(CacheLayoutError, match=f"prefix of {tokens} tokens .* holds 5"):
        cache().prefix(tokens)


def test_expanding_shares_one_sequence_without_copying() -> None:
    one = cache()

    three = one.expand(3)

    assert three.batch == 3
    assert three.keys[0].data_ptr() == one.keys[0].data_ptr()
    assert all(torch.equal(row, one.keys[0][0]) for row in three.keys[0])
    assert torch.equal(three.content().keys[0][2], one.content().keys[0][0])
    with pytest.raises(CacheLayoutError, match="not one of 3"):
        three.expand(2)


def test_casting_casts_every_block_and_keeps_positions_and_tables_exact() -> None:
    narrow = cache().to(dtype=torch.bfloat16)

    assert {b.dtype for b in (*narrow.keys, *narrow.values)} == {torch.bfloat16}
    assert narrow.positions.dtype == torch.long
    assert narrow.rotations is not None
    assert narrow.rotations[0] is not None
    assert narrow.rotations[0].cos.dtype == torch.float32
    assert narrow.content().dtype == torch.bfloat16


def test_moving_keeps_layers_sharing_one_table() -> None:
    table = rotation()
    shared = cache(rotations=(table, table)).to(device="cpu").prefix(3).expand(2)

    assert shared.rotations is not None
    assert shared.rotations[0] is shared.rotations[1]


def test_nothing_here_changes_the_cache_it_was_asked_of() -> None:
    original, untouched = cache(), cache()

    original.content()
    original.prefix(2)
    original.expand(2)
    original.to(dtype=torch.float16)
    original.map(torch.zeros_like)

    assert same(original, untouched)


def test_mapping_over_a_cache_reaches_keys_and_values_alike() -> None:
    doubled = cache().map(lambda block: 2 * block)

    for ours, theirs in zip(
        (*doubled.keys, *doubled.values), (*cache().keys, *cache().values), strict=True
    ):
        assert torch.equal(ours, 2 * theirs)


@pytest.mark.parametrize("kind", ["keys", "values"])
def test_what_is_written_to_a_block_in_place_is_noticed(kind: str) -> None:
    whole = cache(tokens=5)
    cut, shared = whole.prefix(3), whole.expand(1)
    whole.require_unchanged()

    getattr(whole, kind)[1][0, 0, 0] += 1

    for each in (whole, cut, shared):  # they share their memory
        with pytest.raises(CacheLayoutError, match=f"the {kind} of layer 1 were written") as caught:
            each.require_unchanged()
        assert "clone" in str(caught.value.hint)
    for use in (KVCache.content, lambda c: c.prefix(2), lambda c: c.expand(3), lambda c: c.to()):
        with pytest.raises(CacheLayoutError, match="in place"):
            use(whole)


def test_a_cache_made_under_inference_mode_can_be_used() -> None:
    with torch.inference_mode():
        value = cache(tokens=2)

    value.require_unchanged()
    assert value.content().tokens == 2


def test_a_note_stays_with_a_cache() -> None:
    noted = cache(tokens=4, note="dequantised")

    assert noted.prefix(2).note == noted.to(dtype=torch.float64).note == "dequantised"
    assert "dequantised" in repr(noted)


def test_what_a_cache_is_not_stays_with_it_and_shows() -> None:
    graft = cache(tokens=4, approximate="read without the text before it")
    there = torch.arange(4)[None]

    for same in (
        graft.prefix(2),
        graft.expand(2),
        graft.to(dtype=torch.float64),
        graft.map(torch.neg),
        graft.content(),
        graft.as_content(),
        graft.content().rotated((rotation(4), None)),
        graft.content().take(there, there),
        graft.content().take(there.flip(1), there),
    ):
        assert same.approximate == "read without the text before it"
    assert "approximate: read without the text before it" in repr(graft)
    assert "approximate" not in repr(cache())


@pytest.mark.parametrize(
    ("index", "positions", "exact"),
    [
        ([0, 1, 2], [0, 1, 2], True),
        ([0, 1, 2], [7, 8, 9], True),
        ([], [], True),
        ([1, 2, 3], [0, 1, 2], False),
        ([0, 1, 1], [0, 1, 2], False),
        ([0, 1, 2], [0, 1, 3], False),
        ([0, 0, 1, 1, 2, 2, 0, 1, 2], list(range(9)), False),
    ],
    ids=["first", "moved", "none", "not the first", "twice", "apart", "more than there are"],
)
def test_tokens_taken_out_of_their_place_are_said_to_be_so(
    index: list[int], positions: list[int], exact: bool
) -> None:
    taken = (
        cache()
        .content()
        .take(torch.tensor([index], dtype=torch.long), torch.tensor([positions], dtype=torch.long))
    )

    assert (taken.approximate is None) is exact
