"""Where the target looks while it reads: what its queries can see of a key, and whom they attend.

A query meets a content key through the rotation between them, which differs from pair to pair. Its
second moment in content space is averaged over the pairs there are: each query is turned back by
the rotation of one token before it, drawn anew (an unbiased sample of its relative rotations).
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from types import TracebackType

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from kvtransfer.errors import UnsupportedModel
from kvtransfer.geometry.rotation import Rotation
from kvtransfer.hf.attention import Attend, watching
from kvtransfer.hf.model import LanguageModel

SHARE_BATCHES = 16
"""Batches whose queries are gathered: their moment is of a head's width, and soon settled."""


class Looked:
    """Watches the target's prefills: mutable, and thrown away after the capture.

    Use as a context around one prefill; then :attr:`weight` is of that prefill.
    """

    def __init__(self, target: LanguageModel, *, seed: int = 0) -> None:
        self._target = target
        self._random = torch.Generator().manual_seed(seed)
        self._moments: list[Tensor | None] = [None] * len(target.spec.layers)
        self._batches = 0
        self._paid: list[Tensor] = []
        self._watch: AbstractContextManager[None] | None = None
        self._rotations: tuple[Rotation | None, ...] = ()

    def __enter__(self) -> None:
        self._paid = []
        self._rotations = ()
        self._batches += 1
        self._watch = watching(self._target.module, self._see)
        self._watch.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._watch is not None
        self._watch.__exit__(kind, error, trace)

    @property
    def weight(self) -> Float[Tensor, " n"]:
        """How much each token of the last prefill matters: the square root of the attention paid
        it by those that can see it, mean over layers and heads, with a mean of one.

        The root, because a row that is attended ten times as much is not ten times as rare: weights
        that spread further cost more rows than they are worth.

        Raises:
            UnsupportedModel: no layer goes through transformers' attention interface.
        """
        if not self._paid:
            raise UnsupportedModel(
                f"{self._target.spec.name} computes attention by itself, so where it looks is not "
                "seen",
                hint="fit with another solver than attention (--solver ridge)",
            )
        paid = torch.stack(self._paid).mean(0).clamp_min(1e-12).sqrt()
        weight: Tensor = (paid / paid.mean()).flatten().cpu()
        return weight

    def sees(self) -> tuple[Float[Tensor, "_h _d _d"] | None, ...]:
        """Per layer and KV head, E[u uᵀ] of queries u turned back to meet content keys.

        None for a layer that does not go through transformers' attention interface.
        """
        return tuple(
            None if found is None else (found / found.diagonal(dim1=-2, dim2=-1).mean()).cpu()
            for found in self._moments
        )

    def state(self) -> dict[str, Tensor]:
        """What watching goes on from, by name."""
        held = {f"moment.{layer}": m for layer, m in enumerate(self._moments) if m is not None}
        return held | {
            "batches": torch.tensor(self._batches),
            "random": self._random.get_state(),
        }

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state of the same target's."""
        for layer in range(len(self._moments)):
            found = state.get(f"moment.{layer}")
            self._moments[layer] = None if found is None else found.to(self._target.device)
        self._batches = int(state["batches"])
        self._random.set_state(state["random"].clone())

    def _see(
        self, layer: int, attend: Attend, keys: Tensor, values: Tensor, output: Tensor
    ) -> None:
        if layer >= len(self._moments):
            return  # a layer that reads an earlier one's cache
        weights = attend.weights(keys, values)
        tokens = weights.shape[-1]
        seen_by = torch.arange(tokens, 0, -1, device=weights.device)
        self._paid.append(weights.mean(1).sum(1) / seen_by)
        if self._batches > SHARE_BATCHES:
            return
        query = self._turned_back(layer, attend.query.float())
        grouped = rearrange(query, "b (h g) s d -> h (b g s) d", h=keys.shape[1]).double()
        moment = grouped.mT @ grouped
        before = self._moments[layer]
        self._moments[layer] = moment if before is None else before + moment

    def _turned_back(self, layer: int, query: Float[Tensor, "b g s d"]) -> Tensor:
        """Each query as it meets the content key of one token before it."""
        batch, _, tokens, _ = query.shape
        draw = torch.rand(batch, tokens, generator=self._random)
        at = (draw * torch.arange(1, tokens + 1)).long().to(query.device)
        if not self._rotations:
            self._rotations = self._target.rotary(at)
        rotation = self._rotations[layer]
        # A score is qᵀ(R k): what meets k is the transpose of R, which stretches where R does.
        return query if rotation is None else replace(rotation, sin=-rotation.sin).apply(query)
