"""What the target's attention would return from another prefix, its queries being the same.

Everything here asks the model's own attention function, so that soft-capping, sinks and windows are
as the model has them, and nothing here knows of any.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.intercept import Attention, intercepted
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import score


@dataclass(frozen=True, slots=True, eq=False)
class Attend:
    """One call of a layer's attention, as a function of keys and values. Axis ``g`` is query heads.

    Query head i reads KV head i // (query heads / KV heads).
    """

    query: Float[Tensor, "b g s d"]
    """As attention sees it: rotated, and in the space of cached keys."""
    _call: Callable[[Tensor, Tensor], Tensor]

    def __call__(
        self, keys: Float[Tensor, "b h t d"], values: Float[Tensor, "b h t e"]
    ) -> Float[Tensor, "b s g e"]:
        """What these queries read from other keys and values, under the same mask."""
        return self._call(keys, values)

    def weights(
        self, keys: Float[Tensor, "b h t d"], values: Float[Tensor, "b h t e"]
    ) -> Float[Tensor, "b g s t"]:
        """The share of attention that each query gives to each token.

        With sinks the shares sum to less than one. Attention is linear in the values, so reading
        the identity matrix through it gives its weights, also where (SDPA, flash) its function
        returns none. The identity goes through in columns as wide as ``values``, in whose width
        kernels are chosen.
        """
        tokens, width = values.shape[2:]
        identity = torch.eye(tokens, dtype=values.dtype, device=values.device)
        identity = nn.functional.pad(identity, (0, -tokens % width))
        read = [
            self._call(keys, columns.expand(*values.shape[:2], -1, -1).contiguous())
            for columns in identity.split(width, dim=1)
        ]
        return torch.cat(read, dim=-1)[..., :tokens].float().transpose(1, 2)


Watcher = Callable[[int, Attend, Tensor, Tensor, Tensor], None]
"""Takes layer, attention as a function of (keys, values), keys, values, and its output."""


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """What one layer's queries look for, and at."""

    query: Float[Tensor, "b g s d"]
    weights: Float[Tensor, "b g s t"]
    """The prefix's tokens come first, the live ones after them."""


def looks(model: LanguageModel, ids: Int[Tensor, "b s"], own: KVCache) -> tuple[Look | None, ...]:
    """Score ``ids`` on ``own``, and tell where each layer looked.

    Returns:
        One look a layer, in float32; None for a layer that does not go through transformers'
        attention interface.
    """
    found: list[Look | None] = [None] * len(own)

    def see(layer: int, attend: Attend, keys: Tensor, values: Tensor, output: Tensor) -> None:
        found[layer] = Look(attend.query.float(), attend.weights(keys, values))

    with watching(model.module, see):
        score(model, ids, own)
    return tuple(found)


def attention_heads(
    model: LanguageModel,
    ids: Int[Tensor, "b s"],
    own: KVCache,
    others: Mapping[str, KVCache],
    compare: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Float[Tensor, "b s v"], dict[str, tuple[Float[Tensor, " _g"] | None, ...]]]:
    """As :func:`attention_outputs`, with one number a query head and None for an unseen layer."""
    found: dict[str, list[Tensor | None]] = {name: [None] * len(own) for name in others}

    def see(layer: int, attend: Attend, keys: Tensor, values: Tensor, output: Tensor) -> None:
        for name, other in others.items():
            other_keys, other_values = other[layer]
            length = other_keys.shape[2]
            changed = attend(
                torch.cat((other_keys.to(keys), keys[:, :, length:]), dim=2),
                torch.cat((other_values.to(values), values[:, :, length:]), dim=2),
            )
            found[name][layer] = compare(changed.float(), output.float()).mean((0, 1)).cpu()

    with watching(model.module, see):
        logits = score(model, ids, own)
    return logits, {name: tuple(layers) for name, layers in found.items()}


def attention_outputs(
    model: LanguageModel,
    ids: Int[Tensor, "b s"],
    own: KVCache,
    others: Mapping[str, KVCache],
    compare: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Float[Tensor, "b s v"], dict[str, Float[Tensor, " l"]]]:
    """Score ``ids`` on ``own`` and compare, layer by layer, what attention returns from ``others``.

    At each layer the queries, the live keys and the mask are those of the run on ``own``; only
    the prefix's keys and values are exchanged.

    Returns:
        The logits of the run, and per name one number a layer: the mean of
        ``compare(other, own)`` over tokens and query heads, both of shape (b, s, heads, dim).
        A layer that does not go through transformers' attention interface is NaN.
    """
    logits, found = attention_heads(model, ids, own, others, compare)
    return logits, {
        name: torch.tensor(
            [float("nan") if heads is None else float(heads.mean()) for heads in layers]
        )
        for name, layers in found.items()
    }


@contextmanager
def watching(module: nn.Module, see: Watcher) -> Iterator[None]:
    """Show ``see`` every call of the model's attention function, and put it back afterwards."""

    def around(own: Attention) -> Attention:
        def attention(
            layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **named: Any
        ) -> tuple[Tensor, Any]:
            output, weights = own(layer, query, key, value, mask, **named)
            see(
                int(layer.layer_idx),  # type: ignore[arg-type]
                Attend(query, lambda k, v: own(layer, query, k, v, mask, **named)[0]),
                key,
                value,
                output,
            )
            return output, weights

        return attention

    with intercepted(module, around):
        yield
