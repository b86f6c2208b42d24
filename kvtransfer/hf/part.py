"""Run a part of a model: up to some layer, or with what enters its layers seen."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from transformers import DynamicCache

from kvtransfer.errors import UnsupportedModel
from kvtransfer.hf.model import LanguageModel

State = Float[Tensor, "_b _t _e"]
"""What enters a layer: the residual stream, one row a token."""


class Enough(Exception):
    """Raised inside a forward to leave it."""


class UpTo(DynamicCache):
    """A plain cache that ends the forward once layer ``last`` has written to it."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self._last = last

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *more: Any, **named: Any
    ) -> Any:
        """Keep what a layer wrote."""
        updated = super().update(key_states, value_states, layer_idx, *more, **named)
        if layer_idx == self._last:
            raise Enough
        return updated


@contextmanager
def states(
    model: LanguageModel, layers: Sequence[int], *, otherwise: str
) -> Iterator[dict[int, State]]:
    """Fill a dictionary with what enters some layers while the model runs."""
    found = stack(model, otherwise=otherwise)
    seen: dict[int, State] = {}

    def watch(layer: int) -> Any:
        def hook(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            seen[layer] = (given[0] if given else named["hidden_states"]).detach()

        return found[layer].register_forward_pre_hook(hook, with_kwargs=True)

    hooks = [watch(layer) for layer in layers]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def stack(model: LanguageModel, *, otherwise: str) -> nn.ModuleList:
    """The decoder's layers, in order.

    Args:
        model: Whose.
        otherwise: What to do where they cannot be told apart, for the error.

    Raises:
        UnsupportedModel: there is no list of as many modules as the model has layers.
    """
    base = model.module.base_model
    depth = model.module.config.get_text_config(decoder=True).num_hidden_layers
    for module in base.modules():
        if isinstance(module, nn.ModuleList) and len(module) == depth:
            return module
    raise UnsupportedModel(
        f"no list of {depth} layers was found in {type(base).__name__}", hint=otherwise
    )
