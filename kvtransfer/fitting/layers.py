"""Which source layers feed a target layer, and how strongly the fit is damped: by held-out rows."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvtransfer.errors import UnderdeterminedFit
from kvtransfer.fitting.affine import Affine, r2
from kvtransfer.fitting.capture import Capture
from kvtransfer.fitting.features import GROUPS, KINDS, Features, Kind, read_by, size, widths
from kvtransfer.fitting.moments import Moments
from kvtransfer.fitting.solvers import Ridge
from kvtransfer.geometry.spec import ModelSpec

KS = (1, 2, 4, 8, 12)
"""Numbers of source layers that ``auto`` tries. The paper sweeps on to all of them, and finds (as
others do) the best held-out score at 8 to 12."""

STRENGTHS = (1e-9, 1e-7, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
"""Relative ridge strengths that ``auto`` tries."""

PROBE_STRENGTH = 1e-6
"""Keeps the single-layer probes solvable where a head has dims that never vary."""


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Where each layer's features stand in the moments of a pair."""

    source: ModelSpec
    target: ModelSpec
    features: Features = "same"

    def reads(self, kind: Kind, sources: Sequence[int]) -> Int[Tensor, " p"]:
        """Source features of some layers, in the order given, from which ``kind`` is read."""
        return torch.cat(
            [self.reads_of(each, s) for s in sources for each in read_by(self.features, kind)]
        )

    def reads_of(self, kind: Kind, layer: int) -> Int[Tensor, " p"]:
        """Features of this kind of one source layer."""
        starts = list(accumulate(widths(self.source, kind), initial=0))
        after = size(self.source, "keys") if (self.features, kind) == ("both", "values") else 0
        return torch.arange(starts[layer], starts[layer + 1]) + after

    def writes(self, kind: Kind, layer: int, *, shuffled: bool = False) -> Int[Tensor, " q"]:
        """Target features of one layer, or their permuted twins."""
        starts = list(accumulate(widths(self.target, kind), initial=0))
        columns = torch.arange(starts[layer], starts[layer + 1])
        return columns + starts[-1] if shuffled else columns


@dataclass(frozen=True, slots=True)
class Choice:
    """The source layers of one target layer, ascending, and its ridge strengths."""

    target: int
    sources: tuple[int, ...]
    strength_keys: float
    strength_values: float
    r2_keys: float
    """Held-out, mean over heads."""
    r2_values: float


def rank_layers(
    capture: Capture, source: ModelSpec, target: ModelSpec, features: Features = "same"
) -> Float[Tensor, "target source"]:
    """How much of each target layer each source layer explains alone, on held-out rows.

    The paper's probe: least squares from head h to head h, averaged over heads, then over content
    keys and values. Where the head counts differ there is no such pairing, and each target head is
    explained from all heads of the source layer.
    """
    scores = torch.zeros(len(target.layers), len(source.layers), dtype=torch.float64)
    columns = Columns(source, target, features)
    probe = Ridge(PROBE_STRENGTH)
    for kind in KINDS:
        fit, heldout = getattr(capture.fit, kind), getattr(capture.heldout, kind)
        for s, layer in enumerate(source.layers):
            read = columns.reads_of(kind, s)
            for target_heads, targets in _by_heads(target):
                paired = target_heads == layer.kv_heads
                groups = read.view(layer.kv_heads, -1) if paired else [read]
                for h, x in enumerate(groups):
                    writes = [columns.writes(kind, t).view(target_heads, -1) for t in targets]
                    chosen = [w[h] if paired else w.flatten() for w in writes]
                    y = torch.cat(chosen)
                    fitted = probe.solve(fit.select(x, y))
                    heads = len(targets) * (1 if paired else target_heads)
                    found = r2(fitted, heldout.select(x, y), heads=heads)
                    mean = found.view(len(targets), -1).mean(1)
                    scores[targets, s] += mean / len(groups) / len(KINDS)
    return scores


