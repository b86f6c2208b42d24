"""Let a model's layers see some columns of its cache and not others.

transformers makes one mask for all layers (or one a kind of layer). What is hidden in one layer
alone, or from one head, goes into the mask on its way to that layer's attention.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import pad

from kvtransfer.errors import UnsupportedModel
from kvtransfer.geometry.hidden import Hidden
from kvtransfer.hf.intercept import Attention, implementations, intercepted
from kvtransfer.hf.model import LanguageModel

MASKED = ("eager", "sdpa")
"""Implementations that take a mask for each query, key and head."""


@contextmanager
def blinded(model: LanguageModel, hidden: Hidden | None) -> Iterator[None]:
    """For runs of ``model`` on a cache whose first columns are those of ``hidden``.

    Raises:
        UnsupportedModel: its attention takes no mask of that kind, or does not go through
            transformers' attention interface.
    """
    if hidden is None:
        yield
        return
    require_blindable(model)
    numbers = _numbers(model.module)
    asked: set[int] = set()

    def around(own: Attention) -> Attention:
        def attention(
            layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **named: Any
        ) -> tuple[Tensor, Any]:
            number = numbers.get(id(layer))
            gone = None if number is None else hidden[number]
            if number is not None and gone is not None:
                asked.add(number)
                mask = _without(mask, gone, query, key)
            return own(layer, query, key, value, mask, **named)

        return attention

    with intercepted(model.module, around):
        yield
    missed = [n for n, gone in enumerate(hidden) if gone is not None and n not in asked]
    if missed:
        raise UnsupportedModel(
            f"layers {', '.join(map(str, missed))} of {model.spec.name} "
            f"({model.spec.architecture}) saw what was to be hidden: they do not go through "
            "transformers' attention interface",
            hint="hide nothing from this model: cut the prefix, or zero it (which is not the same)",
        )


def require_blindable(model: LanguageModel) -> None:
    """Raise UnsupportedModel unless the model's attention takes a mask for each key and head."""
    for name in implementations(model.module):
        if name not in MASKED:
            raise UnsupportedModel(
                f"{model.spec.name} computes attention by {name!r}, which cannot hide tokens from "
                "one layer or head",
                hint=f"load it with attn_implementation {' or '.join(MASKED)}",
            )


def _numbers(module: nn.Module) -> dict[int, int]:
    """By the ``id`` of each part of a model that has a number, the layer whose cache it reads."""
    parts: list[Any] = [part for part in module.modules() if hasattr(part, "layer_idx")]
    # Layers at the end that keep no cache of their own read that of the last such one of their kind
    # (Gemma 3n and 4).
    kept = {
        getattr(part, "layer_type", None): int(part.layer_idx)
        for part in parts
        if getattr(part, "store_full_length_kv", False)
    }
    shares = {
        id(part): kept[getattr(part, "layer_type", None)]
        for part in parts
        if getattr(part, "is_kv_shared_layer", False)
    }
    return {id(part): int(part.layer_idx) for part in parts} | shares


def _without(
    mask: Tensor | None,
    gone: Bool[Tensor, "b h t"],
    query: Float[Tensor, "b g s d"],
    key: Float[Tensor, "b _h n d"],
) -> Tensor:
    """``mask`` with columns taken out: for sdpa of bools, True for what is seen, or of numbers that
    are added to the scores."""
    queries, tokens = query.shape[2], key.shape[2]
    gone = pad(gone.to(key.device), (0, tokens - gone.shape[2]))
    gone = gone.repeat_interleave(query.shape[1] // gone.shape[1], dim=1)[:, :, None]
    if mask is None:  # what an implementation may leave out: each sees all up to itself
        mask = torch.ones(queries, tokens, dtype=torch.bool, device=key.device)
        mask = mask.tril(tokens - queries)[None, None]
    mask = mask[..., :tokens]
    if mask.dtype == torch.bool:
        return mask & ~gone
    return mask.masked_fill(gone, torch.finfo(mask.dtype).min)
