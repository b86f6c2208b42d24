"""Show a prefix to some layers alone."""

from dataclasses import dataclass, field, replace

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
    heads: tuple[int, ...] | None = field(default=None, kw_only=True)
    """KV heads that the others do not see; None for all."""
    tokens: tuple[int | None, int | None] | None = field(default=None, kw_only=True)
    """Columns that the others do not see, as of a slice; None for all."""

    def __post_init__(self) -> None:
        """Layers, heads and tokens as values that compare and hash.

        Raises:
            SteeringError: they are no layers, heads or tokens of any cache.
        """
        object.__setattr__(self, "layers", frozen(self.layers))
        hides = self._hides(())
        object.__setattr__(self, "heads", hides.heads)
        object.__setattr__(self, "tokens", hides.tokens)

    def __call__(self, cache: KVCache) -> KVCache:
        """The same cache, out of sight elsewhere.

        Raises:
            SteeringError: there is no such layer, head or token.
        """
        depth = len(cache)
        seeing = set(which(self.layers, depth))
        blind = [layer for layer in range(depth) if layer not in seeing]
        if not blind:
            return cache
        hidden = self._hides(blind)(cache).hidden
        return said(replace(cache, hidden=hidden), self)

    def _hides(self, layers: Layers) -> Ablate:
        return Ablate("removed", layers=layers, heads=self.heads, tokens=self.tokens)

    def __str__(self) -> str:
        named = [
            f"{name}={word(value)}"
            for name, value in (("heads", self.heads), ("tokens", self.tokens))
            if value is not None
        ]
        return f"Bank({', '.join([word(self.layers), *named])})"