def choose(
    capture: Capture,
    source: ModelSpec,
    target: ModelSpec,
    *,
    layers: int | Literal["auto", "all"] = "auto",
    strength: float | None = None,
    features: Features = "same",
) -> Iterator[Choice]:
    """Choose for every target layer the source layers and strengths with the best held-out R².

    Args:
        capture: Moments of both parts.
        source: Spec of the model that makes the cache.
        target: Spec of the model that is to read it.
        layers: This many of the best single layers; all; or as many as serve each layer best.
        strength: A relative ridge strength; None to choose it for each layer and kind.
        features: What the capture gathered.
    """
    ks = _candidates(capture, source, layers, features)
    ranking = rank_layers(capture, source, target, features)
    columns = Columns(source, target, features)
    strengths = STRENGTHS if strength is None else (strength,)
    for t in range(len(target.layers)):
        order = ranking[t].argsort(descending=True).tolist()
        # Strength at a middling k, then k at that strength: the full grid would find the same
        # within a thousandth, at several times the solves.
        k = ks[len(ks) // 2]
        best = {
            kind: best_strength(problem(capture, columns, kind, order[:k], t), strengths)
            for kind in KINDS
        }
        if len(ks) > 1:
            damping = {kind: found for kind, (_, found) in best.items()}
            k, scores = best_k(capture, columns, order, t, ks, damping)
            best = {kind: (scores[kind], damping[kind]) for kind in KINDS}
        yield Choice(
            target=t,
            sources=tuple(sorted(order[:k])),
            strength_keys=best["keys"][1],
            strength_values=best["values"][1],
            r2_keys=best["keys"][0],
            r2_values=best["values"][0],
        )


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """What one map is fitted to, and what it is judged by."""

    fit: Moments
    heldout: Moments
    shuffled: Moments
    """The fit's, with permuted target rows."""
    heads: int

    def score(self, fitted: Affine) -> float:
        """Held-out R², mean over heads."""
        return float(r2(fitted, self.heldout, heads=self.heads).mean())


def problem(
    capture: Capture, columns: Columns, kind: Kind, sources: Sequence[int], layer: int
) -> Problem:
    """The map of one target layer and kind, read from some source layers in ascending order."""
    x, y = columns.reads(kind, sorted(sources)), columns.writes(kind, layer)
    fit: Moments = getattr(capture.fit, kind)
    heldout: Moments = getattr(capture.heldout, kind)
    chosen = fit.select(x, y)
    return Problem(
        fit=chosen,
        heldout=heldout.select(x, y),
        shuffled=chosen.with_targets_of(fit, x, columns.writes(kind, layer, shuffled=True)),
        heads=columns.target.layers[layer].kv_heads,
    )


def best_strength(problem: Problem, strengths: Sequence[float]) -> tuple[float, float]:
    """The best held-out R² and its strength, climbing from the middle of an ascending grid."""
    scores: dict[int, float] = {}

    def score(index: int) -> float:
        if index not in scores:
            scores[index] = _score(problem, strengths[index])
        return scores[index]

    at = len(strengths) // 2
    while True:
        near = [i for i in (at - 1, at, at + 1) if 0 <= i < len(strengths)]
        best = max(near, key=score)
        if score(best) <= score(at):
            return score(at), strengths[at]
        at = best


def _score(problem: Problem, strength: float) -> float:
    """Held-out R²; −∞ where this strength is too weak for features that depend on each other."""
    try:
        fitted = Ridge(strength).solve(problem.fit)
    except UnderdeterminedFit:
        if problem.fit.n <= len(problem.fit.xx):
            raise
        return float("-inf")
    return problem.score(fitted)


def best_k(
    capture: Capture,
    columns: Columns,
    order: Sequence[int],
    layer: int,
    ks: Sequence[int],
    strengths: Mapping[Kind, float],
) -> tuple[int, dict[Kind, float]]:
    """The number of leading source layers whose maps explain most, held out, and how much."""
    scores: dict[int, dict[Kind, float]] = {
        k: {
            kind: _score(problem(capture, columns, kind, order[:k], layer), strengths[kind])
            for kind in KINDS
        }
        for k in ks
    }
    best = max(ks, key=lambda k: sum(scores[k].values()))
    return best, scores[best]


def _candidates(
    capture: Capture, source: ModelSpec, layers: int | Literal["auto", "all"], features: Features
) -> list[int]:
    """The ks to try; for ``auto``, only those with more rows than features."""
    if layers != "auto":
        return [len(source.layers) if layers == "all" else layers]
    rows = capture.fit.rows
    usable = [k for k in KS if k <= len(source.layers) and needed_rows(source, k, features) <= rows]
    return usable or [1]


def needed_rows(
    source: ModelSpec, layers: int | Literal["auto", "all"], features: Features = "same"
) -> int:
    """Rows without which no map from this many source layers can be determined."""
    if layers == "auto":
        layers = 1
    elif layers == "all":
        layers = len(source.layers)
    read = [
        [sum(each) for each in zip(*(widths(source, kind) for kind in group), strict=True)]
        for group in GROUPS[features]
    ]
    return 1 + max(int(sum(sorted(each)[-layers:])) for each in read)


def _by_heads(spec: ModelSpec) -> Iterator[tuple[int, list[int]]]:
    """Layers grouped by their number of KV heads and width, so that one solve serves them all."""
    groups: dict[tuple[int, int, int], list[int]] = {}
    for index, layer in enumerate(spec.layers):
        groups.setdefault((layer.kv_heads, layer.key_dim, layer.value_dim), []).append(index)
    for (heads, _, _), indices in groups.items():
        yield heads, indices
