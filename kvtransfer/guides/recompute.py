"""Repair a cache by reading some of its tokens again: those whose keys and values are most wrong.

After CacheBlend (arXiv:2405.16444): the first layers are computed for all tokens, which shows where
the cache deviates; then only the tokens that deviate most run through the following layers, layer
by layer, attending to old keys and values and to each other's new ones. Meant for caches that are
nearly right: a chunk put after text that it never saw, or a cache mapped from another model.
"""

from dataclasses import replace
from numbers import Integral, Real

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvtransfer.errors import CacheLayoutError, require
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.reread import check_readable, first_layers, reread

EXACT = 0.01
"""The squared error of a token in layer 0, relative to the mean squared size, up to which it is
rounding; another token's is about one."""

LAYERS = 2
"""How many layers are computed for all tokens. In the first, a token's keys and values are of the
token alone; the second is the first in which they tell of the text before it."""


def recompute(
    model: LanguageModel,
    ids: Int[Tensor, "b t"],
    cache: KVCache,
    share: float,
    *,
    after: int = 0,
    layers: int = LAYERS,
) -> KVCache:
    """``cache`` with a share of its tokens read again by ``model``.

    The first ``layers`` layers are computed for all tokens (the last of them only as far as its
    keys and values), at ``layers - 1`` layers' cost; the chosen tokens then run through all layers.
    A share of 0 costs nothing and changes nothing; a share of 1 is a prefill.

    Args:
        model: Whose cache it is.
        ids: The tokens that ``cache`` holds.
        cache: As ``model`` can read it, right or not.
        share: Of the tokens that may be wrong, from 0 to 1; rounded, and one token at least.
        after: How many of the first tokens are known to be right: they are never read again, and
            not counted.
        layers: How many layers, from the first on, tell which tokens to choose.

    Returns:
        A cache that is exact at a share of 1, and otherwise says how much of it was recomputed
        beside what was said of it before.

    Raises:
        CacheLayoutError, IncompatibleModels: cache or ids are not the model's, or do not go
            together; or a cache that is said to be exact is of other ids.
        RotationError: the model's table depends on how long a text it reads.
        UnsupportedModel: its attention cannot be given a mask for tokens here and there.
        ValueError: ``share``, ``after`` or ``layers`` is out of range.
        WrongKind: an argument is no number, tensor, cache or model.

    Example:
        >>> repaired = recompute(model, ids, graft, 0.15)  # doctest: +SKIP
    """
    require("share", share, Real, "a number", hint="0.15 is 15 % of the tokens")
    for name, count in (("after", after), ("layers", layers)):
        require(name, count, Integral, "a whole number", hint="a number of tokens, or of layers")
    check_readable(model, ids, cache)
    depth = len(model.spec.layers)
    if not 0 <= share <= 1:  # NaN is none either
        raise ValueError(f"a share of {share}; it lies between 0 and 1")
    if not 1 <= layers <= depth:
        raise ValueError(f"{layers} layers are to be looked at, and the model has {depth}")
    if not 0 <= after <= cache.tokens:
        raise ValueError(f"{after} tokens are said to be right, of {cache.tokens}")
    doubtful = cache.tokens - after
    count = min(max(round(share * doubtful), 1), doubtful) if share > 0 else 0
    if count == 0:
        return cache
    begun = first_layers(model, ids, cache, after=after, last=layers - 1)
    if cache.approximate is None:
        _require_of_these(model, begun, cache)
    index = worst(deviation(begun, cache, layers=layers), count, after=after)
    made = reread(model, ids, begun, index, right=layers)
    return replace(made, approximate=_remark(cache, count, of=doubtful))


def _require_of_these(model: LanguageModel, right: KVCache, cache: KVCache) -> None:
    """Raise CacheLayoutError if a cache that is said to be exact is another text's.

    In layer 0 a token's keys and values are of the token and its position alone, so there they
    must be what the model makes of it.
    """
    off = deviation(right, cache, layers=1).amax()
    if float(off) > EXACT:
        raise CacheLayoutError(
            f"this cache is not of these ids: in layer 0 of {model.spec.name} a token is off by "
            f"{float(off):.2g} of its squared size",
            hint="give the ids that it was made of; of a cache that is known to be wrong, say so: "
            "replace(cache, approximate=…)",
        )


def deviation(right: KVCache, cache: KVCache, *, layers: int) -> Float[Tensor, "b t"]:
    """By how much each token of ``cache`` is off in its first ``layers`` layers.

    The squared error of a token's keys over the mean squared size of all tokens' keys, plus the
    same of its values, summed over layers.

    Args:
        right: Keys and values as they should be, of these layers at least.
        cache: As it is.
        layers: How many to look at.
    """
    if right.positions.shape != cache.positions.shape:
        raise CacheLayoutError(
            f"caches of {tuple(right.positions.shape)} and {tuple(cache.positions.shape)} (batch, "
            "tokens)",
            hint="compare two caches of the same tokens",
        )
    total = torch.zeros(cache.positions.shape, dtype=torch.float32, device=right.keys[0].device)
    for layer in range(layers):
        for wanted, found in zip(right[layer], cache[layer], strict=True):
            error = (found.to(wanted) - wanted).float().square().sum((1, 3))
            size = wanted.float().square().sum((1, 3)).mean(1, keepdim=True)
            total += error / size.clamp_min(torch.finfo(torch.float32).tiny)
    return total


def worst(deviations: Float[Tensor, "b t"], count: int, *, after: int = 0) -> Int[Tensor, "b c"]:
    """Each row's ``count`` tokens that deviate most, in the order in which they stand.

    The first ``after`` tokens are passed over.
    """
    chosen = deviations[:, after:].topk(count, dim=1).indices + after
    return chosen.sort(dim=1).values


def _remark(cache: KVCache, count: int, *, of: int) -> str | None:
    """What a repaired cache says of itself; one that was exact before is exact still."""
    if cache.approximate is None or count == of:
        return None
    return f"{cache.approximate}; {count} of {of} tokens recomputed"
