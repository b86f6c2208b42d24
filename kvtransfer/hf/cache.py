"""Cross the border between mutable caches, transformers' own and older ones, and our values."""

from collections.abc import Mapping
from copy import copy
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache, cache_utils
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvtransfer.errors import CacheLayoutError
from kvtransfer.geometry.cache import Block, KVCache
from kvtransfer.geometry.hidden import described
from kvtransfer.geometry.rotation import Rotation

FORMS = (
    "a transformers Cache, a (keys, values) pair per layer, an object or a mapping with key_cache "
    "and value_cache, or a mapping with past_key_values"
)
"""What :func:`read` takes."""

# Older versions of transformers know one kind of quantised layer, and no base class of several.
QUANTISED: Any = getattr(cache_utils, "BaseQuantizedLayer", cache_utils.QuantizedLayer)


def read(
    cache: Any,
    positions: Int[Tensor, "b t"],
    *,
    rotations: tuple[Rotation | None, ...] | None = None,
    model: str | None = None,
) -> KVCache:
    """Copy a cache out, so that decoding on does not change ours. Nothing is checked against a
    model: :func:`kvtransfer.hf.adopt.adopt` does that.

    Args:
        cache: One of FORMS. Static layers are cut to what they hold, quantised ones dequantised
            (the result's ``note`` says so), offloaded ones brought to where ``positions`` are.
        positions: Of the cached tokens.
        rotations: What turned the keys, per layer.
        model: Fingerprint of the model that made it.

    Raises:
        CacheLayoutError: it is no cache, or a layer holds no keys and values, or forgot tokens.
    """
    pairs = _pairs(cache)
    if not pairs:
        raise CacheLayoutError("this cache is empty", hint="run the model on a prefix first")
    blocks = [_blocks(index, pair, positions.shape[1]) for index, pair in enumerate(pairs)]
    notes = {pair.note for pair in pairs if pair.note}
    return KVCache(
        keys=tuple(keys.detach().to(positions.device, copy=True) for keys, _ in blocks),
        values=tuple(values.detach().to(positions.device, copy=True) for _, values in blocks),
        positions=positions,
        keys_are="cached",
        rotations=rotations,
        model=model,
        note=", ".join(sorted(notes)) or None,
    )


def write(kv: KVCache, *, masked: bool = False) -> DynamicCache:
    """A fresh cache that a model may go on decoding from; ``kv`` stays as it is.

    The layers are plain ones, also for a model with windows: they keep every token, and the
    model's own mask decides which of them a windowed layer sees.

    Args:
        kv: With keys as a model reads them.
        masked: Whoever runs the model hides the padding of a stacked batch (``kv.mask``), and what
            is hidden from a layer, which a transformers cache cannot tell from tokens.

    Raises:
        CacheLayoutError: the keys carry no positions yet, or something wrote to them in place, or
            there is padding, or are tokens, that nobody hides.
    """
    kv.require_unchanged()
    if kv.hidden is not None and not masked:
        raise CacheLayoutError(
            f"{described(kv.hidden)}, which a transformers cache cannot hide",
            hint="use score(…), generate(…) or grafted(…), which do",
        )
    if kv.padding is not None and not masked:
        raise CacheLayoutError(
            f"rows padded by {kv.padding.tolist()} columns, which a transformers cache cannot hide",
            hint="use score(…) or grafted(…), which do, or write(kv, masked=True) and give the "
            "model a mask that begins with kv.mask",
        )
    if kv.keys_are != "cached":
        raise CacheLayoutError(
            "content keys carry no positions; a model cannot read them",
            hint="apply the target's rotation first: cache.rotated(target.rotary(cache.positions))",
        )
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(kv):
        cache.update(keys, values, layer)  # concatenates to an empty tensor, so it copies
    return cache


class _Pair(NamedTuple):
    """What one layer of a cache offers as keys and values."""

    keys: Any
    values: Any
    kind: str
    note: str | None = None


def _pairs(cache: Any) -> list[_Pair]:
    """One pair a layer, whatever the cache's form.

    Raises:
        CacheLayoutError: nobody knows this form.
    """
    if cache is None:
        raise CacheLayoutError(
            "there is no cache: None", hint="run the model with use_cache=True and keep its cache"
        )
    if isinstance(cache, KVCache):
        cache.require_unchanged()
        cache.require_plain("read")
        if cache.keys_are != "cached":
            raise CacheLayoutError(
                "a KVCache of content keys is not as a model made it",
                hint="apply the model's rotation first",
            )
        return [_Pair(keys, values, "KVCache") for keys, values in cache]
    if isinstance(cache, EncoderDecoderCache):
        raise CacheLayoutError(
            "an EncoderDecoderCache holds two caches, and neither is a prefix",
            hint="kvtransfer reads the caches of decoder-only models",
        )
    if isinstance(cache, Cache):
        return [_of_layer(index, layer) for index, layer in enumerate(cache.layers)]
    # Before any attribute is asked for: a mapping's .keys and .values are something else.
    if isinstance(cache, Mapping):
        for name in ("past_key_values", "cache"):
            if name in cache:
                return _pairs(cache[name])
        if "key_cache" in cache and "value_cache" in cache:
            return _side_by_side(cache["key_cache"], cache["value_cache"])
    elif hasattr(cache, "key_cache") and hasattr(cache, "value_cache"):
        return _side_by_side(cache.key_cache, cache.value_cache)
    elif isinstance(cache, (tuple, list)):
        return [_of_tuple(index, layer) for index, layer in enumerate(cache)]
    raise CacheLayoutError(f"a {type(cache).__name__} is no cache that we know", hint=FORMS)


