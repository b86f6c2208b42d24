"""What must hold of the tensors of a cache, whoever made them."""

from collections.abc import Sequence

from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import CacheLayoutError


def check_layout(
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    positions: Int[Tensor, "_b _t"],
    rotations: Sequence[object] | None,
    padding: Int[Tensor, " _b"] | None,
) -> None:
    """Raise CacheLayoutError unless these are one cache's; see ``KVCache`` for each."""
    if not keys or len(keys) != len(values):
        raise CacheLayoutError(
            f"{len(keys)} key layers, {len(values)} value layers",
            hint="a cache has at least one layer, and keys and values in each",
        )
    if rotations is not None and len(rotations) != len(keys):
        raise CacheLayoutError(
            f"{len(rotations)} rotations for {len(keys)} layers",
            hint="name one rotation a layer, None where a layer has no RoPE",
        )
    blocks = (*keys, *values)
    lengths = {block.shape[2] for block in blocks}
    if len(lengths) > 1:
        raise CacheLayoutError(
            f"layers disagree on length: {sorted(lengths)}",
            hint="sliding-window layers forget tokens; capture with a plain cache",
        )
    batch, tokens = positions.shape
    if {block.shape[0] for block in blocks} != {batch} or lengths != {tokens}:
        raise CacheLayoutError(
            f"blocks of shape {tuple(blocks[0].shape)} with positions of shape "
            f"{tuple(positions.shape)}",
            hint="positions are (batch, tokens), blocks (batch, kv_heads, tokens, head_dim)",
        )
    if positions.is_floating_point() or bool((positions < 0).any()):
        raise CacheLayoutError(
            f"positions of {positions.dtype} from {positions.min()} on",
            hint="positions are whole numbers from 0 on",
        )
    if padding is not None and (
        padding.shape != (batch,)
        or padding.is_floating_point()
        or bool(((padding < 0) | (padding > tokens)).any())
    ):
        raise CacheLayoutError(
            f"padding of {padding.tolist()} columns in {batch} rows of {tokens}",
            hint="one whole number a row: make a padded batch with stack(caches)",
        )
    if len(dtypes := {block.dtype for block in blocks}) > 1:
        raise CacheLayoutError(
            f"blocks of several dtypes: {sorted(map(str, dtypes))}",
            hint="cast the whole cache with cache.to(dtype=…)",
        )
