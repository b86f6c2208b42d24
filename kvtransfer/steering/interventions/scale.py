"""Make keys or values larger or smaller."""

from dataclasses import dataclass

from kvtransfer.geometry.cache import Block, KVCache
from kvtransfer.steering.edit import PARTS, Edit, Part, require_finite, require_one_of


@dataclass(frozen=True, slots=True)
class Scale(Edit):
    """Keys, values or both times a number. Turning and scaling keys commute."""

    factor: float
    part: Part = "both"

    def __post_init__(self) -> None:
        Edit.__post_init__(self)
        require_finite("factor", self.factor)
        require_one_of("part", self.part, PARTS)

    @property
    def idle(self) -> bool:
        """Once is as it was."""
        return self.factor == 1

    def keys(self, cache: KVCache, layer: int) -> Block:
        """Times the factor."""
        return cache.keys[layer] * self.factor

    def values(self, cache: KVCache, layer: int) -> Block:
        """Times the factor."""
        return cache.values[layer] * self.factor
