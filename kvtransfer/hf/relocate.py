"""Move a cache to other positions: the keys are turned on, and nothing else changes."""

from collections.abc import Iterator
from dataclasses import replace

from kvtransfer.errors import RotationError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.fits import check_fits, check_room, check_tables
from kvtransfer.hf.model import LanguageModel

GROWING_QUERIES = "llama_4_scaling_beta"
"""A rope parameter of Ministral 3: beyond the original length, queries grow with position."""


def relocate(model: LanguageModel, cache: KVCache, start: int) -> KVCache:
    """The same cache with its first token at position ``start``.

    Exact for a prefix, whose tokens saw nothing before them: relative positions stay, so a model
    reads on as it would have, and what was exact stays so. Put after other text it is an
    approximation beyond layer 0, because the tokens were read without that text; whoever puts it
    there says so in ``approximate``, for there is nothing before it yet.

    Raises:
        RotationError: this model's positions cannot be taken out of its keys, or decide what else
            a token sees, or its table changes on the way.
        CacheLayoutError: the cache is not shaped as the model's, or would end beyond its context.
        IncompatibleModels: it is another model's cache.
    """
    check_fits(model, cache)
    if cache.tokens == 0:
        return cache
    shift = start - int(cache.positions.min())
    if shift == 0:
        return cache
    if start < 0:
        raise RotationError(f"there is no position {start}", hint="positions start at 0")
    positions = cache.positions + shift
    ends = int(cache.positions.max()) + 1, int(positions.max()) + 1
    check_room(model, ends[1])
    # A prefix that was cut from a longer text may carry that text's table.
    check_tables(model, cache, ends[0], ends[0])
    for reason in _obstacles(model, *ends):
        raise RotationError(
            f"a cache of {model.spec.name} ({model.spec.architecture}) cannot be moved: {reason}",
            hint="prefill the text where it is needed",
        )
    content = replace(cache.content(), positions=positions)
    return content.rotated(model.rotary(positions))


def _obstacles(model: LanguageModel, old_end: int, new_end: int) -> Iterator[str]:
    """Why turning the keys would not be enough."""
    if model.spec.positions == "learned":
        yield "its positions are added to the embeddings, and so inside keys and values"
    if model.spec.positions == "alibi":
        yield "its attention scores count positions from the cache's first token"
    ends = old_end, new_end
    for index, layer in enumerate(model.spec.layers):
        if layer.kind == "chunked":
            yield f"layer {index} sees chunks of {layer.window} positions, counted from 0"
        if layer.rotation is None:
            continue
        scaling = dict(layer.rotation.scaling)
        original = scaling.get("original_max_position_embeddings") or 0
        if scaling.get(GROWING_QUERIES) and max(ends) > original:
            yield f"beyond {original} its queries grow with their position ({GROWING_QUERIES})"
        limit = layer.rotation.fixed_up_to
        if limit is None or max(ends) <= limit:
            continue
        if layer.rotation.type != "longrope" or min(ends) <= limit:
            yield (
                f"from an end at {old_end} to one at {new_end} it crosses {limit} tokens, where "
                f"its RoPE ({layer.rotation.type}) changes its table"
            )
