"""Cross the border between transformers' mutable caches and our values."""

from jaxtyping import Int
from torch import Tensor
from transformers import Cache, DynamicCache

from kvtransfer.errors import CacheLayoutError
from kvtransfer.geometry.cache import Block, KVCache
from kvtransfer.geometry.rotation import Rotation


def read(
    cache: Cache,
    positions: Int[Tensor, "b t"],
    *,
    rotations: tuple[Rotation | None, ...] | None = None,
    model: str | None = None,
) -> KVCache:
    """Copy a model's cache out, so that decoding on does not change ours.

    Raises:
        CacheLayoutError: a layer holds no keys and values, or forgot tokens.
    """
    blocks = [_blocks(cache, layer) for layer in range(len(cache.layers))]
    if not blocks:
        raise CacheLayoutError("this cache is empty", hint="run the model on a prefix first")
    keys, values = zip(*blocks, strict=True)
    return KVCache(
        keys=keys,
        values=values,
        positions=positions,
        keys_are="cached",
        rotations=rotations,
        model=model,
    )


def write(kv: KVCache) -> DynamicCache:
    """A fresh cache that a model may go on decoding from; ``kv`` stays as it is.

    The layers are plain ones, also for a model with windows: they keep every token, and the
    model's own mask decides which of them a windowed layer sees.

    Raises:
        CacheLayoutError: the keys carry no positions yet.
    """
    if kv.keys_are != "cached":
        raise CacheLayoutError(
            "content keys carry no positions; a model cannot read them",
            hint="apply the target's rotation first: cache.rotated(target.rotary(cache.positions))",
        )
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(kv):
        cache.update(keys, values, layer)  # concatenates to an empty tensor, so it copies
    return cache


def _blocks(cache: Cache, layer: int) -> tuple[Block, Block]:
    held = cache.layers[layer]
    keys, values = getattr(held, "keys", None), getattr(held, "values", None)
    if keys is None or values is None:
        raise CacheLayoutError(
            f"layer {layer} ({type(held).__name__}) holds no keys and values",
            hint="linear-attention layers keep a state, not a cache; they cannot be mapped",
        )
    return keys.detach().clone(), values.detach().clone()
