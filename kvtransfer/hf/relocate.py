"""Move a cache to other positions: the keys are turned on, and nothing else changes."""

from dataclasses import replace

from kvtransfer.errors import RotationError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.fits import check_fits, check_room
from kvtransfer.hf.model import LanguageModel


def relocate(model: LanguageModel, cache: KVCache, start: int) -> KVCache:
    """The same cache with its first token at position ``start``.

    Exact for a prefix, whose tokens saw nothing before them: relative positions stay, so a model
    reads on as it would have. Put after other text it is an approximation beyond layer 0: the
    tokens were read without that text.

    Raises:
        RotationError: this model's positions cannot be taken out of its keys, or decide which
            tokens a layer sees.
        CacheLayoutError: the cache is not shaped as the model's, or would end beyond its context.
        IncompatibleModels: it is another model's cache.
    """
    spec = model.spec
    check_fits(model, cache)
    shift = start - int(cache.positions.min())
    if shift == 0:
        return cache
    if spec.positions in ("learned", "alibi"):
        where = {
            "learned": "added to the embeddings, and so inside keys and values",
            "alibi": "in the attention scores, counted from the cache's first token",
        }[spec.positions]
        raise RotationError(
            f"the positions of {spec.name} ({spec.architecture}) are {where}: its cache cannot be "
            "moved",
            hint="prefill the text where it is needed",
        )
    for index, layer in enumerate(spec.layers):
        if layer.kind == "chunked":
            raise RotationError(
                f"layer {index} of {spec.name} sees chunks of {layer.window} positions, counted "
                "from 0: moved tokens would be in other chunks",
                hint="prefill the text where it is needed",
            )
    if start < 0:
        raise RotationError(f"there is no position {start}", hint="positions start at 0")
    positions = cache.positions + shift
    ends = int(cache.positions.max()) + 1, int(positions.max()) + 1
    check_room(model, ends[1])
    for turn in {layer.rotation for layer in spec.layers if layer.rotation is not None}:
        limit = turn.fixed_up_to
        if limit is None or max(ends) <= limit or (turn.type == "longrope" and min(ends) > limit):
            continue
        raise RotationError(
            f"a move from an end at {ends[0]} to one at {ends[1]} crosses {limit} tokens, where "
            f"the RoPE ({turn.type}) of {spec.name} changes its table",
            hint="prefill the text where it is needed",
        )
    content = replace(cache.content(), positions=positions)
    return content.rotated(model.rotary(positions))
