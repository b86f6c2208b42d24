"""How much source layers explain of a target layer: alone, and beside others."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvtransfer.fitting.affine import r2
from kvtransfer.fitting.band import Band
from kvtransfer.fitting.capture import Capture
from kvtransfer.fitting.columns import Columns
from kvtransfer.fitting.features import GROUPS, KINDS, Features, widths
from kvtransfer.fitting.moments import Moments
from kvtransfer.fitting.solvers import Ridge
from kvtransfer.geometry.spec import ModelSpec

Selection = Literal["top", "greedy"]
"""``top``: the layers that explain most alone (the paper's); ``greedy``: those that add most."""

SHORTLIST = 12
"""Source layers that forward selection tries."""

GREEDY_STRENGTH = 1e-5
"""A middling ridge strength, at which layers are compared."""

PROBE_STRENGTH = 1e-6
"""Keeps the single-layer probes solvable where a head has dims that never vary."""


def rank_layers(
    capture: Capture, source: ModelSpec, target: ModelSpec
) -> Float[Tensor, "target source"]:
    """How much of each target layer each source layer explains alone, on held-out rows.

    The paper's probe: least squares from head h to head h, averaged over heads, then over content
    keys and values. Where the head counts differ there is no such pairing, and each target head is
    explained from all heads of the source layer.

    A source layer outside the band of a target layer was not gathered for it, and has −∞.
    """
    columns = Columns.of(capture, source, target)
    return rank(capture.fit, capture.heldout, columns, band=capture.limits(source, target))


@runtime_checkable
class Selects(Protocol):
    """What has the moments of any features of one kind."""

    def select(self, x: Int[Tensor, " p_"], y: Int[Tensor, " q_"]) -> Moments:
        """Of these source and target features."""


@runtime_checkable
class Gathered(Protocol):
    """What was read of both kinds."""

    @property
    def keys(self) -> Selects:
        """Of content keys."""

    @property
    def values(self) -> Selects:
        """Of values."""


def rank(
    fit: Gathered, heldout: Gathered, columns: Columns, *, band: Band | None = None
) -> Float[Tensor, "target source"]:
    """The same of whatever gives moments: sums of a capture, or rows that were kept."""
    source, target = columns.source, columns.target
    scores = torch.zeros(len(target.layers), len(source.layers), dtype=torch.float64)
    band = band or Band(None, len(source.layers), len(target.layers))
    probe = Ridge(PROBE_STRENGTH)
    for kind in KINDS:
        of_fit, of_heldout = getattr(fit, kind), getattr(heldout, kind)
        for s, layer in enumerate(source.layers):
            read = columns.reads_of(kind, s)
            for target_heads, alike in _by_heads(target):
                targets = [t for t in alike if s in band.candidates(t)]
                if not targets:
                    continue
                paired = target_heads == layer.kv_heads
                groups = read.view(layer.kv_heads, -1) if paired else [read]
                for h, x in enumerate(groups):
                    writes = [columns.writes(kind, t).view(target_heads, -1) for t in targets]
                    chosen = [w[h] if paired else w.flatten() for w in writes]
                    y = torch.cat(chosen)
                    fitted = probe.solve(of_fit.select(x, y))
                    heads = len(targets) * (1 if paired else target_heads)
                    found = r2(fitted, of_heldout.select(x, y), heads=heads)
                    mean = found.view(len(targets), -1).mean(1)
                    scores[targets, s] += mean / len(groups) / len(KINDS)
    for t, row in enumerate(scores):
        row[[s for s in range(len(row)) if s not in band.candidates(t)]] = float("-inf")
    return scores


def by_score(ranking: Float[Tensor, "target source"], layer: int) -> list[int]:
    """The source layers that a target layer may be read from, those that explain most first."""
    row = ranking[layer]
    order: list[int] = row.argsort(descending=True).tolist()
    return [s for s in order if row[s] > float("-inf")]


def greedy(
    capture: Capture, columns: Columns, layer: int, order: Sequence[int], k: int
) -> list[int]:
    """Forward selection: each time the source layer that adds most to the held-out R².

    What a layer explains alone says little of what it adds to others, of which it may be a near
    copy. Of ``order``, best alone first, the first SHORTLIST layers are tried, each kind read from
    its own, which costs an eighth of reading both and chooses as well.
    """
    columns = replace(columns, features="same", start=None)
    left, chosen = list(order[: max(SHORTLIST, k)]), [order[0]]
    left.remove(order[0])
    while len(chosen) < k:
        best = max(left, key=lambda each: _explained(capture, columns, layer, [*chosen, each]))
        chosen.append(best)
        left.remove(best)
    return chosen


def _explained(capture: Capture, columns: Columns, layer: int, sources: Sequence[int]) -> float:
    """Held-out R² of keys and values, summed."""
    heads, total = columns.target.layers[layer].kv_heads, 0.0
    for kind in KINDS:
        x, y = columns.reads(kind, sources), columns.writes(kind, layer)
        fit, heldout = getattr(capture.fit, kind), getattr(capture.heldout, kind)
        fitted = Ridge(GREEDY_STRENGTH).solve(fit.select(x, y))
        total += float(r2(fitted, heldout.select(x, y), heads=heads).mean())
    return total


def needed_rows(
    source: ModelSpec,
    layers: int | Literal["auto", "all"],
    features: Features = "same",
    *,
    state: int = 0,
) -> int:
    """Rows without which no map from this many source layers, and a state, can be determined."""
    if layers == "auto":
        layers = 1
    elif layers == "all":
        layers = len(source.layers)
    read = [
        [sum(each) for each in zip(*(widths(source, kind) for kind in group), strict=True)]
        for group in GROUPS[features]
    ]
    return 1 + state + max(int(sum(sorted(each)[-layers:])) for each in read)


def _by_heads(spec: ModelSpec) -> Iterator[tuple[int, list[int]]]:
    """Layers grouped by their number of KV heads and width, so that one solve serves them all."""
    groups: dict[tuple[int, int, int], list[int]] = {}
    for index, layer in enumerate(spec.layers):
        groups.setdefault((layer.kv_heads, layer.key_dim, layer.value_dim), []).append(index)
    for (heads, _, _), indices in groups.items():
        yield heads, indices