def _of_layer(index: int, layer: Any) -> _Pair:
    """Keys and values of a layer of a transformers cache, through its own interface."""
    kind = type(layer).__name__
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        raise CacheLayoutError(
            f"layer {index} ({kind}) holds no keys and values, or a state beside them",
            hint="a state is of the whole text, not per token; it cannot be mapped",
        )
    if isinstance(layer, QUANTISED):
        if layer._quantized_keys is None:
            return _Pair(None, None, kind)
        # Updating with no tokens gives everything back dequantised; a copy, because it counts.
        keys, values = copy(layer).update(*_no_tokens(layer))
        return _Pair(keys, values, kind, f"dequantised from a {kind}")
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if not isinstance(keys, Tensor) or not isinstance(values, Tensor):
        return _Pair(keys, values, kind)
    said = int(layer.get_seq_length())
    held = keys.shape[-2] if keys.ndim > 1 else 0
    if hasattr(layer, "max_cache_len"):  # static: a buffer, filled up to its length so far
        if said > layer.max_cache_len:
            raise _forgot(index, kind, layer.max_cache_len, said)
        return _Pair(keys[..., :said, :], values[..., :said, :], kind)
    if said > held:
        raise _forgot(index, kind, held, said)
    if said < held:
        raise CacheLayoutError(
            f"layer {index} ({kind}) holds {held} tokens and says that it holds {said}",
            hint="fill a layer through cache.update(keys, values, layer), which keeps count",
        )
    return _Pair(keys, values, kind)


def _no_tokens(layer: Any) -> tuple[Tensor, Tensor]:
    """Keys and values of nothing, shaped as a quantised layer's own."""
    like = [layer._dequantize(held) for held in (layer._quantized_keys, layer._quantized_values)]
    return like[0][..., :0, :], like[1][..., :0, :]


def _forgot(index: int, kind: str, held: int, said: int) -> CacheLayoutError:
    return CacheLayoutError(
        f"layer {index} ({kind}) has forgotten: it holds {held} of {said} tokens",
        hint="read the prefix into a plain DynamicCache(), which keeps every token; the model's "
        "mask still sees to its windows",
    )


def _side_by_side(keys: Any, values: Any) -> list[_Pair]:
    if not isinstance(keys, (tuple, list)) or not isinstance(values, (tuple, list)):
        raise CacheLayoutError(
            f"key_cache is a {type(keys).__name__} and value_cache a {type(values).__name__}",
            hint="each is a list with one tensor a layer",
        )
    if len(keys) != len(values):
        raise CacheLayoutError(
            f"key_cache has {len(keys)} layers, value_cache {len(values)}",
            hint="keys and values come in pairs, one a layer",
        )
    return [_Pair(k, v, "legacy") for k, v in zip(keys, values, strict=True)]


def _of_tuple(index: int, layer: Any) -> _Pair:
    parts = list(layer) if isinstance(layer, (tuple, list, Tensor)) else []
    if len(parts) == 3:  # iterating a DynamicCache adds a window, or None
        forgets = parts.pop() is not None
        if forgets:
            raise CacheLayoutError(
                f"layer {index} comes with a sliding window, so it may have forgotten tokens",
                hint="read the prefix into a plain DynamicCache(), which keeps every token",
            )
    if len(parts) != 2:
        raise CacheLayoutError(
            f"layer {index} is a {type(layer).__name__} of {len(parts)} parts",
            hint="a decoder's layer is a pair of keys and values; four parts are an "
            "encoder-decoder's",
        )
    return _Pair(parts[0], parts[1], "legacy")


def _blocks(index: int, pair: _Pair, tokens: int) -> tuple[Block, Block]:
    for name, block in (("keys", pair.keys), ("values", pair.values)):
        if not isinstance(block, Tensor) or block.numel() == 0:
            held = "an empty tensor" if isinstance(block, Tensor) else f"a {type(block).__name__}"
            raise CacheLayoutError(
                f"layer {index} ({pair.kind}) holds no {name}, but {held}",
                hint="blocks are torch tensors; layers that keep a state, or share another layer's "
                "keys, cannot be mapped; an empty one was never run",
            )
        if block.ndim != 4 or not block.is_floating_point():
            raise CacheLayoutError(
                f"the {name} of layer {index} ({pair.kind}) are {block.dtype} of shape "
                f"{tuple(block.shape)}",
                hint="blocks are floating-point numbers of (batch, kv_heads, tokens, head_dim)",
            )
        if block.layout != torch.strided or block.is_meta:
            raise CacheLayoutError(
                f"the {name} of layer {index} ({pair.kind}) are on {block.device}, {block.layout}",
                hint="blocks are dense tensors with numbers in them",
            )
        if block.shape[2] != tokens and block.shape[1] != tokens:
            raise CacheLayoutError(
                f"the {name} of layer {index} ({pair.kind}) have shape {tuple(block.shape)}, for "
                f"{tokens} tokens",
                hint="give the ids and positions of all the tokens in the cache, and no others",
            )
        if block.shape[2] != tokens and block.shape[1] == tokens:
            raise CacheLayoutError(
                f"the {name} of layer {index} ({pair.kind}) have shape {tuple(block.shape)}, for "
                f"{tokens} tokens",
                hint="this looks like (batch, tokens, kv_heads, head_dim); transpose(1, 2) it",
            )
    return pair.keys, pair.values
