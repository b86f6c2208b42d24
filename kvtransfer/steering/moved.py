"""What edits that put tokens in each other's places have in common."""

from abc import abstractmethod
from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import SteeringError
from kvtransfer.geometry.cache import Block, KVCache
from kvtransfer.steering.edit import PARTS, SPACES, Edit, Part, Space, require_one_of, turn
from kvtransfer.steering.layers import which


@dataclass(frozen=True, slots=True)
class Moved(Edit):
    """Each column takes the keys and values of another; positions, and the rotation that goes with
    them, stay where they are. Columns that some row, or some head of a chosen layer, does not see
    take no part."""

    part: Part = field(default="both", kw_only=True)
    space: Space = field(default="content", kw_only=True)

    def __post_init__(self) -> None:
        Edit.__post_init__(self)
        require_one_of("part", self.part, PARTS)
        require_one_of("space", self.space, SPACES)

    @abstractmethod
    def sources(self, count: int) -> Int[Tensor, " n"]:
        """For each of ``count`` columns, the number of the one that it takes from."""

    def keys(self, cache: KVCache, layer: int) -> Block:
        """Those of the other columns, turned to the positions where they now stand."""
        block, order = cache.keys[layer], self._order(cache)
        table = turn(cache, layer) if self.space == "content" else None
        if table is None:
            return block[:, :, order]
        moved = table.apply(table.undo(block)[:, :, order])
        stays = order == torch.arange(len(order), device=order.device)
        return torch.where(stays[None, None, :, None], block, moved)

    def values(self, cache: KVCache, layer: int) -> Block:
        """Those of the other columns."""
        return cache.values[layer][:, :, self._order(cache)]

    def _order(self, cache: KVCache) -> Int[Tensor, " t"]:
        """For every column of the cache, the one that it takes from."""
        device = cache.positions.device
        seen = cache.mask.bool().all(dim=0)
        for layer in which(self.layers, len(cache)):
            gone = None if cache.hidden is None else cache.hidden[layer]
            if gone is not None:
                seen = seen & ~gone.any(dim=(0, 1))
        span = self.span(cache)
        taking = torch.arange(span.start, span.stop, device=device)
        taking = taking[seen[span.start : span.stop]]
        if not len(taking):
            raise SteeringError(
                f"none of the {len(span)} chosen tokens are seen by all chosen layers",
                hint="choose others: tokens=(start, stop)",
            )
        order = torch.arange(cache.tokens, device=device)
        order[taking] = taking[self.sources(len(taking)).to(device)]
        return order
