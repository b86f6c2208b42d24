"""Move a cache to other positions: the keys are turned on, and nothing else changes."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from numbers import Integral

from kvtransfer.errors import RotationError, require
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
    return _moved(model, cache, start, _obstacles)


def follow(model: LanguageModel, cache: KVCache, start: int) -> KVCache:
    """As :func:`relocate`, for a cache that is put behind others, which fill every position from 0
    to ``start - 1``.

    What counts from a cache's first token, as ALiBi and chunks do, then counts right, so that less
    is refused. Exact in layer 0, where a token stands alone; whoever puts it there says of the
    other layers that they are not.

    Raises:
        RotationError, CacheLayoutError, IncompatibleModels: as :func:`relocate`.
    """
    return _moved(model, cache, start, _lasting_obstacles)


def _moved(
    model: LanguageModel, cache: KVCache, start: int, obstacles: Callable[..., Iterator[str]]
) -> KVCache:
    check_fits(model, cache)
    require("start", start, Integral, "a whole number", hint="the position of its first token")
    cache.require_unpadded("moved")
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
    for reason in obstacles(model, *ends):
        raise RotationError(
            f"a cache of {model.spec.name} ({model.spec.architecture}) cannot be moved: {reason}",
            hint="prefill the text where it is needed",
        )
    content = replace(cache.content(), positions=positions)
    return content.rotated(model.rotary(positions))


def _obstacles(model: LanguageModel, old_end: int, new_end: int) -> Iterator[str]:
    """Why turning the keys would not be enough."""
    yield from _lasting_obstacles(model, old_end, new_end)
    if model.spec.positions == "alibi":
        yield "its attention scores count positions from the cache's first token"
    for index, layer in enumerate(model.spec.layers):
        if layer.kind == "chunked":
            yield f"layer {index} sees chunks of {layer.window} positions, counted from 0"
        scaling = dict(layer.rotation.scaling) if layer.rotation else {}
        original = scaling.get("original_max_position_embeddings") or 0
        if scaling.get(GROWING_QUERIES) and max(old_end, new_end) > original:
            yield f"beyond {original} its queries grow with their position ({GROWING_QUERIES})"


def _lasting_obstacles(model: LanguageModel, old_end: int, new_end: int) -> Iterator[str]:
    """Why it would not be enough even where all positions before it are filled."""
    if model.spec.positions == "learned":
        yield "its positions are added to the embeddings, and so inside keys and values"
    ends = old_end, new_end
    for layer in model.spec.layers:
        limit = layer.rotation.fixed_up_to if layer.rotation else None
        if layer.rotation is None or limit is None or max(ends) <= limit:
            continue
        if layer.rotation.type != "longrope" or min(ends) <= limit:
            yield (
                f"from an end at {old_end} to one at {new_end} it crosses {limit} tokens, where "
                f"its RoPE ({layer.rotation.type}) changes its table"
            )
