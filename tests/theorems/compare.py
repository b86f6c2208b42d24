"""How far apart two tensors are, and whether a cache is still the one it was."""

import torch
from torch import Tensor

from kvtransfer.geometry.cache import KVCache


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference, over the largest absolute value."""
    assert actual.shape == expected.shape
    return float((actual - expected).abs().max() / expected.abs().max())


def cache_error(actual: KVCache, expected: KVCache) -> float:
    """The relative error of the worst block."""
    pairs = zip((*actual.keys, *actual.values), (*expected.keys, *expected.values), strict=True)
    return max(relative_error(a, e) for a, e in pairs)


def snapshot(cache: KVCache) -> tuple[Tensor, ...]:
    """A copy of everything that a cache holds."""
    return tuple(block.clone() for block in (*cache.keys, *cache.values, cache.positions))


def is_still(cache: KVCache, before: tuple[Tensor, ...]) -> bool:
    """Whether ``cache`` holds the same bytes as when ``before`` was taken."""
    return all(map(torch.equal, (*cache.keys, *cache.values, cache.positions), before))
