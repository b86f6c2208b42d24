"""The classic mistake, on purpose."""

from dataclasses import dataclass, replace

from kvtransfer.errors import RotationError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.steering.edit import said


@dataclass(frozen=True, slots=True)
class ForgetRotation:
    """Leave keys without their positions, yet pass them off as cached.

    For a prefix longer than a few tokens the target then reads every key at position 0.
    """

    def __call__(self, cache: KVCache) -> KVCache:
        """The edited cache; the given one stays as it is.

        Raises:
            RotationError: its keys carry no rotation to forget.
        """
        if cache.keys_are == "content":
            raise RotationError(
                "these keys carry no rotation to forget", hint="give it a cache as a model reads it"
            )
        forgot = replace(cache.content(), keys_are="cached", rotations=cache.rotations)
        return said(forgot, self)

    def __str__(self) -> str:
        return "ForgetRotation()"
