"""Stand between a model's layers and transformers' attention functions."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Attention = Callable[..., tuple[Tensor, Any]]
"""Takes layer, query, key, value, mask and keywords; gives output and weights."""


_ONE_THREAD = threading.RLock()
"""The registry is one for all threads, and what stands in it is put back in order."""


@contextmanager
def intercepted(module: nn.Module, around: Callable[[Attention], Attention]) -> Iterator[None]:
    """Have the attention of ``module`` computed by ``around(its own function)``, then no more.

    Nested uses see each other's: the one that was opened last is asked first. Layers of other
    models with the same implementation come by as well. Other threads' runs do not: they go on as
    they would, or where they stand in between as well, wait.
    """
    with _ONE_THREAD, ExitStack() as stack:
        for name in implementations(module):
            stack.enter_context(_intercepted(name, around))
        yield


def implementations(module: nn.Module) -> tuple[str, ...]:
    """What computes the attention of its layers: one name, or where parts differ, several."""
    parts = [part for part in module.modules() if hasattr(part, "layer_idx")]
    configs: list[Any] = [part.config for part in parts if hasattr(part, "config")]
    return tuple(sorted({str(each._attn_implementation) for each in configs or [module.config]}))


@contextmanager
def _intercepted(name: str, around: Callable[[Attention], Attention]) -> Iterator[None]:
    inner = ALL_ATTENTION_FUNCTIONS.get(name)

    def own(layer: nn.Module, *given: Any, **named: Any) -> tuple[Tensor, Any]:
        # An eager model's function is not in the registry: it stands in the model's own file.
        call = inner or sys.modules[type(layer).__module__].eager_attention_forward
        output, weights = call(layer, *given, **named)
        return output, weights

    outer, opened_by = around(own), threading.get_ident()

    def attention(
        layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, *given: Any, **named: Any
    ) -> tuple[Tensor, Any]:
        # Most models give the mask by position, some (AFMoE) by name.
        mask = given[0] if given else named.pop("attention_mask", None)
        asked = outer if threading.get_ident() == opened_by else own
        return asked(layer, query, key, value, mask, *given[1:], **named)

    ALL_ATTENTION_FUNCTIONS[name] = attention
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]  # the local entry; the library's own shows again
        if inner is not None and ALL_ATTENTION_FUNCTIONS.get(name) is not inner:
            ALL_ATTENTION_FUNCTIONS[name] = inner  # a user's, or that of an interception around
