"""Which source layers feed a target layer, and how strongly the fit is damped: by held-out rows."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvtransfer.errors import UnderdeterminedFit
from kvtransfer.fitting.affine import r2
from kvtransfer.fitting.capture import Capture
from kvtransfer.fitting.columns import Columns, Problem, problem
from kvtransfer.fitting.features import GROUPS, KINDS, Features, Kind, widths
from kvtransfer.fitting.solvers import Ridge, Scale, Solver
from kvtransfer.geometry.spec import ModelSpec

KS = (1, 2, 4, 8, 12)
"""Numbers of source layers that ``auto`` tries. The paper sweeps on to all of them, and finds (as
others do) the best held-out score at 8 to 12."""

STRENGTHS = (1e-9, 1e-7, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
"""Relative ridge strengths that ``auto`` tries."""

NOISE = 1e-3
"""A held-out R² of keys and values, summed, that is higher by less than this says nothing."""

Selection = Literal["top", "greedy"]
"""``top``: the layers that explain most alone (the paper's); ``greedy``: those that add most."""

SHORTLIST = 12
"""Source layers that forward selection tries."""

GREEDY_STRENGTH = 1e-5
"""A middling ridge strength, at which layers are compared."""

PROBE_STRENGTH = 1e-6
"""Keeps the single-layer probes solvable where a head has dims that never vary."""


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
    before: tuple[int, ...] = ()
    """Source layers read at the token before, too."""


def rank_layers(
    capture: Capture, source: ModelSpec, target: ModelSpec
) -> Float[Tensor, "target source"]:
    """How much of each target layer each source layer explains alone, on held-out rows.

    The paper's probe: least squares from head h to head h, averaged over heads, then over content
    keys and values. Where the head counts differ there is no such pairing, and each target head is
    explained from all heads of the source layer.
    """
    scores = torch.zeros(len(target.layers), len(source.layers), dtype=torch.float64)
    columns = Columns.of(capture, source, target)
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
    scale: Scale = "relative",
    features: Features | None = None,
    start: int | None = None,
    first: int = 1,
    before: bool = False,
    selection: Selection = "top",
    solve: Callable[[float], Solver] | None = None,
    ranking: Float[Tensor, "target source"] | None = None,
    orders: Sequence[Sequence[int]] | None = None,
) -> Iterator[Choice]:
    """Choose for every target layer the source layers and strengths with the best held-out R².

    Target layers that a start gives exactly are left out.

    Args:
        capture: Moments of both parts.
        source: Spec of the model that makes the cache.
        target: Spec of the model that is to read it.
        layers: How many source layers a target layer reads; all; or as many as serve it best.
        strength: A ridge strength; None to choose a relative one for each layer and kind.
        scale: What a given strength is relative to.
        features: What maps are to read; None for what was captured.
        start: The target layer whose incoming state they read too; None for none.
        first: Rows that the first token of a chunk counts for.
        before: Whether the last of the source layers may give way to the first at the token
            before, of those that were captured; a map reads no more features with them.
        selection: How layers are picked.
        solve: A strength to a solver; None for ridge.
        ranking: What :func:`rank_layers` found, where that is known already.
        orders: Per target layer, source layers in the order to take them, instead of ``selection``.
    """
    columns = Columns.of(capture, source, target, features=features, start=start)
    ks = _candidates(capture, columns, layers)
    if ranking is None and orders is None:
        ranking = rank_layers(capture, source, target)
    strengths = STRENGTHS if strength is None else (strength,)
    make = solve or (lambda strength: Ridge(strength, scale))
    for t in range(0 if start is None else start + 1, len(target.layers)):
        if orders is not None:
            order = list(orders[t])
        else:
            assert ranking is not None
            order = ranking[t].argsort(descending=True).tolist()
            if selection == "greedy" and max(ks) < len(order):
                order = greedy(capture, columns, t, order, max(ks))
        # Strength at a middling k, then k at that strength: the full grid would find the same
        # within a thousandth, at several times the solves.
        k = ks[len(ks) // 2]
        best = {
            kind: best_strength(
                problem(capture, columns, kind, order[:k], t, first=first), strengths, make
            )
            for kind in KINDS
        }
        if len(ks) > 1:
            damping = {kind: found for kind, (_, found) in best.items()}
            k, scores = best_k(capture, columns, order, t, ks, damping, make, first)
            best = {kind: (scores[kind], damping[kind]) for kind in KINDS}
        late: Sequence[int] = ()
        if before:
            near = order if ranking is None else ranking[t].argsort(descending=True).tolist()
            offered = [s for s in near if s in columns.offered]
            damping = {kind: found for kind, (_, found) in best.items()}
            late, scores = best_before(
                capture, columns, order[:k], offered, t, damping, make, first
            )
            best = {kind: (scores[kind], damping[kind]) for kind in KINDS}
        yield Choice(
            target=t,
            sources=tuple(sorted(order[: k - len(late)])),
            before=tuple(sorted(late)),
            strength_keys=best["keys"][1],
            strength_values=best["values"][1],
            r2_keys=best["keys"][0],
            r2_values=best["values"][0],
        )


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


def best_strength(
    problem: Problem,
    strengths: Sequence[float],
    make: Callable[[float], Solver] = Ridge,
) -> tuple[float, float]:
    """The best held-out R² and its strength, climbing from the middle of an ascending grid."""
    scores: dict[int, float] = {}

    def score(index: int) -> float:
        if index not in scores:
            scores[index] = _score(problem, make(strengths[index]))
        return scores[index]

    at = len(strengths) // 2
    while True:
        near = [i for i in (at - 1, at, at + 1) if 0 <= i < len(strengths)]
        best = max(near, key=score)
        if score(best) <= score(at):
            return score(at), strengths[at]
        at = best


def _score(problem: Problem, solver: Solver) -> float:
    """Held-out R²; −∞ where a strength is too weak for features that depend on each other."""
    try:
        fitted = solver.solve(problem.fit, problem.heads)
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
    make: Callable[[float], Solver] = Ridge,
    first: int = 1,
) -> tuple[int, dict[Kind, float]]:
    """The number of leading source layers whose maps explain most, held out, and how much."""
    scores: dict[int, dict[Kind, float]] = {
        k: {
            kind: _score(
                problem(capture, columns, kind, order[:k], layer, first=first),
                make(strengths[kind]),
            )
            for kind in KINDS
        }
        for k in ks
    }
    best = max(ks, key=lambda k: sum(scores[k].values()))
    return best, scores[best]


