"""Fit a mapping: both models read a text once, and a map is solved from what they cached."""

import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import tee

import torch

from kvtransfer.errors import UnderdeterminedFit
from kvtransfer.fitting.auto import choose_map
from kvtransfer.fitting.band import Band
from kvtransfer.fitting.capture import Capture, capture
from kvtransfer.fitting.chunks import chunks
from kvtransfer.fitting.features import KINDS, Features, size, spaced
from kvtransfer.fitting.layers import needed_rows
from kvtransfer.fitting.neural import add_networks
from kvtransfer.fitting.plan import BEFORE
from kvtransfer.fitting.report import FitReport
from kvtransfer.fitting.rows import require_room
from kvtransfer.fitting.seen import seen
from kvtransfer.fitting.settings import FitSettings, Progress
from kvtransfer.fitting.solve import fit_captured
from kvtransfer.fitting.solvers import weighs
from kvtransfer.fitting.storage import Dtype
from kvtransfer.fitting.tried import Budget
from kvtransfer.fitting.workspace import Workspace
from kvtransfer.geometry.compat import compare
from kvtransfer.geometry.spec import ModelSpec, same_tokens
from kvtransfer.hf.aligned import Alignable
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.start import require_layers, width

CHEAP = 1024
"""Source features up to which double-precision products cost nothing beside the forward passes."""


def fit(
    source: LanguageModel,
    target: LanguageModel,
    texts: Iterable[str],
    settings: FitSettings | None = None,
    *,
    budget: Budget | None = None,
    storage: Dtype = "float32",
    workspace: Workspace | None = None,
    progress: Progress = lambda stage, done: None,
) -> FitReport:
    """Fit a mapping that takes ``source``'s cache to ``target``.

    Args:
        source: Makes the cache.
        target: Is to read it.
        texts: Documents; see :func:`kvtransfer.fitting.texts.documents`.
        settings: How to fit; None for the defaults.
        budget: What the map may cost, where the solver is ``auto``.
        storage: How it will be stored, which decides what it costs.
        workspace: Where moments lie, and how a killed fit goes on; None for in memory, and not at
            all. A checkpoint stays until :func:`kvtransfer.fitting.checkpoint.remove` is told of
            it: what was fitted is not saved yet.
        progress: See :data:`Progress`.

    Raises:
        IncompatibleModels: no map between these two caches can exist.
        TextError: the text is too short.
        UnderdeterminedFit: there are no more rows than features.
        UnsupportedModel: the tokenizers differ, and one does not say what its tokens stand for.
        ArtifactError: there is a checkpoint, and it is of another text, model or setting.
        KVTransferError: there is no room for the moments, or for the rows that networks are
            trained on.
    """
    settings = settings or FitSettings()
    if settings.solver == "mlp":
        return _fit_networks(source, target, texts, settings, workspace, progress)
    captured = capture_texts(
        source, target, texts, settings, workspace=workspace, progress=progress
    )
    if settings.solver == "auto":
        report = choose_map(
            captured,
            source,
            target,
            settings,
            budget=budget,
            storage=storage,
            progress=progress,
        )
    else:
        report = fit_captured(captured, source, target, settings, progress=progress)
    return _looked_at(report, captured, source, target)


def _fit_networks(
    source: LanguageModel,
    target: LanguageModel,
    texts: Iterable[str],
    settings: FitSettings,
    workspace: Workspace | None,
    progress: Progress,
) -> FitReport:
    """A linear fit, and then the same text once more for the rows that networks are trained on."""
    state = 0 if settings.start is None else width(target)
    require_room(
        source.spec,
        target.spec,
        settings.features,
        tokens=settings.tokens,
        before=_before(settings, source.spec),
        state=state,
    )
    texts, again = tee(texts)  # some can be read once only; no more is kept than was read
    captured = capture_texts(
        source, target, texts, settings, workspace=workspace, progress=progress
    )
    linear = replace(settings, solver="ridge")
    report = add_networks(
        fit_captured(captured, source, target, linear, progress=progress),
        captured,
        source,
        target,
        _sequences(source, target, again, settings),
        settings.network,
        tokens=settings.tokens,
        batch=settings.batch,
        progress=progress,
    )
    return _looked_at(report, captured, source, target)


def _looked_at(
    report: FitReport, captured: Capture, source: LanguageModel, target: LanguageModel
) -> FitReport:
    """The same report, its mapping with what the target's attention makes of it."""
    began = time.perf_counter()
    found = seen(report.mapping, source, target, captured.windows)
    return replace(
        report,
        mapping=replace(report.mapping, quality={**report.mapping.quality, **found}),
        seconds=report.seconds | {"look": time.perf_counter() - began},
    )


def capture_texts(
    source: LanguageModel,
    target: LanguageModel,
    texts: Iterable[str],
    settings: FitSettings,
    *,
    workspace: Workspace | None = None,
    progress: Progress = lambda stage, done: None,
) -> Capture:
    """The first half of :func:`fit`: everything that needs the models to run."""
    compare(source.spec, target.spec).raise_if_blocked()
    depth = len(source.spec.layers)
    if isinstance(settings.layers, int) and settings.layers > depth:
        raise ValueError(f"{settings.layers} source layers, and {source.spec.name} has {depth}")
    starts = () if settings.start is None else (settings.start,)
    require_layers(target, starts)
    if settings.start == len(target.spec.layers) - 1:
        raise ValueError(
            f"a start of {settings.start} layers leaves none of {target.spec.name}'s to be mapped"
        )
    band = Band(settings.band, depth, len(target.spec.layers))
    first = 0 if settings.start is None else settings.start + 1
    if isinstance(settings.layers, int):
        band.require(settings.layers, first)
    state = width(target) if starts else 0
    # What is to be chosen from tries all features, and needs rows for the fewest.
    features: Features = "both" if settings.solver == "auto" else settings.features
    most = band.widest(first) if settings.layers == "all" else settings.layers
    needed = needed_rows(source.spec, most, settings.features, state=state)
    if settings.tokens < needed:  # known before the models run, so said before they do
        raise UnderdeterminedFit(
            settings.tokens, needed - 1, hint="raise --tokens, or read fewer source layers"
        )
    sequences = _sequences(source, target, texts, settings)
    captured = capture(
        source,
        target,
        sequences,
        tokens=settings.tokens,
        batch=settings.batch,
        seed=settings.seed,
        products=_products(settings, source.spec),
        features=features,
        before=_before(settings, source.spec),
        starts=starts,
        attention=settings.solver == "auto" or weighs(settings.solver),
        band=settings.band,
        workspace=workspace,
        progress=lambda tokens: progress("capture", tokens),
    )
    return replace(captured, left_out=sequences.left_out)


def _before(settings: FitSettings, source: ModelSpec) -> tuple[int, ...]:
    """Source layers to gather at the token before, too."""
    count = BEFORE if settings.solver == "auto" else settings.before
    return spaced(len(source.layers), count) if count else ()


def _sequences(
    source: LanguageModel, target: LanguageModel, texts: Iterable[str], settings: FitSettings
) -> Alignable:
    cuts = source if same_tokens(source.spec, target.spec) else target
    sequences = chunks(
        texts,
        cuts.encode,
        length=settings.chunk,
        separator=cuts.tokenizer.eos_token_id,
        opening=target.opening,
    )
    return Alignable(source, target, sequences)


def _products(settings: FitSettings, source: ModelSpec) -> torch.dtype:
    if settings.products == "auto":
        widest = max(size(source, kind) for kind in KINDS)
        return torch.float64 if widest <= CHEAP else torch.float32
    return torch.float64 if settings.products == "float64" else torch.float32
