"""Let a model read something else than its cache holds, at every step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache

from kvtransfer.errors import CacheLayoutError, WrongKind
from kvtransfer.geometry.cache import KVCache
from kvtransfer.geometry.hidden import each
from kvtransfer.geometry.join import require_cache
from kvtransfer.hf.blind import blinded
from kvtransfer.hf.cache import read
from kvtransfer.hf.fits import check_fits
from kvtransfer.hf.model import LanguageModel

Edit = Callable[[KVCache], KVCache]
"""From the cache of all tokens so far to what the model reads in its place."""


@contextmanager
def effective(
    model: LanguageModel,
    cache: DynamicCache,
    prefix: KVCache | None,
    *,
    edit: Edit | None,
    positions: Callable[[], Int[Tensor, "b t"]],
) -> Iterator[None]:
    """For one forward on ``cache``: the model reads an edit of it, and not what is hidden.

    Afterwards the cache holds what it held, and the new tokens.

    Args:
        model: Reads.
        cache: Began with ``prefix``.
        prefix: May hide tokens from some layers.
        edit: From all that is cached to what is read in its place.
        positions: Of all that is cached, asked for only where there is an edit.

    Raises:
        CacheLayoutError, IncompatibleModels: an edit made no cache of that length for this model.
        UnsupportedModel: the model's attention cannot hide tokens from a layer.
        WrongKind: the edit is none.
    """
    if edit is not None and not callable(edit):
        raise WrongKind(
            "the edit", edit, "a function from a cache to a cache", hint="as Scale(0.5)"
        )
    if edit is None or cache.get_seq_length() == 0:
        with blinded(model, None if prefix is None else prefix.hidden):
            yield
        return
    kept = _past(model, cache, positions(), prefix)
    made = _edited(model, edit, kept)
    layers: Any = cache.layers
    for layer, (keys, values) in zip(layers, made, strict=True):
        layer.keys, layer.values = keys, values
    try:
        with blinded(model, made.hidden):
            yield
    except BaseException:
        for layer, (keys, values) in zip(layers, kept, strict=True):
            layer.keys, layer.values = keys, values
        raise
    for layer, (keys, values) in zip(layers, kept, strict=True):
        layer.keys = torch.cat((keys, layer.keys[:, :, kept.tokens :]), dim=2)
        layer.values = torch.cat((values, layer.values[:, :, kept.tokens :]), dim=2)


def _past(
    model: LanguageModel,
    cache: DynamicCache,
    positions: Int[Tensor, "b t"],
    prefix: KVCache | None,
) -> KVCache:
    """All that ``cache`` holds, a copy, as a value; it began with ``prefix``."""
    made = read(cache, positions, rotations=model.rotary(positions), model=model.spec.identity)
    if prefix is None:
        return made
    grown = made.tokens - prefix.tokens
    return replace(
        made,
        padding=prefix.padding,
        hidden=each(prefix.hidden, lambda gone: pad(gone, (0, grown))),
        note=prefix.note,
        approximate=prefix.approximate,
    )


def _edited(model: LanguageModel, edit: Edit, cache: KVCache) -> KVCache:
    """What ``edit`` makes of ``cache``, once it is seen to be as long.

    Raises:
        CacheLayoutError, IncompatibleModels: it is no cache of that length for this model, or the
            given one was written to in place.
        WrongKind: it is no cache at all.
    """
    made = edit(cache)
    # Else what was written there would stay, and add up with what the next step writes.
    cache.require_unchanged()
    require_cache(made, "what the edit made")
    check_fits(model, made)
    if made.keys_are != "cached":
        raise CacheLayoutError(
            "an edit made a cache of content keys, and a model reads cached ones",
            hint="turn them back: made.rotated(cache.rotations)",
        )
    if (made.batch, made.tokens) != (cache.batch, cache.tokens):
        raise CacheLayoutError(
            f"an edit made {made.batch} rows of {made.tokens} tokens out of {cache.batch} of "
            f"{cache.tokens}",
            hint="an edit at every step keeps the cache's length: hide tokens instead of cutting",
        )
    return made
