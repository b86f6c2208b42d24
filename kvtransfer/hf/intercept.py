"""Stand between a model's layers and transformers' attention functions."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Attention = Callable[..., tuple[Tensor, Any]]
"""Takes layer, query, key, value, mask and keywords; gives output and weights."""


@contextmanager
def intercepted(module: nn.Module, around: Callable[[Attention], Attention]) -> Iterator[None]:
    """Have the attention of ``module`` computed by ``around(its own function)``, then no more.

    Nested uses see each other's: the one that was opened last is asked first. Layers of other
    models with the same implementation come by as well.
    """
    name = str(module.config._attn_implementation)  # type: ignore[union-attr]
    inner = ALL_ATTENTION_FUNCTIONS.get(name)

    def own(layer: nn.Module, *given: Any, **named: Any) -> tuple[Tensor, Any]:
        # An eager model's function is not in the registry: it stands in the model's own file.
        call = inner or sys.modules[type(layer).__module__].eager_attention_forward
        output, weights = call(layer, *given, **named)
        return output, weights

    ALL_ATTENTION_FUNCTIONS[name] = around(own)
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]  # the local entry; the library's own shows again
        if inner is not None and ALL_ATTENTION_FUNCTIONS.get(name) is not inner:
            ALL_ATTENTION_FUNCTIONS[name] = inner  # a user's, or that of an interception around
