"""What all edits of a cache have in common: where they apply, and how they are put in place."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from kvtransfer.errors import RotationError, SteeringError
from kvtransfer.geometry.cache import Block, KVCache
from kvtransfer.geometry.rotation import Rotation
from kvtransfer.steering.layers import Layers, frozen, is_whole, which

Intervention = Callable[[KVCache], KVCache]
"""From a cache to a new one; they compose from left to right (:func:`steering.chain.chain`)."""
Part = Literal["keys", "values", "both"]
Space = Literal["content", "cached"]
PARTS: tuple[Part, ...] = ("keys", "values", "both")
SPACES: tuple[Space, ...] = ("content", "cached")


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit(ABC):
    """An intervention that changes some layers, heads and tokens, and leaves the rest bit for bit.

    To add one, write a frozen dataclass with ``keys`` and ``values``, in a file of its own, and
    name it in :data:`kvtransfer.steering.interventions.INTERVENTIONS`.
    """

    layers: Layers = "all"
    heads: tuple[int, ...] | None = None
    """KV heads; None for all."""
    tokens: tuple[int | None, int | None] | None = None
    """Columns from start to stop, as in a slice, negative from the end; None for all."""

    def __post_init__(self) -> None:
        """Layers, heads and tokens as values that compare and hash.

        Raises:
            SteeringError: they are no layers, heads or tokens of any cache.
        """
        object.__setattr__(self, "layers", frozen(self.layers))
        if self.heads is not None:
            object.__setattr__(self, "heads", whole("heads", self.heads, "heads=(0, 2)"))
        if self.tokens is not None:
            ends = whole("tokens", self.tokens, SLICE, ends=True)
            object.__setattr__(self, "tokens", ends)

    def __call__(self, cache: KVCache) -> KVCache:
        """The edited cache; the given one stays as it is.

        Raises:
            SteeringError: there is no such layer, head or token.
            CacheLayoutError: a block was written to in place.
            RotationError: keys are to be turned, and nobody recorded how.
        """
        cache.require_unchanged()
        layers = which(self.layers, len(cache))
        if self.idle or not layers:
            return cache
        keys, values = list(cache.keys), list(cache.values)
        for layer in layers:
            chosen = self.chosen(cache, layer)
            if self.part in ("keys", "both"):
                keys[layer] = self.put(chosen, self.keys(cache, layer), keys[layer])
            if self.part in ("values", "both"):
                values[layer] = self.put(chosen, self.values(cache, layer), values[layer])
        return said(replace(cache, keys=tuple(keys), values=tuple(values)), self)

    @property
    @abstractmethod
    def part(self) -> str:
        """Which of keys, values or both change."""

    @property
    def idle(self) -> bool:
        """Whether it is known to change nothing, whatever the cache."""
        return False

    @abstractmethod
    def keys(self, cache: KVCache, layer: int) -> Block:
        """The new keys of a layer, whole and turned as the old ones; what is not chosen is left."""

    @abstractmethod
    def values(self, cache: KVCache, layer: int) -> Block:
        """The new values of a layer, whole; what is not chosen is left."""

    def span(self, cache: KVCache) -> range:
        """The chosen columns.

        Raises:
            SteeringError: there are none.
        """
        if self.tokens is None:
            return range(cache.tokens)
        span = range(*slice(*self.tokens).indices(cache.tokens))
        if not span:
            raise SteeringError(
                f"tokens {self.tokens} choose none of the {cache.tokens} that the cache holds",
                hint="a slice's start and stop: (-1, None) is the last token",
            )
        return span

    def chosen(self, cache: KVCache, layer: int) -> Bool[Tensor, "h t"]:
        """Which heads and columns of a layer are to change.

        Raises:
            SteeringError: the layer has no such head, or the cache no such token.
        """
        block = cache.keys[layer]
        heads, tokens = block.shape[1:3]
        if wrong := [head for head in self.heads or () if not 0 <= head < heads]:
            raise SteeringError(
                f"no KV head {', '.join(map(str, wrong))} in layer {layer}, which has {heads}",
                hint="heads are KV heads, counted from 0",
            )
        chosen = torch.zeros(heads, tokens, dtype=torch.bool, device=block.device)
        span = self.span(cache)
        rows = torch.arange(heads) if self.heads is None else torch.tensor(self.heads).long()
        chosen[rows.to(block.device), span.start : span.stop] = True
        return chosen

    @staticmethod
    def put(chosen: Bool[Tensor, "h t"], new: Block, old: Block) -> Block:
        """``new`` where ``chosen``, ``old`` elsewhere."""
        return torch.where(chosen[None, :, :, None], new.to(old), old)

    def __str__(self) -> str:
        """In a line, without options that are left at their defaults."""
        named = [
            f"{each.name}={word(value)}"
            for each in fields(self)
            if each.kw_only and (value := getattr(self, each.name)) != each.default
        ]
        words = [word(getattr(self, each.name)) for each in fields(self) if not each.kw_only]
        return f"{type(self).__name__}({', '.join(words + named)})"


def turn(cache: KVCache, layer: int) -> Rotation | None:
    """What turned a layer's keys; None where they are content keys, or the layer has no RoPE.

    Raises:
        RotationError: nobody recorded it.
    """
    if cache.keys_are == "content":
        return None
    if cache.rotations is None:
        raise RotationError(
            "these cached keys carry no record of the rotation that turned them",
            hint="make it with prefill(model, ids), or edit as cached: space='cached'",
        )
    return cache.rotations[layer]


def said(cache: KVCache, edit: object) -> KVCache:
    """``cache``, which says that ``edit`` made it."""
    reason = f"edited by {edit}"
    known = cache.approximate
    return replace(cache, approximate=f"{known}; {reason}" if known else reason)


def require_finite(name: str, value: float) -> None:
    """Raise SteeringError unless ``value`` is a finite number."""
    try:
        good = isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:  # a whole number that no float is as large as
        good = False
    if not good or isinstance(value, bool):
        raise SteeringError(f"{name} is {value!r}"[:80], hint="give a finite number")


def require_one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    """Raise SteeringError unless ``value`` is one of ``known``."""
    if value not in known:
        raise SteeringError(f"{name} is {value!r}", hint=f"one of {', '.join(known)}")


SLICE = "tokens=(start, stop), as of a slice; (0, 3) is the first three, (-1, None) the last"


def whole(name: str, given: Any, like: str, *, ends: bool = False) -> tuple[Any, ...]:
    """Whole numbers as a tuple; of a slice, its two ``ends``, each of which may be None.

    Raises:
        SteeringError: they are something else.
    """
    numbers = tuple(given) if isinstance(given, Iterable) else None
    good = numbers is not None and all(
        is_whole(each) or (ends and each is None) for each in numbers
    )
    if numbers is None or not good or (ends and len(numbers) != 2):
        raise SteeringError(f"{name} are {given!r}"[:80], hint=f"whole numbers: {like}")
    return numbers


def word(value: object) -> str:
    """As :func:`kvtransfer.steering.expression.parse` reads it, and short."""
    if isinstance(value, KVCache):
        return f"{value.tokens} tokens"
    if isinstance(value, str) and not value.isidentifier():
        return repr(value)
    return str(value)
