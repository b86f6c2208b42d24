"""Only the first layers of a model: what it has of a text before the rest of it has run.

A layer's keys and values are made from what enters it, before any attention of its own. So once r
layers have run, the keys and values of layers 0 to r are known: those of layer 0 for the price of
looking up embeddings.

The first token is run through all of them: the others lean on it in every layer (an attention
sink), so a map has to get it right, and it attends to nothing but itself, so it costs one token.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import DynamicCache

from kvtransfer.errors import CacheLayoutError, UnsupportedModel
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.cache import read
from kvtransfer.hf.call import call
from kvtransfer.hf.fits import check_ids, check_padding, check_room
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill

State = Float[Tensor, "_b _t _e"]
"""What enters a layer: the residual stream, one row a token."""


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
    cache = _UpTo(layers)
    with torch.no_grad(), _states(model, [layers]) as seen, suppress(_Enough):
        call(model.module.base_model, ids, cache, positions, torch.ones_like(ids))
    held = read(cache, positions, rotations=rotations[: layers + 1], model=model.spec.identity)
    return Start(cache=held, state=seen[layers], first=prefill(model, ids[:, :1]))


def prefill_with_states(
    model: LanguageModel, ids: Int[Tensor, "b t"], layers: Sequence[int]
) -> tuple[KVCache, dict[int, State]]:
    """As :func:`kvtransfer.hf.run.prefill`, with what entered some of the layers."""
    if not layers:
        return prefill(model, ids), {}
    require_layers(model, layers)
    with _states(model, layers) as seen:
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


class _Enough(Exception):
    """Raised inside a forward to leave it."""


class _UpTo(DynamicCache):
    """A plain cache that ends the forward once it holds layers 0 to ``last``."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self._last = last

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *more: Any, **named: Any
    ) -> Any:
        """Keep what a layer wrote."""
        updated = super().update(key_states, value_states, layer_idx, *more, **named)
        if layer_idx == self._last:
            raise _Enough
        return updated


@contextmanager
def _states(model: LanguageModel, layers: Sequence[int]) -> Iterator[dict[int, State]]:
    """Fill a dictionary with what enters some layers while the model runs."""
    stack = _stack(model)
    seen: dict[int, State] = {}

    def watch(layer: int) -> Any:
        def hook(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            seen[layer] = (given[0] if given else named["hidden_states"]).detach()

        return stack[layer].register_forward_pre_hook(hook, with_kwargs=True)

    hooks = [watch(layer) for layer in layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _stack(model: LanguageModel) -> nn.ModuleList:
    """The decoder's layers, in order."""
    base = model.module.base_model
    depth = model.module.config.get_text_config(decoder=True).num_hidden_layers
    for module in base.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    raise UnsupportedModel(
        f"no list of {depth} layers was found in {type(base).__name__}",
        hint="fit a map without a start (leave --start out)",
    )
