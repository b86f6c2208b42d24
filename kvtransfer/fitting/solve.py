"""From a capture to a mapping: choose layers, solve, report. No model runs."""

import time
from collections.abc import Sequence
from dataclasses import replace

from jaxtyping import Float
from torch import Tensor

from kvtransfer.fitting.affine import Affine, Linear, LowRank, reduce_rank, through_means, widen
from kvtransfer.fitting.capture import Capture
from kvtransfer.fitting.choice import Choice, choose
from kvtransfer.fitting.columns import Columns
from kvtransfer.fitting.features import KINDS, Kind
from kvtransfer.fitting.layer_map import LayerMap
from kvtransfer.fitting.layers import rank_layers
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.problem import Known, Problem, problem
from kvtransfer.fitting.report import FitReport
from kvtransfer.fitting.settings import FitSettings, Progress
from kvtransfer.fitting.solvers import Damping, Ridge, weighs
from kvtransfer.geometry.spec import same_tokens
from kvtransfer.hf.model import LanguageModel
from kvtransfer.report import Provenance

CONTROL_RANK = 8
"""Rank of the shuffled control. It has nothing to say, so a low rank only takes noise out of it:
that makes it harder to beat, and keeps a saved mapping from being twice as large."""


SPARED = 0.98
"""Share of a whole map's held-out R² that a rank must keep, where none was asked for."""


def fit_captured(
    captured: Capture,
    source: LanguageModel,
    target: LanguageModel,
    settings: FitSettings,
    *,
    choices: Sequence[Choice] | None = None,
    ranking: Float[Tensor, "target source"] | None = None,
    control: bool = True,
    progress: Progress = lambda stage, done: None,
) -> FitReport:
    """The second half: one capture serves any number of settings for layers, strength and rank.

    ``choices`` of an earlier report are used again instead of made anew, such as at another rank;
    likewise the ``ranking`` of source layers that :func:`rank_layers` found. Without ``control``,
    the mapping has no shuffled twin, and is solved in less than half the time.

    Raises:
        UnderdeterminedFit: there are no more rows than features.
        ValueError: the solver is ``mlp``, which needs more than was captured.
    """
    if settings.solver == "mlp":
        raise ValueError(
            "networks are trained on rows, and a capture holds moments only: call fit() with "
            "solver 'mlp', which reads the text again"
        )
    began = time.perf_counter()
    columns = Columns.of(
        captured,
        source.spec,
        target.spec,
        features=settings.features,
        start=settings.start,
    )
    layers, shuffled, rows = [], [], []
    if choices is None and ranking is None:
        ranking = rank_layers(captured, source.spec, target.spec)
    known = Known()
    made = choices or choose(
        captured, source.spec, target.spec, settings, ranking=ranking, known=known
    )
    for choice in made:
        maps, r2 = _solve_layer(captured, columns, choice, settings, known, control=control)
        layers.append(maps["fit"])
        if control:
            shuffled.append(maps["shuffled"])
        rows.append(replace(choice, r2_keys=r2["keys"], r2_values=r2["values"]))
        progress("solve", 1)
    seconds = captured.seconds | {"solve": time.perf_counter() - began}
    mean_r2 = {
        f"held-out R² of {kind}": round(
            sum(getattr(row, f"r2_{kind}") for row in rows) / len(rows), 4
        )
        for kind in KINDS
    }
    alike = same_tokens(source.spec, target.spec)
    mapping = KVMapping(
        source=source.spec,
        target=target.spec,
        layers=tuple(layers),
        shuffled=tuple(shuffled),
        features=settings.features,
        start=settings.start,
        rotate=target.rotary,
        target_config=target.config,
        settings={
            "solver": settings.solver,
            "tokens": captured.fit.rows,
            "chunk": settings.chunk,
            "layers": settings.layers,
            "selection": settings.selection,
            "features": settings.features,
            "first": settings.first,
            "before": settings.before,
            "band": settings.band,
            "start": settings.start,
            "strength": settings.strength,
            "scale": settings.scale,
            "rank": settings.rank,
            "gain": settings.gain,
            "seed": settings.seed,
            **({} if alike else {"chunks_left_out": captured.left_out}),
        },
        quality=mean_r2,
        provenance=Provenance.here(seed=settings.seed).to_dict(),
    )
    return FitReport(
        mapping=mapping,
        rows=captured.fit.rows,
        heldout_rows=captured.heldout.rows,
        layers=tuple(rows),
        seconds=seconds,
        ranking=ranking,
        moments=captured.nbytes,
    )


def _solve_layer(
    captured: Capture,
    columns: Columns,
    choice: Choice,
    settings: FitSettings,
    known: Known,
    *,
    control: bool,
) -> tuple[dict[str, LayerMap], dict[Kind, float]]:
    """The maps of one target layer, and those of its shuffled twin, with held-out R²."""
    strengths: dict[Kind, float] = {
        "keys": choice.strength_keys,
        "values": choice.strength_values,
    }
    made: dict[str, dict[Kind, Linear]] = {"fit": {}, "shuffled": {}}
    r2: dict[Kind, float] = {}
    for kind, strength in strengths.items():
        posed = problem(
            captured,
            columns,
            kind,
            choice.sources,
            choice.target,
            before=choice.before,
            first=settings.first,
            attention=weighs(settings.solver),
            known=known,
        )
        fitted, r2[kind] = _solved(posed, settings, strength)
        made["fit"][kind] = fitted.float()
        if control:
            twin = Ridge(strength, settings.scale).solve(posed.shuffled)
            made["shuffled"][kind] = reduce_rank(twin, posed.shuffled, CONTROL_RANK).float()
    layer_maps = {
        name: LayerMap(choice.sources, maps["keys"], maps["values"], choice.before)
        for name, maps in made.items()
        if maps
    }
    return layer_maps, r2


def _solved(posed: Problem, settings: FitSettings, strength: float) -> tuple[Linear, float]:
    """The map that the settings ask for, and its held-out R²."""
    found, score = posed.judge(settings.solver_of(strength))
    if settings.solver == "lowrank" and settings.rank is None:
        found = _smallest_rank(posed, found, strength, settings)
    elif settings.gain == 1.0:
        return found, score
    found = widen(found, settings.gain, posed.fit)
    return found, posed.score(found)


def _smallest_rank(posed: Problem, whole: Linear, strength: float, settings: FitSettings) -> Linear:
    """The lowest rank that explains SPARED of what the whole map explains, on held-out rows."""
    assert isinstance(whole, Affine)
    p, q = whole.weight.shape
    damping = Damping(strength, settings.scale).on(posed.fit)
    most = reduce_rank(whole, posed.fit, min(p, q), damping=damping)
    wanted = SPARED * posed.score(whole)
    low, high = 1, min(p, q)
    while low < high:  # what a rank explains rises with it
        middle = (low + high) // 2
        low, high = (low, middle) if _cut(posed, most, middle) >= wanted else (middle + 1, high)
    return _of_rank(most, posed, high)


def _cut(posed: Problem, most: LowRank, rank: int) -> float:
    return posed.score(_of_rank(most, posed, rank))


def _of_rank(most: LowRank, posed: Problem, rank: int) -> LowRank:
    """The leading directions only; those of a reduced-rank fit come in ascending order."""
    down, up = most.down[:, -rank:], most.up[-rank:]
    return LowRank(down.contiguous(), up.contiguous(), through_means(down @ up, posed.fit).bias)
