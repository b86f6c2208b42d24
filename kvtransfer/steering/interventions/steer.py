"""Push a prompt's tokens in a direction, once."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvtransfer.errors import require
from kvtransfer.geometry.cache import Block, KVCache
from kvtransfer.steering.edit import SPACES, Edit, Space, require_finite, require_one_of, turn
from kvtransfer.steering.vector import CacheVector


@dataclass(frozen=True, slots=True)
class Steer(Edit):
    """A steering vector added to keys and values, of the last token if not said otherwise.

    Cached keys are k = R·c, R being the rotation of their position, so that what is added to the
    content c is added to k turned: k + R·(α·v). Nothing is turned back, and no other bit changes.
    """

    vector: CacheVector
    strength: float = 1.0
    """Times the vector; negative is away from it, and 0 the cache itself."""
    key_strength: float = field(default=1.0, kw_only=True)
    """Of the keys, times ``strength``."""
    value_strength: float = field(default=1.0, kw_only=True)
    """Of the values, times ``strength``."""
    tokens: tuple[int | None, int | None] | None = field(default=(-1, None), kw_only=True)
    space: Space = field(default="content", kw_only=True)
    """Whether keys are turned to their positions before they are added, or added as they are."""

    def __post_init__(self) -> None:
        Edit.__post_init__(self)
        hint = "CacheVector.from_pretrained(folder), or by name: --vector v=DIR"
        require("the vector", self.vector, CacheVector, "a CacheVector", hint=hint)
        for name in ("strength", "key_strength", "value_strength"):
            require_finite(name, getattr(self, name))
        require_one_of("space", self.space, SPACES)

    def __call__(self, cache: KVCache) -> KVCache:
        """The steered cache; the given one stays as it is.

        Raises:
            IncompatibleModels: the cache is known to be another model's than the vector.
            SteeringError: its layers, heads or widths are not the vector's, or there is no such
                layer, head or token.
            RotationError: nobody recorded what turned its keys.
            CacheLayoutError: a block was written to in place.
        """
        self.vector.check(cache)
        return Edit.__call__(self, cache)

    @property
    def part(self) -> str:
        """What has a strength."""
        if not self.key_strength:
            return "values"
        return "both" if self.value_strength else "keys"

    @property
    def idle(self) -> bool:
        """A strength of 0 adds nothing."""
        return not self.strength or not (self.key_strength or self.value_strength)

    def keys(self, cache: KVCache, layer: int) -> Block:
        """The vector's, turned to each token's position, on top."""
        block, span = cache.keys[layer], self.span(cache)
        pushed = self._direction(self.vector.keys[layer], block, span, self.key_strength)
        table = turn(cache, layer) if self.space == "content" else None
        if table is not None:
            columns = slice(span.start, span.stop)
            here = replace(table, cos=table.cos[:, columns], sin=table.sin[:, columns])
            pushed = here.apply(pushed)
        return _on_top(block, span, pushed)

    def values(self, cache: KVCache, layer: int) -> Block:
        """The vector's on top."""
        block, span = cache.values[layer], self.span(cache)
        pushed = self._direction(self.vector.values[layer], block, span, self.value_strength)
        return _on_top(block, span, pushed)

    def _direction(self, of: Tensor, block: Block, span: range, strength: float) -> Block:
        """A layer's direction at every chosen column, in float32 at least."""
        wide = of.to(block.device, torch.promote_types(block.dtype, torch.float32))
        scaled = wide * (self.strength * strength)
        return scaled[None, :, None].expand(len(block), -1, len(span), -1)


def _on_top(block: Block, span: range, pushed: Block) -> Block:
    """``block`` with ``pushed`` added in the chosen columns, rounded once."""
    new = block.clone()
    columns = slice(span.start, span.stop)
    new[:, :, columns] = (block[:, :, columns] + pushed).to(block)
    return new
