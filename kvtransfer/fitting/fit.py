"""Fit a mapping: capture, choose, solve, report."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from kvtransfer.errors import UnderdeterminedFit
from kvtransfer.fitting.affine import Affine, Map, reduce_rank
from kvtransfer.fitting.capture import Capture, capture
from kvtransfer.fitting.chunks import chunks
from kvtransfer.fitting.features import KINDS, Features, Kind, size
from kvtransfer.fitting.layers import Choice, Columns, choose, needed_rows, problem
from kvtransfer.fitting.mapping import KVMapping, LayerMap
from kvtransfer.fitting.report import FitReport
from kvtransfer.fitting.solvers import Ridge
from kvtransfer.geometry.compat import compare
from kvtransfer.geometry.spec import ModelSpec
from kvtransfer.hf.model import LanguageModel
from kvtransfer.report import Provenance

CONTROL_RANK = 8
"""Rank of the shuffled control. It has nothing to say, so a low rank only takes noise out of it:
that makes it harder to beat, and keeps a saved mapping from being twice as large."""


CHEAP = 1024
"""Source features up to which double-precision products cost nothing beside the forward passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """How to fit. Prints, compares, and is saved with the mapping."""

    tokens: int = 32_768
    """Rows to fit on."""
    chunk: int = 512
    """Tokens in a sequence; each is read from position 0."""
    layers: int | Literal["auto", "all"] = "auto"
    """Source layers that feed a target layer."""
    strength: float | None = None
    """Relative ridge strength; None to choose it by held-out R²."""
    rank: int | None = None
    """Rank of each layer's map; None for full."""
    features: Features = "same"
    """What the target's keys, and its values, are read from."""
    products: Literal["auto", "float64", "float32"] = "auto"
    """Dtype of the products inside one batch; sums over batches are always float64. ``auto`` is
    float64 up to CHEAP features, and float32 above."""
    batch: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "chunk", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if isinstance(self.layers, int) and self.layers < 1:
            raise ValueError(f"layers must be positive, got {self.layers}")
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"rank must be positive, got {self.rank}")
        if self.strength is not None:
            Ridge(self.strength)  # which refuses what it cannot use, and now rather than later


Progress = Callable[[str, int], None]
"""Told the stage (``capture`` or ``solve``) and what was done in it since the last call: tokens, or
target layers."""


def fit(
    source: LanguageModel,
    target: LanguageModel,
    texts: Iterable[str],
    settings: FitSettings | None = None,
    *,
    progress: Progress = lambda stage, done: None,
) -> FitReport:
    """Fit a mapping that takes ``source``'s cache to ``target``.

    Args:
        source: Makes the cache.
        target: Is to read it.
        texts: Documents; see :func:`kvtransfer.fitting.texts.documents`.
        settings: How to fit; None for the defaults.
        progress: See :data:`Progress`.

    Raises:
        IncompatibleModels: no map between these two caches can exist.
        TextError: the text is too short.
        UnderdeterminedFit: there are no more rows than features.
    """
    settings = settings or FitSettings()
    captured = capture_texts(source, target, texts, settings, progress=progress)
    return fit_captured(captured, source, target, settings, progress=progress)


def capture_texts(
    source: LanguageModel,
    target: LanguageModel,
    texts: Iterable[str],
    settings: FitSettings,
    *,
    progress: Progress = lambda stage, done: None,
) -> Capture:
    """The first half of :func:`fit`: everything that needs the models to run."""
    compare(source.spec, target.spec).raise_if_blocked()
    depth = len(source.spec.layers)
    if isinstance(settings.layers, int) and settings.layers > depth:
        raise ValueError(f"{settings.layers} source layers, and {source.spec.name} has {depth}")
    needed = needed_rows(source.spec, settings.layers, settings.features)
    if settings.tokens < needed:  # known before the models run, so said before they do
        raise UnderdeterminedFit(
            settings.tokens, needed - 1, hint="raise --tokens, or read fewer source layers"
        )
    sequences = chunks(
        texts,
        source.encode,
        length=settings.chunk,
        separator=source.tokenizer.eos_token_id,
    )
    return capture(
        source,
        target,
        sequences,
        tokens=settings.tokens,
        batch=settings.batch,
        seed=settings.seed,
        products=_products(settings, source.spec),
        features=settings.features,
        progress=lambda tokens: progress("capture", tokens),
    )


