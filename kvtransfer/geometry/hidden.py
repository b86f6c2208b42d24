"""Columns of a cache that attention does not see, layer by layer and head by head.

To see nothing of a token is another thing than to see keys of zero: those have a score of zero, and
a score of zero takes its share of the softmax.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool
from torch import Tensor

from kvtransfer.errors import CacheLayoutError

Gone = Bool[Tensor, "_b _h _t"]
"""Of one layer: per row and KV head, True where a token is out of sight."""
Hidden = tuple[Gone | None, ...]
"""Of every layer; None for a layer that sees all tokens."""


def each(hidden: Hidden | None, fn: Callable[[Tensor], Tensor]) -> Hidden | None:
    """Apply ``fn`` to every layer that hides something; None stays None."""
    if hidden is None:
        return None
    return tuple(None if gone is None else fn(gone) for gone in hidden)


def filled(hidden: Hidden | None, keys: Sequence[Tensor]) -> tuple[Gone, ...]:
    """With a layer of its own for each of ``keys``, (b, h, t, d), also where nothing is hidden."""
    found = hidden or (None,) * len(keys)
    return tuple(
        block.new_zeros(block.shape[:3], dtype=torch.bool) if gone is None else gone
        for gone, block in zip(found, keys, strict=True)
    )


def plain(hidden: Sequence[Gone | None]) -> Hidden | None:
    """With None where nothing is hidden, layer by layer and for the whole."""
    found = tuple(None if gone is None or not bool(gone.any()) else gone for gone in hidden)
    return None if all(gone is None for gone in found) else found


def described(hidden: Hidden) -> str:
    """In words, for messages: how many columns in how many layers."""
    seen = [gone for gone in hidden if gone is not None]
    most = max((int(gone.any(dim=(0, 1)).sum()) for gone in seen), default=0)
    return f"up to {most} columns hidden in {len(seen)} of {len(hidden)} layers"


def check(hidden: Hidden, keys: Sequence[Tensor]) -> None:
    """Raise CacheLayoutError unless these are columns of ``keys``, (b, h, t, d) a layer."""
    if len(hidden) != len(keys):
        raise CacheLayoutError(
            f"columns are hidden in {len(hidden)} layers, and the cache has {len(keys)}",
            hint="one entry a layer, None where a layer sees all tokens",
        )
    for layer, (gone, block) in enumerate(zip(hidden, keys, strict=True)):
        if gone is not None and (gone.shape != block.shape[:3] or gone.dtype != torch.bool):
            raise CacheLayoutError(
                f"hidden columns of layer {layer} are {gone.dtype} of shape {tuple(gone.shape)}, "
                f"and its keys of shape {tuple(block.shape)}",
                hint="a bool for each row, KV head and token",
            )
