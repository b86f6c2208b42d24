"""Tokens as both models have them, one row each: what is trained on where moments do not do.

Rows are kept in memory, in half precision, so there is a limit to them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvtransfer.errors import KVTransferError
from kvtransfer.fitting.capture import Capture
from kvtransfer.fitting.chunks import batches
from kvtransfer.fitting.features import (
    GROUPS,
    KINDS,
    Features,
    Kind,
    before_size,
    gathered,
    rows_of,
    size,
    state_rows,
    widths,
)
from kvtransfer.fitting.moments import Moments
from kvtransfer.fitting.pairs import PairMoments
from kvtransfer.geometry.spec import ModelSpec
from kvtransfer.hf.aligned import read_aligned
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.start import prefill_with_states

LIMIT = 8 * 10**9
"""Bytes of rows that are kept in memory at most."""

HOLDOUT = 8
"""As for the capture: one chunk in this many is held out."""


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Where features lie, and how far they spread: what they are normed by."""

    mean: Float[Tensor, " p"]
    spread: Float[Tensor, " p"]

    @classmethod
    def of_source(cls, moments: Moments | PairMoments) -> "Units":
        """Each source feature by its own spread."""
        spread = (moments.diagonal / moments.n).sqrt()
        return cls(moments.mean_x.float(), _floored(spread).float())

    @classmethod
    def of_target(cls, moments: Moments | PairMoments, *, heads: int) -> "Units":
        """Each head of one layer by its root mean variance, so that squared errors add up to R²."""
        by_head = (moments.yy / moments.n).view(heads, -1)
        spread = by_head.mean(1, keepdim=True).sqrt().expand_as(by_head).flatten()
        return cls(moments.mean_y.float(), _floored(spread).float())

    def select(self, columns: Int[Tensor, " p_"]) -> "Units":
        """Those of some features only."""
        return Units(self.mean[columns], self.spread[columns])

    def norm(self, rows: Float[Tensor, "n p"]) -> Float[Tensor, "n p"]:
        """Rows in these units."""
        return (rows - self.mean) / self.spread


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The same tokens in both models, normed."""

    x: Float[Tensor, "n p"]
    y: Float[Tensor, "n q"]

    def select(self, x: Int[Tensor, " p_"], y: Int[Tensor, " q_"], device: torch.device) -> "Rows":
        """Some features only, on the device that trains."""
        return Rows(self.x[:, x].to(device), self.y[:, y].to(device).float())


def units_of(captured: Capture, target: ModelSpec) -> dict[Kind, tuple[Units, Units]]:
    """By kind, the units of all columns of the moments: of the source's and of the target's."""
    found: dict[Kind, tuple[Units, Units]] = {}
    for kind in KINDS:
        moments: Moments | PairMoments = getattr(captured.fit, kind)
        ends = list(accumulate(widths(target, kind), initial=0))
        layers = [
            Units.of_target(moments.targets(torch.arange(*ends[i : i + 2])), heads=layer.kv_heads)
            for i, layer in enumerate(target.layers)
        ]
        out = Units(
            torch.cat([each.mean for each in layers]), torch.cat([each.spread for each in layers])
        )
        found[kind] = (Units.of_source(moments), out)
    return found


def require_room(
    source: ModelSpec,
    target: ModelSpec,
    features: Features,
    *,
    tokens: int,
    before: Sequence[int] = (),
    state: int = 0,
) -> None:
    """Raise KVTransferError if the rows of so many tokens would take more than LIMIT bytes.

    Args:
        source: Makes the cache.
        target: Is to read it.
        features: What the target's keys and values are read from.
        tokens: Rows to fit on; the held-out ones come on top.
        before: Source layers whose features of the token before are read too.
        state: Numbers in a row of the target's state, where it is read too.
    """
    numbers = len(GROUPS[features]) * state
    numbers += sum(size(spec, kind) for spec in (source, target) for kind in KINDS)
    numbers += sum(before_size(source, kind, before) for kind in KINDS)
    a_token = numbers * torch.float16.itemsize * HOLDOUT / (HOLDOUT - 1)
    if tokens * a_token > LIMIT:
        raise KVTransferError(
            f"a network is trained on rows, and those of {tokens:,} tokens take "
            f"{tokens * a_token / 1e9:.1f} GB of memory; at most {LIMIT / 1e9:.1f} GB are used",
            hint=f"fit on {int(LIMIT / a_token):,} tokens or fewer (--tokens), or in closed form "
            "(--solver ridge)",
        )


def gather(
    captured: Capture,
    units: Mapping[Kind, tuple[Units, Units]],
    source: LanguageModel,
    target: LanguageModel,
    chunks: Iterable[Int[Tensor, " t"]],
    *,
    tokens: int,
    batch: int,
    progress: Callable[[int], None] = lambda tokens: None,
) -> dict[Kind, tuple[Rows, Rows]]:
    """Read what was captured once more, and keep its rows: those of the fit, and the held-out.

    Columns stand as in the moments of ``captured``. Rows are normed before they are halved, so
    that half precision loses as little of a large mean as of a small spread. Whether there is room
    for them, :func:`require_room` says.

    Raises:
        ValueError: the chunks are not those that were captured.
    """
    counts = {"fit": captured.fit.rows, "heldout": captured.heldout.rows}
    kept: dict[str, dict[Kind, Rows]] = {part: {} for part in counts}
    for part, count in counts.items():
        for group in GROUPS[captured.features]:
            x = torch.empty(count, len(units[group[0]][0].mean), dtype=torch.float16)
            for kind in group:  # which share what they are read from
                y = torch.empty(count, len(units[kind][1].mean), dtype=torch.float16)
                kept[part][kind] = Rows(x, y)
    at = dict.fromkeys(counts, 0)
    for part, ids in batches(chunks, tokens=tokens, batch=batch, holdout=HOLDOUT):
        read = read_aligned(source, target, ids)
        wanted, states = prefill_with_states(target, ids, captured.starts)
        given = [state_rows(states[start]).flatten(0, 1).cpu() for start in captured.starts]
        read, wanted = (
            cache.to(dtype=torch.float32, device="cpu").as_content() for cache in (read, wanted)
        )
        these = slice(at[part], at[part] + ids.numel())
        for group in GROUPS[captured.features]:
            x = gathered(read, group, captured.before, given)
            kept[part][group[0]].x[these] = units[group[0]][0].norm(x).half()
            for kind in group:
                kept[part][kind].y[these] = units[kind][1].norm(rows_of(wanted, kind)).half()
        at[part] = these.stop
        progress(ids.numel())
    if at != counts:
        raise ValueError(f"rows {at} of chunks that are not those captured, which made {counts}")
    return {kind: (kept["fit"][kind], kept["heldout"][kind]) for kind in KINDS}


def _floored(spread: Float[Tensor, " p"]) -> Float[Tensor, " p"]:
    """No feature is blown up much more than the others, least of all one that never varies."""
    return spread.clamp_min(max(1e-3 * float(spread.median()), 1e-12))
