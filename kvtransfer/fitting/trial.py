"""Mappings tried on held-out windows: what the target's attention returns, and what it predicts."""

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.transfer import mapped
from kvtransfer.fitting.tried import Tried
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.aligned import alignable_start, read_aligned
from kvtransfer.hf.attention import attention_outputs
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import score
from kvtransfer.hf.start import Start, prefill_with_states, start_of
from kvtransfer.measures.agreement import kl

REPEATS = 5
"""Times that a mapping is applied to the first window to be timed; the median counts."""


@dataclass(frozen=True, slots=True, eq=False)
class _Window:
    source: KVCache
    own: KVCache
    starts: Mapping[int, Start]
    hidden: Int[Tensor, "1 p"]
    live: Int[Tensor, "1 s"]


class Trial:
    """Held-out windows as both models read them; every mapping is tried on the same.

    Args:
        source: Makes the caches.
        target: Reads them.
        windows: Token sequences; the first half of each is the prefix (a little less
            where the source has another tokenizer, and cannot read as far).
        starts: Target layers that mappings may start with.
    """

    def __init__(
        self,
        source: LanguageModel,
        target: LanguageModel,
        windows: Iterable[Int[Tensor, " t"]],
        starts: Sequence[int] = (),
    ) -> None:
        self._target = target
        self._windows = []
        for ids in windows:
            half = alignable_start(source, target, ids, at_most=len(ids) // 2)
            hidden, live = ids[None].split([half, len(ids) - half], dim=1)
            own, states = prefill_with_states(target, hidden, starts)
            begun = {start: start_of(own, states, start) for start in starts}
            read = read_aligned(source, target, hidden).to(device=target.device)
            self._windows.append(_Window(read, own, begun, hidden, live))

    def of(self, mapping: KVMapping) -> Tried:
        """Try one mapping."""
        errors, kls, seconds = [], [], []
        for number, window in enumerate(self._windows):
            start = None if mapping.start is None else window.starts[mapping.start]

            def apply(window: _Window = window, start: Start | None = start) -> KVCache:
                return mapped(mapping, window.source, self._target, window.hidden, start=start)

            for _ in range(REPEATS if number == 0 else 1):
                began = time.perf_counter()
                made = apply()
                if number == 0:
                    seconds.append((time.perf_counter() - began) / window.hidden.shape[1])
            logits, found = attention_outputs(
                self._target, window.live, window.own, {"mapped": made}, _relative_error
            )
            errors.append(found["mapped"])
            kls.append(kl(logits[0], score(self._target, window.live, made)[0]).mean())
        return Tried(
            attention_error=float(torch.stack(errors).nanmean()),
            kl=float(torch.stack(kls).mean()),
            microseconds=1e6 * statistics.median(seconds),
        )


def _relative_error(
    other: Float[Tensor, "b s g d"], own: Float[Tensor, "b s g d"]
) -> Float[Tensor, "b s g"]:
    """Per row, in units of the mean row: a head that returns next to nothing (it looks at a first
    token, whose value is small) is next to nothing to the layer, however wrong it is."""
    lost = (other - own).square().sum(-1)
    relative: Tensor = lost / own.square().sum(-1).mean((1, 2), keepdim=True)
    return relative
