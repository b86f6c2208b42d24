"""Whether models, a cache and a start are those that a mapping goes between.

This module knows the specs of a mapping's two ends, and nothing of its maps.
"""

from kvtransfer.errors import CacheLayoutError, IncompatibleModels
from kvtransfer.geometry.cache import KVCache
from kvtransfer.geometry.compat import Verdict, compare
from kvtransfer.geometry.spec import ModelSpec, same_model, same_tokens
from kvtransfer.hf.start import Start

Ends = tuple[ModelSpec, ModelSpec]
"""A source and a target."""

ENDS = ("source", "target")

SHAPES = ("layers", "kv_heads", "head_dim", "rope", "cache_format")
"""Topics on which a model must agree with a mapping's end, whatever its weights."""


def check_ends(mine: Ends, given: Ends) -> None:
    """Raise IncompatibleModels unless both models have the weights that the mapping has."""
    (source, target), (asked_source, asked_target) = mine, given
    for end, own, other in zip(ENDS, mine, given, strict=True):
        if same_model(str(own.identity), str(other.identity)):
            continue
        reverse = source.weights == asked_target.weights and target.weights == asked_source.weights
        raise IncompatibleModels(
            f"this mapping goes {source.name} → {target.name}; asked for "
            f"{asked_source.name} → {asked_target.name} (the {end}'s weights are {own.identity} in "
            f"the mapping, {other.identity} in the model)",
            hint="a mapping has one direction: fit the reverse one, or swap the models"
            if reverse
            else "fit a mapping for this pair: kvtransfer fit SOURCE TARGET --out DIR",
        )


def insisted(mine: Ends, given: Ends) -> tuple[str, ...]:
    """A note for each model whose weights are not those that the mapping was fitted on.

    Raises:
        IncompatibleModels: more than weights differs.
    """
    notes = []
    for end, own, other in zip(ENDS, mine, given, strict=True):
        for finding in compare(own, other).findings:
            if finding.topic in SHAPES and finding.verdict is not Verdict.SAME:
                raise IncompatibleModels(
                    f"the {end} of this mapping has {finding.topic} {finding.source}, "
                    f"{other.name} has {finding.target}",
                    hint="only weights may differ; fit a mapping for this pair",
                )
        if not same_model(str(own.identity), str(other.identity)):
            notes.append(
                f"the {end}'s weights are {other.identity}, and the mapping was fitted on "
                f"{own.identity} ({own.name}): used on request"
            )
    return tuple(notes)


def check_cache(cache: KVCache, source: ModelSpec, target: ModelSpec) -> None:
    """Raise unless ``cache`` is of ``source``, with a token for each of ``target``'s.

    Raises:
        IncompatibleModels: it is another model's, or does not say whose.
        CacheLayoutError: it is not shaped as the source's, or its tokens are not the target's.
    """
    cache.require_unchanged()
    cache.require_plain("mapped")
    if cache.model is not None and not same_model(cache.model, str(source.identity)):
        raise IncompatibleModels(
            f"this cache was made by a model with fingerprint {cache.model}; the mapping "
            f"reads caches of {source.name} ({source.identity})",
            hint="use the mapping for the model that made the cache",
        )
    found = [(*keys.shape[1::2], *values.shape[1::2]) for keys, values in cache]
    wanted = [
        (layer.kv_heads, layer.key_dim, layer.kv_heads, layer.value_dim) for layer in source.layers
    ]
    if found != wanted:
        raise CacheLayoutError(
            f"this cache has {len(found)} layers of (key heads, key dim, value heads, "
            f"value dim) {sorted(set(found))}, "
            f"{source.name} has {len(wanted)} of {sorted(set(wanted))}",
            hint="a mapping reads the cache of its own source model only",
        )
    if cache.model is None:
        raise IncompatibleModels(
            f"this cache does not say which model made it; the mapping reads caches of "
            f"{source.name} ({source.weights})",
            hint="adopt(model, cache, ids) looks whether it is that model's",
        )
    # What was aligned has content keys: cached ones would stand at positions not their own.
    if cache.keys_are == "cached" and not same_tokens(source, target):
        raise CacheLayoutError(
            f"this cache has a token for each of {source.name}'s, and {target.name} "
            "cuts text into others",
            hint="transfer(mapping, source, target, ids) aligns them, with the target's ids",
        )


def check_start(start: Start | None, cache: KVCache, target: ModelSpec, layers: int | None) -> None:
    """Raise unless ``start`` is what ``target`` has of the cache's tokens after ``layers`` layers.

    Raises:
        CacheLayoutError: it is missing or not asked for, or of other layers or positions.
        IncompatibleModels: it is another model's.
    """
    if start is None and layers is None:
        return
    if start is None:
        raise CacheLayoutError(
            f"this mapping asks for what {target.name} has of the prefix after "
            f"{layers} of its layers, and that was not given",
            hint="transfer(mapping, source, target, ids) sees to it, or give "
            f"start=begin(target, ids, layers={layers})",
        )
    given = len(start.cache) - 1
    if layers is None:
        raise CacheLayoutError(
            f"this mapping has no start, and one of {given} layers was given",
            hint="leave start out",
        )
    if given != layers:
        raise CacheLayoutError(
            f"this mapping starts with {layers} layers, and one of {given} was given",
            hint=f"begin(target, ids, layers={layers})",
        )
    if not same_model(str(start.cache.model), str(target.identity)):
        raise IncompatibleModels(
            f"the start is of a model with fingerprint {start.cache.model}; the mapping goes "
            f"to {target.name} ({target.identity})",
            hint="begin with the mapping's own target",
        )
    if start.cache.positions.shape != cache.positions.shape or bool(
        (start.cache.positions != cache.positions.to(start.cache.positions)).any()
    ):
        raise CacheLayoutError(
            f"the start holds {start.cache.tokens} tokens at other positions than the "
            f"cache's {cache.tokens}",
            hint="begin with the same ids as the source read",
        )
