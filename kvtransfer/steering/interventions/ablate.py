"""Take keys, values or whole tokens out of a cache."""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from kvtransfer.geometry.cache import Block, KVCache
from kvtransfer.geometry.hidden import filled, plain
from kvtransfer.steering.edit import PARTS, Edit, require_one_of, said
from kvtransfer.steering.layers import which

Ablation = Literal["keys", "values", "both", "removed"]


@dataclass(frozen=True, slots=True)
class Ablate(Edit):
    """Keys, values or both zeroed, or tokens ``removed``: hidden from the softmax.

    Only the last is absence. A key of zero has a score of zero, and a score of zero takes its share
    of the softmax; with a value of zero that share is spent on nothing.
    """

    part: Ablation = "both"

    def __post_init__(self) -> None:
        Edit.__post_init__(self)
        require_one_of("part", self.part, (*PARTS, "removed"))

    def __call__(self, cache: KVCache) -> KVCache:
        """The edited cache; the given one stays as it is."""
        if self.part != "removed":
            return Edit.__call__(self, cache)
        cache.require_unchanged()
        layers = which(self.layers, len(cache))
        if not layers:
            return cache
        hidden = list(filled(cache.hidden, cache.keys))
        for layer in layers:
            hidden[layer] = hidden[layer] | self.chosen(cache, layer)
        return said(replace(cache, hidden=plain(hidden)), self)

    def keys(self, cache: KVCache, layer: int) -> Block:
        """Zeros."""
        return torch.zeros_like(cache.keys[layer])

    def values(self, cache: KVCache, layer: int) -> Block:
        """Zeros."""
        return torch.zeros_like(cache.values[layer])