def _config(model: LanguageModel) -> dict[str, Any]:
    """The model's config, without the place on this machine that it was loaded from."""
    described: dict[str, Any] = model.module.config.to_dict()
    return {name: value for name, value in described.items() if name != "_name_or_path"}


def _products(settings: FitSettings, source: ModelSpec) -> torch.dtype:
    if settings.products == "auto":
        widest = max(size(source, kind) for kind in KINDS)
        return torch.float64 if widest <= CHEAP else torch.float32
    return torch.float64 if settings.products == "float64" else torch.float32


def fit_captured(
    captured: Capture,
    source: LanguageModel,
    target: LanguageModel,
    settings: FitSettings,
    *,
    choices: Sequence[Choice] | None = None,
    progress: Progress = lambda stage, done: None,
) -> FitReport:
    """The second half: one capture serves any number of settings for layers, strength and rank.

    ``choices`` of an earlier report are used again instead of made anew, such as at another rank.
    """
    start = time.perf_counter()
    columns = Columns(source.spec, target.spec, settings.features)
    layers, shuffled, rows = [], [], []
    for choice in choices or choose(
        captured,
        source.spec,
        target.spec,
        layers=settings.layers,
        strength=settings.strength,
        features=settings.features,
    ):
        maps, r2 = _solve_layer(captured, columns, choice, settings)
        layers.append(maps["fit"])
        shuffled.append(maps["shuffled"])
        rows.append(replace(choice, r2_keys=r2["keys"], r2_values=r2["values"]))
        progress("solve", 1)
    seconds = captured.seconds | {"solve": time.perf_counter() - start}
    mean_r2 = {
        f"held-out R² of {kind}": round(
            sum(getattr(row, f"r2_{kind}") for row in rows) / len(rows), 4
        )
        for kind in KINDS
    }
    mapping = KVMapping(
        source=source.spec,
        target=target.spec,
        layers=tuple(layers),
        shuffled=tuple(shuffled),
        features=settings.features,
        rotate=target.rotary,
        target_config=_config(target),
        settings={
            "solver": "ridge",
            "tokens": captured.fit.rows,
            "chunk": settings.chunk,
            "layers": settings.layers,
            "features": settings.features,
            "rank": settings.rank,
            "seed": settings.seed,
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
    )


def _solve_layer(
    captured: Capture, columns: Columns, choice: Choice, settings: FitSettings
) -> tuple[dict[str, LayerMap], dict[Kind, float]]:
    """The maps of one target layer, and those of its shuffled twin, with held-out R²."""
    strengths: dict[Kind, float] = {
        "keys": choice.strength_keys,
        "values": choice.strength_values,
    }
    made: dict[str, dict[Kind, Map]] = {"fit": {}, "shuffled": {}}
    r2: dict[Kind, float] = {}
    for kind, strength in strengths.items():
        posed = problem(captured, columns, kind, choice.sources, choice.target)
        for twin, moments in (("fit", posed.fit), ("shuffled", posed.shuffled)):
            fitted = Ridge(strength).solve(moments)
            rank = settings.rank if twin == "fit" else CONTROL_RANK
            if rank is None:
                made[twin][kind] = fitted.float()
            else:
                low = reduce_rank(fitted, moments, rank)
                made[twin][kind] = low.float()
                fitted = Affine(low.down @ low.up, low.bias)
            if twin == "fit":
                r2[kind] = posed.score(fitted)
    layer_maps = {
        twin: LayerMap(choice.sources, maps["keys"], maps["values"]) for twin, maps in made.items()
    }
    return layer_maps, r2
