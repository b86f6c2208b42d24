"""Edits are functions from cache to cache: they compose, and change nothing but what they name."""

from dataclasses import replace

import pytest
import torch

from kvtransfer.errors import RotationError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.geometry.rotation import Rotation
from kvtransfer.steering.interventions import ForgetRotation, Part, Zero, chain


@pytest.fixture
def cache() -> KVCache:
    random = torch.Generator().manual_seed(0)
    keys, values = (
        tuple(torch.randn(1, 2, 6, 8, generator=random) for _ in range(2)) for _ in range(2)
    )
    angles = torch.arange(6)[None, :, None] * torch.tensor([1.0, 0.5, 0.2, 0.1])
    rotation = Rotation(angles.cos(), angles.sin())
    return KVCache(
        keys=keys,
        values=values,
        positions=torch.arange(6)[None],
        keys_are="cached",
        rotations=(rotation, rotation),
        model="abc",
    )


def same(a: KVCache, b: KVCache) -> bool:
    return all(map(torch.equal, (*a.keys, *a.values), (*b.keys, *b.values)))


@pytest.mark.parametrize("part", ["keys", "values", "both"])
def test_zeroing_a_part_zeroes_that_part_and_no_other(cache: KVCache, part: Part) -> None:
    before = cache.map(torch.clone)

    edited = Zero(part)(cache)

    for name in ("keys", "values"):
        found, original = getattr(edited, name), getattr(cache, name)
        if part in (name, "both"):
            assert not any(block.any() for block in found)
            assert [block.shape for block in found] == [block.shape for block in original]
        else:
            assert all(map(torch.equal, found, original))
    assert edited.model == cache.model
    assert same(cache, before)


def test_zeroing_keys_and_then_values_is_zeroing_both(cache: KVCache) -> None:
    assert same(chain(Zero("keys"), Zero("values"))(cache), Zero()(cache))


def test_forgetting_the_rotation_leaves_content_keys_that_say_they_are_cached(
    cache: KVCache,
) -> None:
    edited = ForgetRotation()(cache)

    assert edited.keys_are == "cached"
    assert all(map(torch.equal, edited.keys, cache.content().keys))
    assert all(map(torch.equal, edited.values, cache.values))
    torch.testing.assert_close(edited.keys[0][:, :, 0], cache.keys[0][:, :, 0])  # position 0
    assert not torch.allclose(edited.keys[0][:, :, 5], cache.keys[0][:, :, 5], atol=0.1)


def test_content_keys_have_no_rotation_to_forget(cache: KVCache) -> None:
    with pytest.raises(RotationError, match="no rotation to forget"):
        ForgetRotation()(cache.content())


def test_no_steps_are_no_change_and_steps_go_left_to_right(cache: KVCache) -> None:
    def double(each: KVCache) -> KVCache:
        return each.map(lambda block: 2 * block)

    def add_one(each: KVCache) -> KVCache:
        return replace(each, values=tuple(block + 1 for block in each.values))

    assert chain()(cache) is cache
    assert torch.equal(chain(double, add_one)(cache).values[0], 2 * cache.values[0] + 1)
    assert torch.equal(chain(add_one, double)(cache).values[0], 2 * (cache.values[0] + 1))
