"""Which source layers feed each target layer, and how strongly its fit is damped: by held-out rows.

Held-out R² decides, which moments give for next to nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from kvtransfer.errors import UnderdeterminedFit
from kvtransfer.fitting.capture import Capture
from kvtransfer.fitting.columns import Columns
from kvtransfer.fitting.features import KINDS, Kind
from kvtransfer.fitting.layers import by_score, greedy, needed_rows, rank_layers
from kvtransfer.fitting.problem import Known, Problem, problem
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.solvers import Ridge, Solver
from kvtransfer.geometry.spec import ModelSpec

KS = (1, 2, 4, 8, 12)
"""Numbers of source layers that ``auto`` tries. The paper sweeps on to all of them, and finds (as
others do) the best held-out score at 8 to 12."""

STRENGTHS = (1e-9, 1e-7, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
"""Relative ridge strengths that are tried where none is given."""

NOISE = 1e-3
"""A held-out R² of keys and values, summed, that is higher by less than this says nothing."""


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


def choose(
    capture: Capture,
    source: ModelSpec,
    target: ModelSpec,
    settings: FitSettings,
    *,
    ranking: Float[Tensor, "target source"] | None = None,
    orders: Sequence[Sequence[int]] | None = None,
    known: Known | None = None,
) -> Iterator[Choice]:
    """Choose for every target layer the source layers and strengths with the best held-out R².

    Target layers that a start gives exactly are left out. Where the settings name ``before``, the
    last of the source layers may give way to the first at the token before, of those that were
    captured; a map reads no more features with them.

    Args:
        capture: Moments of both parts.
        source: Spec of the model that makes the cache.
        target: Spec of the model that is to read it.
        settings: What maps read, how they are solved, and what is to be chosen.
        ranking: What :func:`~kvtransfer.fitting.layers.rank_layers` found, where that is known.
        orders: Per target layer, source layers in the order to take them, instead of the
            settings' selection.
        known: Where to keep the maps that are solved to choose one, until the next layer's turn.
    """
    columns = Columns.of(capture, source, target, features=settings.features, start=settings.start)
    wanted = _candidates(capture, columns, settings.layers)
    if ranking is None and orders is None:
        ranking = rank_layers(capture, source, target)
    strengths = STRENGTHS if settings.strength is None else (settings.strength,)
    begun = 0 if settings.start is None else settings.start + 1
    for t in range(begun, len(target.layers)):
        near = None if ranking is None else by_score(ranking, t)
        order = near if orders is None else list(orders[t])
        assert order is not None
        # Near either end a band holds fewer layers than elsewhere.
        ks = [k for k in wanted if k <= len(order)] or [len(order)]
        if orders is None and settings.selection == "greedy" and max(ks) < len(order):
            order = greedy(capture, columns, t, order, max(ks))
        held = _HeldOut(capture, columns, t, settings, known)
        # Strength at a middling k, then k at that strength: the full grid would find the same
        # within a thousandth, at several times the solves.
        k = ks[len(ks) // 2]
        best = {
            kind: best_strength(held.posed(kind, order[:k]), strengths, settings.solver_of)
            for kind in KINDS
        }
        scores = {kind: score for kind, (score, _) in best.items()}
        damping = {kind: strength for kind, (_, strength) in best.items()}
        if len(ks) > 1:
            k, scores = held.best_k(order, ks, damping)
        late: Sequence[int] = ()
        if settings.before:
            offered = [s for s in near or order if s in columns.offered]
            late, scores = held.best_before(order[:k], offered, damping)
        yield Choice(
            target=t,
            sources=tuple(sorted(order[: k - len(late)])),
            before=tuple(sorted(late)),
            strength_keys=damping["keys"],
            strength_values=damping["values"],
            r2_keys=scores["keys"],
            r2_values=scores["values"],
        )


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


@dataclass(frozen=True, slots=True, eq=False)
class _HeldOut:
    """What held-out rows say of maps to one target layer."""

    capture: Capture
    columns: Columns
    target: int
    settings: FitSettings
    known: Known | None

    def posed(self, kind: Kind, sources: Sequence[int], before: Sequence[int] = ()) -> Problem:
        return problem(
            self.capture,
            self.columns,
            kind,
            sources,
            self.target,
            before=before,
            first=self.settings.first,
            known=self.known,
        )

    def best_k(
        self, order: Sequence[int], ks: Sequence[int], strengths: Mapping[Kind, float]
    ) -> tuple[int, dict[Kind, float]]:
        """The number of leading source layers whose maps explain most, and how much."""
        scores = {k: self._scores(order[:k], strengths) for k in ks}
        best = max(ks, key=lambda k: sum(scores[k].values()))
        return best, scores[best]

    def best_before(
        self, order: Sequence[int], offered: Sequence[int], strengths: Mapping[Kind, float]
    ) -> tuple[Sequence[int], dict[Kind, float]]:
        """The source layers to read at the token before, instead of the last ones of ``order``.

        One is tried, two, four and so on up to half of them, and the fewest are taken that explain
        most of held-out rows: of most layers none.
        """
        tried: dict[int, dict[Kind, float]] = {}
        count = 0
        while count <= min(len(order) // 2, len(offered)):
            read, late = order[: len(order) - count], offered[:count]
            tried[count] = self._scores(read, strengths, late)
            count = max(1, 2 * count)
        scores = {count: sum(each.values()) for count, each in tried.items()}
        enough = max(scores.values()) - NOISE
        best = min(count for count, score in scores.items() if score >= enough)
        return offered[:best], tried[best]

    def _scores(
        self, sources: Sequence[int], strengths: Mapping[Kind, float], before: Sequence[int] = ()
    ) -> dict[Kind, float]:
        make = self.settings.solver_of
        return {
            kind: _score(self.posed(kind, sources, before), make(strengths[kind])) for kind in KINDS
        }


def _score(problem: Problem, solver: Solver) -> float:
    """Held-out R²; −∞ where a strength is too weak for features that depend on each other."""
    try:
        _, score = problem.judge(solver)
    except UnderdeterminedFit:
        if problem.fit.n <= len(problem.fit.xx):
            raise
        return float("-inf")
    return score


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
