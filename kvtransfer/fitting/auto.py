"""Choose a map by held-out evidence: many are solved from one capture, and tried on held-out text.

Layers and strengths are chosen by held-out R², which moments give for next to nothing. R² predicts
no behaviour, so between solvers, features, ranks and gains the error of the target's attention
outputs decides.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvtransfer.errors import UnderdeterminedFit
from kvtransfer.fitting.affine import LowRank
from kvtransfer.fitting.capture import Capture
from kvtransfer.fitting.columns import Columns
from kvtransfer.fitting.features import KINDS, Features, widths
from kvtransfer.fitting.layers import Choice, choose, greedy, needed_rows, rank_layers
from kvtransfer.fitting.report import FitReport
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.solve import fit_captured
from kvtransfer.fitting.storage import Dtype, nbytes
from kvtransfer.fitting.trial import Trial
from kvtransfer.fitting.tried import AutoReport, Budget, Candidate
from kvtransfer.geometry.spec import ModelSpec
from kvtransfer.hf.model import LanguageModel

PAPER: dict[str, Any] = {
    "solver": "ridge",
    "strength": 0.01,
    "scale": "absolute",
    "features": "same",
    "selection": "top",
}
"""The recipe of Heo et al. (arXiv:2608.03893), §3."""

PAPER_LAYERS = 8
"""Source layers at which they report their best pair."""

GAINS = (1.03, 1.06, 1.1)
"""Spreads tried of the best map."""


def choose_map(
    captured: Capture,
    source: LanguageModel,
    target: LanguageModel,
    settings: FitSettings,
    *,
    budget: Budget | None = None,
    storage: Dtype = "float32",
    progress: Callable[[str, int], None] = lambda stage, done: None,
) -> FitReport:
    """Solve and try many maps from one capture, and fit the best within a budget.

    Args:
        captured: Of keys and values together, with attention, and the settings' start if any.
        source: Makes the cache.
        target: Is to read it.
        settings: Chunk, start and seed are taken from here; the rest is chosen.
        budget: What the map may cost; None for no bound.
        storage: How it will be stored, and is tried.
        progress: Told ``try`` and 1 after each candidate, ``solve`` and 1 after each layer of
            the last one.

    Raises:
        UnderdeterminedFit: there are too few rows for any of them.
        BudgetError: none is within the budget.
    """
    budget = budget or Budget()
    starts = () if settings.start is None else (settings.start,)
    least = needed_rows(source.spec, 1, "same")
    if captured.fit.rows < least:  # said of the maps, before a smaller probe says it of itself
        raise UnderdeterminedFit(captured.fit.rows, least - 1, hint="give more text (--tokens)")
    trial = Trial(source, target, captured.windows, starts)
    ranking = rank_layers(captured, source.spec, target.spec)
    solved = _Solved(captured, source, target, ranking)

    how_of: dict[str, tuple[FitSettings, tuple[Choice, ...]]] = {}

    def tried(name: str, how: FitSettings, choices: tuple[Choice, ...]) -> Candidate:
        mapping = solved(how, choices).mapping
        how_of[name] = how, choices
        progress("try", 1)
        return Candidate(
            name=name, nbytes=mapping.nbytes(storage), tried=trial.of(mapping.rounded(storage))
        )

    def among(candidates: Sequence[Candidate]) -> AutoReport:
        return AutoReport(
            candidates=tuple(candidates),
            budget=budget,
            storage=storage,
            windows=len(captured.windows),
        )

    plan = _plan(captured, source.spec, target.spec, settings, solved, budget, storage)
    found = [tried(*each) for each in plan]
    # The spread is settled last, on the best map: what it gives back does not depend on the rest.
    best = among(found).best.name
    how, choices = how_of[best]
    found += [tried(f"{best}, gain {gain}", replace(how, gain=gain), choices) for gain in GAINS]
    report = among(found)
    how, choices = how_of[report.best.name]
    fitted = fit_captured(captured, source, target, how, choices=choices, progress=progress)
    return replace(fitted, auto=report, ranking=ranking)


@dataclass(frozen=True, slots=True, eq=False)
class _Solved:
    """Solves candidates, without their controls, and remembers what layers were chosen."""

    captured: Capture
    source: LanguageModel
    target: LanguageModel
    ranking: Float[Tensor, "target source"]

    def __call__(self, how: FitSettings, choices: tuple[Choice, ...]) -> FitReport:
        return fit_captured(
            self.captured, self.source, self.target, how, choices=choices, control=False
        )

    def top(self, how: FitSettings, k: int) -> tuple[Choice, ...]:
        """The k layers that explain most alone, with strengths."""
        return self._choices(how, k, None)

    def greedy(
        self, how: FitSettings, k: int, orders: Sequence[Sequence[int]], strength: float | None
    ) -> tuple[Choice, ...]:
        """The first k layers of some orders, with strengths."""
        return self._choices(replace(how, strength=strength), k, orders)

    def orders(self, k: int) -> list[list[int]]:
        """Forward selection up to k layers, for every target layer."""
        columns = Columns.of(self.captured, self.source.spec, self.target.spec)
        alone = [row.argsort(descending=True).tolist() for row in self.ranking]
        return [greedy(self.captured, columns, t, order, k) for t, order in enumerate(alone)]

    def _choices(
        self, how: FitSettings, k: int, orders: Sequence[Sequence[int]] | None
    ) -> tuple[Choice, ...]:
        return tuple(
            choose(
                self.captured,
                self.source.spec,
                self.target.spec,
                layers=k,
                strength=how.strength,
                scale=how.scale,
                features=how.features,
                start=how.start,
                ranking=self.ranking,
                orders=orders,
            )
        )


Plan = Iterator[tuple[str, FitSettings, tuple[Choice, ...]]]


def _plan(
    captured: Capture,
    source: ModelSpec,
    target: ModelSpec,
    settings: FitSettings,
    solved: _Solved,
    budget: Budget,
    storage: Dtype,
) -> Plan:
    """Every candidate that the rows suffice for, the paper's first."""
    depth, rows = len(source.layers), captured.fit.rows
    state = 0 if settings.start is None else captured.state_width

    def ks(features: Features, wanted: Sequence[int], state: int = state) -> list[int]:
        usable = {min(k, depth) for k in wanted}
        return sorted(k for k in usable if needed_rows(source, k, features, state=state) <= rows)

    for k in ks("same", (PAPER_LAYERS,), 0)[-1:] or [1]:
        how = replace(settings, **PAPER, layers=k, start=None, rank=None, gain=1.0)
        yield f"ridge, λ 0.01, same kind, top {k} (paper)", how, solved.top(how, k)
    for k in ks("same", (4,)):
        how = _how(settings, "ridge", "same", "top", k)
        yield f"ridge, same kind, top {k}", how, solved.top(how, k)
    few = ks("both", (2, 4))
    if not few:
        return
    how = _how(settings, "ridge", "both", "greedy", few[-1])
    many = [k for k in ks("both", (8,)) if k > few[-1]]
    orders = solved.orders((many or few)[-1])
    base = solved.greedy(how, few[-1], orders, None)
    yield f"ridge, keys and values, greedy {few[-1]}", how, base
    top = replace(how, selection="top")
    yield f"ridge, keys and values, top {few[-1]}", top, solved.top(top, few[-1])
    wide = base
    for k in many:
        wide = _with_strengths(solved.greedy(how, k, orders, 1e-5), base)
        yield f"ridge, keys and values, greedy {k}", replace(how, layers=k), wide
    k = (many or few)[-1]
    how = replace(how, layers=k)
    yield f"headwise, keys and values, greedy {k}", replace(how, solver="headwise"), wide
    yield f"procrustes, keys and values, greedy {k}", replace(how, solver="procrustes"), wide
    if captured.weighted is not None:
        yield f"attention, keys and values, greedy {k}", replace(how, solver="attention"), wide
    most = min(min(widths(target, kind)) for kind in KINDS)
    ranks = {most // 2}
    if budget.nbytes is not None:
        ranks.add(_rank_within(budget.nbytes, wide, source, target, state, storage))
    for rank in sorted(rank for rank in ranks if 0 < rank < most):
        name = f"rank {rank}, keys and values, greedy {k}"
        yield f"lowrank of {name}", replace(how, solver="lowrank", rank=rank), wide
        if captured.weighted is not None:
            yield f"attention of {name}", replace(how, solver="attention", rank=rank), wide


def _how(
    settings: FitSettings,
    solver: Literal["ridge"],
    features: Features,
    selection: Literal["top", "greedy"],
    k: int,
) -> FitSettings:
    return replace(
        settings,
        solver=solver,
        features=features,
        selection=selection,
        layers=k,
        strength=None,
        scale="relative",
        rank=None,
        gain=1.0,
    )


def _with_strengths(layers: Sequence[Choice], strengths: Sequence[Choice]) -> tuple[Choice, ...]:
    """The strength that is best at a few layers is within a thousandth of the best at more."""
    return tuple(
        replace(one, strength_keys=other.strength_keys, strength_values=other.strength_values)
        for one, other in zip(layers, strengths, strict=True)
    )


def _rank_within(
    size: int,
    choices: Sequence[Choice],
    source: ModelSpec,
    target: ModelSpec,
    state: int,
    storage: Dtype,
) -> int:
    """The largest rank at which low-rank maps of these layers take at most ``size`` bytes."""

    def taken(rank: int) -> int:
        total = 0
        for choice in choices:
            read = state + sum(widths(source, each)[s] for s in choice.sources for each in KINDS)
            for kind in KINDS:
                q = widths(target, kind)[choice.target]
                low = LowRank(torch.ones(read, rank), torch.ones(rank, q), torch.ones(q))
                total += nbytes(low, storage)
        return total

    per_rank = taken(2) - taken(1)
    return (size - taken(1)) // per_rank + 1
