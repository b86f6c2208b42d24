"""Run some layers of a model in a row, from what enters the first of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from kvtransfer.errors import CacheLayoutError
from kvtransfer.geometry.cache import Block
from kvtransfer.hf.call import call
from kvtransfer.hf.fits import check_ids, check_padding, check_room
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.part import Enough, State, UpTo, stack
from kvtransfer.hf.start import require_layers

ELSE = "recompute tokens instead of layers"


def read_group(
    model: LanguageModel,
    ids: Int[Tensor, "b t"],
    state: State | None,
    *,
    first: int,
    last: int,
) -> list[tuple[Block, Block]]:
    """Keys and values of layers ``first`` to ``last``, from what enters layer ``first``.

    The layers before do not run, and the forward is left as soon as layer ``last`` has written its
    keys and values: a group of n layers costs n − 1 of them and a projection.

    Args:
        model: Whose layers run.
        ids: The prefix, at positions 0 to t − 1.
        state: What enters layer ``first``, from this model or from a sibling; None for the
            embeddings of ``ids``, which enter layer 0.
        first: Number of a layer.
        last: Number of a layer, not before ``first``.

    Returns:
        One pair a layer, keys cached.

    Raises:
        CacheLayoutError: there is nothing to read, or more than the model has positions for, or the
            state is not of these tokens.
        UnsupportedModel: the model's layers cannot be told apart.
        ValueError: there are no such layers, or a state is missing.
    """
    require_layers(model, [first, last])
    if last < first:
        raise ValueError(f"layers {first} to {last} are none")
    if state is None and first > 0:
        raise ValueError(f"what enters layer {first} is not known without a state")
    check_ids(model, ids)
    check_padding(model, ids)
    check_room(model, ids.shape[1])
    if ids.shape[1] == 0:
        raise CacheLayoutError("an empty prefix has no cache", hint="give at least one token")
    if state is not None and state.shape[-3:-1] != ids.shape:
        raise CacheLayoutError(
            f"a state of shape {tuple(state.shape)} for ids of shape {tuple(ids.shape)}",
            hint="keep the state of the very tokens that the cache is of",
        )
    model.require_as_wrapped()
    ids = ids.to(model.device)
    positions = torch.arange(ids.shape[1], device=model.device).expand(ids.shape[0], -1)
    model.rotary(positions)  # a dynamic table that remembers a longer text is set back
    held = UpTo(last)
    with torch.no_grad(), _entering(model, ids, state, first), suppress(Enough):
        call(model.module.base_model, ids, held, positions, torch.ones_like(ids))
    layers: Any = held.layers
    return [(layers[i].keys, layers[i].values) for i in range(first, last + 1)]


@contextmanager
def _entering(
    model: LanguageModel, ids: Int[Tensor, "b t"], state: State | None, first: int
) -> Iterator[None]:
    """Let ``state`` enter layer ``first``, and the layers before it do nothing."""
    if state is None:
        yield
        return
    layers = stack(model, otherwise=ELSE)
    given_state = state.to(device=model.device, dtype=model.dtype)
    skipped = list(layers[:first])
    in_tuples = bool(skipped) and _answers_in_tuples(model, ids, layers[0])

    def enter(
        module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if given:
            return (given_state, *given[1:]), named
        return given, named | {"hidden_states": given_state}

    hook = layers[first].register_forward_pre_hook(enter, with_kwargs=True)
    try:
        with _passed_over(skipped, in_tuples):
            yield
    finally:
        hook.remove()


@contextmanager
def _passed_over(layers: Sequence[nn.Module], in_tuples: bool) -> Iterator[None]:
    """Let some layers hand on what enters them."""

    def forward(*given: Any, **named: Any) -> Any:
        entered = given[0] if given else named["hidden_states"]
        return (entered,) if in_tuples else entered

    theirs = [vars(layer).get("forward") for layer in layers]
    for layer in layers:
        layer.forward = forward
    try:
        yield
    finally:
        for layer, own in zip(layers, theirs, strict=True):
            if own is None:
                del layer.forward  # the class's own shows again
            else:
                layer.forward = own


def _answers_in_tuples(model: LanguageModel, ids: Int[Tensor, "b t"], layer: nn.Module) -> bool:
    """Whether a layer returns a tuple that begins with the state, or the state alone."""
    found: list[bool] = []

    def look(module: nn.Module, given: Any, output: Any) -> None:
        found.append(isinstance(output, tuple))

    hook = layer.register_forward_hook(look)
    zero = torch.zeros_like(ids[:1, :1])
    try:
        with suppress(Enough):
            call(model.module.base_model, ids[:1, :1], UpTo(1), zero, torch.ones_like(zero))
    finally:
        hook.remove()
    return found[0]
