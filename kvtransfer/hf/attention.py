"""What the target's attention would return from another prefix, its queries being the same."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import score

Watcher = Callable[[int, Callable[[Tensor, Tensor], Tensor], Tensor, Tensor, Tensor], None]
"""Takes layer, attention as a function of (keys, values), keys, values, and its output."""


def attention_outputs(
    model: LanguageModel,
    ids: Int[Tensor, "b s"],
    own: KVCache,
    others: Mapping[str, KVCache],
    compare: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Float[Tensor, "b s v"], dict[str, Float[Tensor, " l"]]]:
    """Score ``ids`` on ``own`` and compare, layer by layer, what attention returns from ``others``.

    At each layer the queries, the live keys and the mask are those of the run on ``own``; only
    the prefix's keys and values are exchanged. The attention function is the model's own, so
    soft-capping, sinks and windows are as it has them.

    Returns:
        The logits of the run, and per name one number a layer: the mean of
        ``compare(other, own)`` over tokens and query heads, both of shape (b, s, heads, dim).
        A layer that does not go through transformers' attention interface is NaN.
    """
    found = {name: torch.full((len(own),), float("nan")) for name in others}

    def see(
        layer: int,
        attend: Callable[[Tensor, Tensor], Tensor],
        keys: Tensor,
        values: Tensor,
        output: Tensor,
    ) -> None:
        for name, other in others.items():
            other_keys, other_values = other[layer]
            length = other_keys.shape[2]
            changed = attend(
                torch.cat((other_keys.to(keys), keys[:, :, length:]), dim=2),
                torch.cat((other_values.to(values), values[:, :, length:]), dim=2),
            )
            found[name][layer] = compare(changed.float(), output.float()).mean().cpu()

    with watching(model.module, see):
        logits = score(model, ids, own)
    return logits, found


@contextmanager
def watching(module: nn.Module, see: Watcher) -> Iterator[None]:
    """Show ``see`` every call of the model's attention function, and put it back afterwards."""
    name = str(module.config._attn_implementation)  # type: ignore[union-attr]
    inner = ALL_ATTENTION_FUNCTIONS.get(name)

    def attention(
        layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **keywords: Any
    ) -> tuple[Tensor, Any]:
        # An eager model's function is not in the registry: it stands in the model's own file.
        call = inner or sys.modules[type(layer).__module__].eager_attention_forward
        output, weights = call(layer, query, key, value, mask, **keywords)
        see(
            int(layer.layer_idx),  # type: ignore[arg-type]
            lambda k, v: call(layer, query, k, v, mask, **keywords)[0],
            key,
            value,
            output,
        )
        return output, weights

    ALL_ATTENTION_FUNCTIONS[name] = attention
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]  # the local entry; the library's own shows again
        if inner is not None and ALL_ATTENTION_FUNCTIONS.get(name) is not inner:
            ALL_ATTENTION_FUNCTIONS[name] = inner  # a user's, or that of a watcher around this one
