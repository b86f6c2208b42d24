"""Choose a map by held-out evidence: many are solved from one capture, and tried on held-out text.

Layers and strengths are chosen by held-out R², which moments give for next to nothing. R² predicts
no behaviour, so between solvers, features and ranks the error of the target's attention
outputs decides.
"""

from collections.abc import Callable
from dataclasses import replace

from kvtransfer.errors import UnderdeterminedFit
from kvtransfer.fitting.capture import Capture
from kvtransfer.fitting.layers import needed_rows, rank_layers
from kvtransfer.fitting.plan import Plan, Planned
from kvtransfer.fitting.report import FitReport
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.solve import fit_captured
from kvtransfer.fitting.storage import Dtype
from kvtransfer.fitting.trial import Trial
from kvtransfer.fitting.tried import AutoReport, Budget, Candidate
from kvtransfer.hf.model import LanguageModel


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
    plan = Plan(captured, source.spec, target.spec, settings, ranking, budget.nbytes, storage)
    planned: dict[str, Planned] = {}

    def tried(each: Planned) -> Candidate:
        mapping = fit_captured(
            captured, source, target, each.how, choices=each.choices, control=False
        ).mapping
        planned[each.name] = each
        progress("try", 1)
        return Candidate(
            name=each.name,
            nbytes=mapping.nbytes(storage),
            tried=trial.of(mapping.rounded(storage)),
        )

    report = AutoReport(
        candidates=tuple(tried(each) for each in plan),
        budget=budget,
        storage=storage,
        windows=len(captured.windows),
    )
    taken = planned[report.best.name]
    fitted = fit_captured(
        captured, source, target, taken.how, choices=taken.choices, progress=progress
    )
    return replace(fitted, auto=report, ranking=ranking)
