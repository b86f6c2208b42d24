"""Edits to a cache. Each is a frozen value that maps a cache to a new cache."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

from kvtransfer.errors import RotationError
from kvtransfer.geometry.cache import KVCache

Intervention = Callable[[KVCache], KVCache]
Part = Literal["keys", "values", "both"]


@dataclass(frozen=True, slots=True)
class Zero:
    """Set keys, values or both to zero.

    Not the same as removing the prefix: a key of zero has score zero, and a score of zero still
    takes its share of the softmax.
    """

    part: Part = "both"

    def __call__(self, cache: KVCache) -> KVCache:
        """The edited cache; the given one stays as it is."""
        blank = cache.map(lambda block: block.new_zeros(block.shape))
        return replace(
            cache,
            keys=cache.keys if self.part == "values" else blank.keys,
            values=cache.values if self.part == "keys" else blank.values,
        )


@dataclass(frozen=True, slots=True)
class ForgetRotation:
    """Leave keys without their positions, yet pass them off as cached: the classic mistake.

    For a prefix longer than a few tokens the target then reads every key at position 0.
    """

    def __call__(self, cache: KVCache) -> KVCache:
        """The edited cache.

        Raises:
            RotationError: its keys carry no rotation to forget.
        """
        if cache.keys_are == "content":
            raise RotationError(
                "these keys carry no rotation to forget", hint="give it a cache as a model reads it"
            )
        return replace(cache.content(), keys_are="cached", rotations=cache.rotations)


def chain(*steps: Intervention) -> Intervention:
    """Left to right: ``chain(f, g)(cache)`` is ``g(f(cache))``; no steps is no change."""
    return lambda cache: reduce(lambda changed, step: step(changed), steps, cache)
