"""Only the first layers of a model: what it has of a text before the rest of it has run.

A layer's keys and values are made from what enters it, before any attention of its own. So once r
layers have run, the keys and values of layers 0 to r are known: those of layer 0 for the price of
looking up embeddings.

The first token is run through all of them: the others lean on it in every layer (an attention
sink), so a map has to get it right, and it attends to nothing but itself, so it costs one token.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import CacheLayoutError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.cache import read
from kvtransfer.hf.call import call
from kvtransfer.hf.fits import check_ids, check_padding, check_room
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.part import Enough, State, UpTo, states
from kvtransfer.hf.run import prefill

NO_START = "fit a map without a start (leave --start out)"
"""What to do where layers cannot be told apart."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Start:
    """A prefix after the first ``len(cache) - 1`` layers of a model, and its first token after all
    of them."""

    cache: KVCache
    """Of layers 0 to r, exact, keys cached."""
    state: State
    """What enters layer r."""
    first: KVCache
    """All layers of the first token, exact, keys cached."""


def begin(model: LanguageModel, ids: Int[Tensor, "b t"], *, layers: int) -> Start:
    """Run the first ``layers`` layers of ``model`` on ``ids``, at positions 0 to t − 1.

    The forward is left as soon as layer r = ``layers`` has written its keys and values, so it costs
    r of L layers and three small products; the first token is run through all layers beside it.

    Args:
        model: Usually the target of a mapping.
        ids: The prefix.
        layers: r, from 0 to L − 1.

    Raises:
        CacheLayoutError: there is nothing to read, or more than the model has positions for.
        UnsupportedModel: the model's layers cannot be told apart.
        ValueError: the model has no such layer.
    """
    require_layers(model, [layers])
    check_ids(model, ids)
    if ids.shape[1] == 0:
        raise CacheLayoutError("an empty prefix has no cache", hint="give at least one token")
    check_room(model, ids.shape[1])
    check_padding(model, ids)
    model.require_as_wrapped()
    ids = ids.to(model.device)
    positions = torch.arange(ids.shape[1], device=model.device).expand(ids.shape[0], -1)
    rotations = model.rotary(positions)
    cache = UpTo(layers)
    with torch.no_grad(), states(model, [layers], otherwise=NO_START) as seen, suppress(Enough):
        call(model.module.base_model, ids, cache, positions, torch.ones_like(ids))
    held = read(cache, positions, rotations=rotations[: layers + 1], model=model.spec.identity)
    return Start(cache=held, state=seen[layers], first=prefill(model, ids[:, :1]))


def prefill_with_states(
    model: LanguageModel,
    ids: Int[Tensor, "b t"],
    layers: Sequence[int],
    *,
    otherwise: str = NO_START,
) -> tuple[KVCache, dict[int, State]]:
    """As :func:`kvtransfer.hf.run.prefill`, with what entered some of the layers.

    Raises:
        CacheLayoutError: as :func:`kvtransfer.hf.run.prefill`.
        UnsupportedModel: the model's layers cannot be told apart; ``otherwise`` is the hint.
        ValueError: the model has no such layer.
    """
    if not layers:
        return prefill(model, ids), {}
    require_layers(model, layers)
    with states(model, layers, otherwise=otherwise) as seen:
        cache = prefill(model, ids)
    return cache, seen


def start_of(cache: KVCache, states: dict[int, State], layers: int) -> Start:
    """What :func:`begin` would have given, out of a whole prefill."""
    assert cache.rotations is not None
    begun = replace(
        cache,
        keys=cache.keys[: layers + 1],
        values=cache.values[: layers + 1],
        rotations=cache.rotations[: layers + 1],
    )
    return Start(cache=begun, state=states[layers], first=cache.prefix(1))


def width(model: LanguageModel) -> int:
    """Numbers in a row of the residual stream."""
    return state_width(model.module.config)


def state_width(config: Any) -> int:
    """The same, of the model that a transformers config describes."""
    return int(config.get_text_config(decoder=True).hidden_size)


def require_layers(model: LanguageModel, layers: Sequence[int]) -> None:
    """Raise ValueError unless ``model`` has each of ``layers``."""
    depth = len(model.spec.layers)
    for layer in layers:
        if not 0 <= layer < depth:
            raise ValueError(f"a start of {layer} layers, and {model.spec.name} has {depth}")
