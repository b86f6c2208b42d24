"""Take in a cache that something else made, once it is seen to be this model's."""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import CacheLayoutError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.cache import read
from kvtransfer.hf.fits import check_finite, check_ids, check_padding, check_room, check_shapes
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import read_at

HEAD = 8
"""The first tokens, whose keys and values are compared in every layer."""

SPREAD = 16
"""How many further tokens, evenly spaced, are compared in layer 0, where a token stands alone."""

TOLERANCE = {torch.float32: 0.01, torch.float16: 0.05, torch.bfloat16: 0.1}
"""Largest difference that counts as the same, relative to the norm of what is compared."""

DEQUANTISED = 0.5
"""The same for a cache that went through a few bits; a wrong one differs by 1 or more."""


def adopt(
    model: LanguageModel,
    cache: Any,
    ids: Int[Tensor, "b t"],
    *,
    mask: Int[Tensor, "b t"] | None = None,
    start: int = 0,
    whole: bool = False,
) -> KVCache:
    """A cache from outside as a value, once it is seen to be what ``model`` keeps of ``ids``.

    No shape can tell a cache of another model, a transposed block with as many heads as tokens,
    float16 bits that were read as bfloat16, or keys that were rotated twice. A few tokens can: the
    first ones are read again through every layer, and others, spread over the text, alone, which
    is exact in layer 0. What deeper layers hold of later tokens is taken on trust, unless the
    ``whole`` text is read again; it is wherever the model's table changes with the length.

    Args:
        model: Is said to have made the cache.
        cache: A transformers cache of any kind, or what older versions gave
            (:data:`kvtransfer.hf.cache.FORMS`).
        ids: The tokens that it holds.
        mask: The attention mask that they were read with, if any.
        start: Position of the first of them.
        whole: Read all tokens again and compare them in every layer, for the price of a prefill.

    Raises:
        CacheLayoutError: it is no cache, or not of this shape, dtype or length, or it holds other
            numbers than the model keeps of these tokens; the layer is named.
    """
    check_ids(model, ids)
    check_padding(model, ids, mask)
    if ids.shape[1] == 0:
        raise CacheLayoutError("a cache of no tokens", hint="give the ids that it was made of")
    check_room(model, start + ids.shape[1])
    ids = ids.to(model.device)
    positions = torch.arange(start, start + ids.shape[1], device=model.device).expand(len(ids), -1)
    found = read(cache, positions, model=model.spec.identity)
    check_shapes(model.spec, found)
    found = replace(found, rotations=model.rotary(positions))
    if found.note:
        found = found.to(dtype=model.dtype)
    if found.dtype != model.dtype:
        raise CacheLayoutError(
            f"this cache is {found.dtype}, {model.spec.name} runs in {model.dtype}",
            hint="read the text in the dtype that is to go on with it, or cast the blocks first",
        )
    check_finite(found)
    _compare(model, found, ids, whole=whole)
    return found


def _compare(model: LanguageModel, found: KVCache, ids: Tensor, *, whole: bool) -> None:
    """Raise CacheLayoutError unless the model keeps the same of some of the tokens."""
    tolerance = DEQUANTISED if found.note else TOLERANCE.get(model.dtype, TOLERANCE[torch.bfloat16])
    content = found.content()
    # Where the table depends on the length, a short text is turned, and so attended to, by another.
    head = found.tokens if whole or _crosses(model, found) else min(HEAD, found.tokens)
    again = read_at(model, ids[:, :head], found.positions[:, :head]).content()
    for layer in range(len(found)):
        for kind, mine, given in (
            ("keys", again.keys[layer], content.keys[layer][:, :, :head]),
            ("values", again.values[layer], content.values[layer][:, :, :head]),
        ):
            _require_close(kind, layer, f"the first {head} tokens", mine, given, tolerance, model)
    spread = torch.linspace(0, found.tokens - 1, min(SPREAD, found.tokens)).long().to(ids.device)
    alone = read_at(
        model, ids[:, spread].reshape(-1, 1), found.positions[:, spread].reshape(-1, 1)
    ).content()
    for kind, singles, blocks in (
        ("keys", alone.keys[0], content.keys[0]),
        ("values", alone.values[0], content.values[0]),
    ):
        given = blocks[:, :, spread].transpose(1, 2).reshape(singles.shape)
        where = f"{len(spread)} tokens up to number {int(spread[-1])}"
        _require_close(kind, 0, where, singles, given, tolerance, model)


def _crosses(model: LanguageModel, found: KVCache) -> bool:
    end = int(found.positions.max()) + 1
    limits = [layer.rotation.fixed_up_to for layer in model.spec.layers if layer.rotation]
    return any(limit is not None and end > limit for limit in limits)


def _require_close(
    kind: str,
    layer: int,
    where: str,
    mine: Tensor,
    given: Tensor,
    tolerance: float,
    model: LanguageModel,
) -> None:
    mine, given = mine.double().flatten(1), given.double().flatten(1)
    scale = mine.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    error = float(((given - mine).norm(dim=1) / scale).max())  # the worst row of the batch
    if not error <= tolerance:  # what is not finite is not close either
        raise CacheLayoutError(
            f"the {kind} of layer {layer} are not what {model.spec.name} keeps of these tokens: "
            f"over {where} they differ by {error:.2g} of their size",
            hint="it may be another model's or another text's cache, at other positions, with keys "
            "rotated twice or not at all, blocks laid out as (batch, tokens, kv_heads, head_dim), "
            "or bits read in another dtype",
        )