def best_before(
    capture: Capture,
    columns: Columns,
    order: Sequence[int],
    offered: Sequence[int],
    layer: int,
    strengths: Mapping[Kind, float],
    make: Callable[[float], Solver] = Ridge,
    first: int = 1,
) -> tuple[Sequence[int], dict[Kind, float]]:
    """The source layers to read at the token before, in place of as many of the last of ``order``.

    One is tried, two, four and so on up to half of them, and the fewest are taken that explain
    most of held-out rows: of most layers none.
    """
    tried: dict[int, dict[Kind, float]] = {}
    count = 0
    while count <= min(len(order) // 2, len(offered)):
        read, late = order[: len(order) - count], offered[:count]
        tried[count] = {
            kind: _score(
                problem(capture, columns, kind, read, layer, before=late, first=first),
                make(strengths[kind]),
            )
            for kind in KINDS
        }
        count = max(1, 2 * count)
    scores = {count: sum(each.values()) for count, each in tried.items()}
    best = min(count for count, score in scores.items() if score >= max(scores.values()) - NOISE)
    return offered[:best], tried[best]


def _candidates(
    capture: Capture, columns: Columns, layers: int | Literal["auto", "all"]
) -> list[int]:
    """The ks to try; for ``auto``, only those with more rows than features."""
    depth = len(columns.source.layers)
    if layers != "auto":
        return [depth if layers == "all" else layers]
    extra = 0 if columns.start is None else columns.state_width
    usable = [
        k
        for k in KS
        if k <= depth
        and needed_rows(columns.source, k, columns.features, state=extra) <= capture.fit.rows
    ]
    return usable or [1]


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
