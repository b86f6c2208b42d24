"""Show a prefix to some layers alone."""

from dataclasses import dataclass, replace

from kvtransfer.geometry.cache import KVCache
from kvtransfer.steering.edit import said, word
from kvtransfer.steering.interventions.ablate import Ablate
from kvtransfer.steering.layers import Layers, frozen, which


@dataclass(frozen=True, slots=True)
class Bank:
    """The cache as a bank of keys and values for ``layers`` (Memory Inception, arXiv:2605.06225).

    All others neither see its tokens nor count them in their softmax. Live tokens keep their
    positions behind it.
    """

    layers: Layers

    def __post_init__(self) -> None:
        """Layers as a value that compares and hashes."""
        object.__setattr__(self, "layers", frozen(self.layers))

    def __call__(self, cache: KVCache) -> KVCache:
        """The same cache, out of sight elsewhere.

        Raises:
            SteeringError: there is no such layer.
        """
        depth = len(cache)
        seeing = set(which(self.layers, depth))
        blind = [layer for layer in range(depth) if layer not in seeing]
        if not blind:
            return cache
        hidden = Ablate("removed", layers=blind)(cache).hidden
        return said(replace(cache, hidden=hidden), self)

    def __str__(self) -> str:
        return f"Bank({word(self.layers)})"
