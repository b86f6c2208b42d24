"""Read some tokens of a text again, in the midst of a cache of all of it.

Layer by layer: the chosen tokens attend to the old keys and values of the others and to the new
ones of each other, and what they leave replaces what stood there. The model's own forward does it,
given two things that it asks others for anyway: a cache, which puts the new keys and values among
the old, and a mask, which its own rules make for queries that stand here and there.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from kvtransfer.errors import CacheLayoutError, RotationError, UnsupportedModel
from kvtransfer.geometry.cache import KVCache
from kvtransfer.geometry.join import require_cache
from kvtransfer.hf.adopt import TOLERANCE
from kvtransfer.hf.cache import write
from kvtransfer.hf.call import call
from kvtransfer.hf.fits import check_fits, check_ids, check_room
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.part import Enough, UpTo
from kvtransfer.hf.start import require_layers

ELSE = "prefill the text, or use the cache as it is"


def reread(
    model: LanguageModel,
    ids: Int[Tensor, "b t"],
    cache: KVCache,
    index: Int[Tensor, "b c"],
    *,
    right: int = 0,
) -> KVCache:
    """The cache with the keys and values of some tokens computed anew, in every layer.

    Args:
        model: Whose cache it is.
        ids: All tokens that ``cache`` holds.
        cache: Keys and values of them, right or not.
        index: Which tokens to read again, each row ascending, counted from the cache's first.
        right: Layers, from the first on, that are known to be right at all tokens. They must come
            out as they went in, which tells whether the model reads tokens here and there as it
            reads them in a row.

    Raises:
        CacheLayoutError, IncompatibleModels: the cache or the ids are not the model's, or do not
            go together.
        RotationError: the model's table depends on how long a text it reads.
        UnsupportedModel: its attention cannot be given such a mask, or does not keep to it.
    """
    check_readable(model, ids, cache)
    _require_no_mask_of_its_own(model)
    index = index.to(model.device)
    mixed = _Mixed(cache, index)
    positions = cache.positions.to(model.device)
    chosen = positions.gather(1, index)
    everything = torch.ones_like(positions)
    decoder = model.module.base_model
    with torch.no_grad(), _masks_of(model, index, cache.tokens) as made:
        call(decoder, ids.to(model.device).gather(1, index), mixed, chosen, everything)
    if not made:
        raise _no_mask(model, "it asks transformers for none")
    if silent := sorted(set(range(len(cache))) - mixed.written):
        raise UnsupportedModel(
            f"layer {silent[0]} of {model.spec.name} wrote nothing to its cache", hint=ELSE
        )
    layers: Any = mixed.layers
    found = replace(
        cache,
        keys=tuple(layer.keys for layer in layers),
        values=tuple(layer.values for layer in layers),
        rotations=model.rotary(positions),
    )
    for layer in range(right):
        for before, now in zip(cache[layer], found[layer], strict=True):
            error = float((now - before).float().norm() / before.float().norm())
            if not error <= TOLERANCE.get(model.dtype, TOLERANCE[torch.bfloat16]):
                raise _no_mask(model, f"layer {layer} comes out otherwise, by {error:.2g}")
    return found


def first_layers(
    model: LanguageModel, ids: Int[Tensor, "b t"], cache: KVCache, *, after: int, last: int
) -> KVCache:
    """The cache with layers 0 to ``last`` computed anew, of all tokens but the first ``after``.

    The forward is left as soon as layer ``last`` has written its keys and values.

    Args:
        model: Whose cache it is.
        ids: All tokens that ``cache`` holds.
        cache: Keys and values of them; the first ``after`` tokens are taken as right.
        after: Tokens that stay as they are.
        last: Number of a layer.

    Raises:
        CacheLayoutError, IncompatibleModels, RotationError: as :func:`reread`.
        ValueError: there is no such layer.
    """
    require_layers(model, [last])
    check_readable(model, ids, cache)
    if after == cache.tokens:
        return cache
    held = UpTo(last)
    if after:
        for layer, (keys, values) in enumerate([*cache.prefix(after)][: last + 1]):
            DynamicCache.update(held, keys, values, layer)  # theirs, which does not end anything
    positions = cache.positions.to(model.device)
    with torch.no_grad(), suppress(Enough):
        call(
            model.module.base_model,
            ids[:, after:].to(model.device),
            held,
            positions[:, after:],
            torch.ones_like(positions),
        )
    layers: Any = held.layers[: last + 1]
    return replace(
        cache,
        keys=(*(layer.keys for layer in layers), *cache.keys[last + 1 :]),
        values=(*(layer.values for layer in layers), *cache.values[last + 1 :]),
    )


def check_readable(model: LanguageModel, ids: Int[Tensor, "b t"], cache: KVCache) -> None:
    """Raise unless tokens of ``ids`` can be read again on ``cache``, as :func:`reread` says."""
    check_ids(model, ids)
    require_cache(cache)
    if ids.shape != cache.positions.shape:
        raise CacheLayoutError(
            f"ids of shape {tuple(ids.shape)}, and a cache of {tuple(cache.positions.shape)} "
            "(batch, tokens)",
            hint="give the ids of all tokens in the cache, and no others",
        )
    if cache.keys_are != "cached":
        raise CacheLayoutError(
            "content keys carry no positions; a model cannot read them",
            hint="apply the target's rotation first: cache.rotated(target.rotary(cache.positions))",
        )
    if bool((cache.positions.diff(dim=1) < 1).any()):
        raise CacheLayoutError(
            "the tokens of this cache do not stand in the order of their positions",
            hint="put what comes first in the text first",
        )
    check_fits(model, cache)
    if cache.tokens == 0:
        return
    end = int(cache.positions.max()) + 1
    check_room(model, end)
    for index, layer in enumerate(model.spec.layers):
        turn = layer.rotation
        if turn is not None and turn.fixed_up_to is not None and end > turn.fixed_up_to:
            raise RotationError(
                f"layer {index} of {model.spec.name} changes its RoPE ({turn.type}) beyond "
                f"{turn.fixed_up_to} tokens, and this cache ends at {end}: tokens read again alone "
                "would be turned by another table than the rest",
                hint=f"keep the prefix within {turn.fixed_up_to} tokens, or prefill it whole",
            )


class _Mixed(DynamicCache):
    """A cache of a whole text that takes new keys and values of some of its tokens."""

    def __init__(self, kv: KVCache, index: Int[Tensor, "b c"]) -> None:
        super().__init__()
        self.layers = write(kv).layers  # copies, so that we may write to them
        self._index, self._tokens = index, kv.tokens
        self.written: set[int] = set()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *more: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        """Put what a layer made of the chosen tokens in its place; give back the whole."""
        layer: Any = self.layers[layer_idx]
        where = self._index[:, None, :, None]
        for held, new in ((layer.keys, key_states), (layer.values, value_states)):
            held.scatter_(2, where.expand_as(new), new.to(held.dtype))
        self.written.add(layer_idx)
        return layer.keys, layer.values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before the chosen ones, if those stood last: what a model adds theirs to."""
        return self._tokens - self._index.shape[1]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The mask spans all tokens, from the first on."""
        return self._tokens, 0


@contextmanager
def _masks_of(
    model: LanguageModel, index: Int[Tensor, "b c"], tokens: int
) -> Iterator[list[Tensor]]:
    """Have the model's masks made for queries that stand at ``index``; yields those made."""
    name = str(model.module.config._attn_implementation)
    inner = ALL_MASK_ATTENTION_FUNCTIONS.get(name)
    made: list[Tensor] = []
    if inner is None:
        raise _no_mask(model, f"transformers makes none for {name}")

    def mask(*given: Any, **named: Any) -> Tensor:
        rule = named.get("mask_function")
        if given or rule is None:
            raise _no_mask(model, "this version of transformers asks for it in another way")

        def here(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            allowed: Tensor = rule(batch, head, index[batch, query], key)
            return allowed

        named |= {
            "mask_function": here,
            "q_length": index.shape[1],
            "kv_length": tokens,
            "q_offset": 0,
            "kv_offset": 0,
            # A mask that "is causal" is none at all, and none would put the queries last.
            "allow_is_causal_skip": False,
        }
        found = inner(**named)
        if not isinstance(found, Tensor) or found.ndim != 4:
            raise _no_mask(model, f"{name} takes none that says it token by token")
        made.append(found)
        return found

    ALL_MASK_ATTENTION_FUNCTIONS[name] = mask
    try:
        yield made
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS[name]  # the local entry; the library's own shows again
        if ALL_MASK_ATTENTION_FUNCTIONS.get(name) is not inner:
            ALL_MASK_ATTENTION_FUNCTIONS[name] = inner  # a user's


def _require_no_mask_of_its_own(model: LanguageModel) -> None:
    """Raise UnsupportedModel for layers that keep a table of who sees whom, as GPT-Neo's do.

    They cut a mask out of it for queries that stand last, whatever mask they are given.
    """
    for name, module in model.module.base_model.named_modules():
        if not isinstance(module, nn.ModuleList):
            continue
        for part, table in module.named_buffers():
            square = table.ndim >= 2 and table.shape[-1] == table.shape[-2]
            if square and table.dtype == torch.bool:
                raise _no_mask(model, f"{name}.{part} is a mask of its own")


def _no_mask(model: LanguageModel, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{model.spec.name} ({model.spec.architecture}) cannot read tokens here and there: their "
        f"mask cannot be given to it, because {why}",
        hint="load it with attn_implementation='sdpa' or 'eager', or prefill the text",
    )
