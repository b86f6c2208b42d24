"""A fit captures once, refuses early what cannot work, and reports what it found."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvtransfer.errors import IncompatibleModels, UnderdeterminedFit
from kvtransfer.fitting.affine import LowRank
from kvtransfer.fitting.fit import capture_texts, fit
from kvtransfer.fitting.report import FitReport
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.solve import fit_captured
from kvtransfer.fitting.texts import builtin
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill

SETTINGS = FitSettings(tokens=1_024, chunk=64, layers=1, strength=1e-3)


@pytest.fixture(scope="module")
def report(source: LanguageModel, target: LanguageModel) -> FitReport:
    return fit(source, target, builtin("fit"), SETTINGS)


class Unread:
    """Texts that nobody should ask for."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("the text was read")


def test_the_json_shape_is_the_one_that_scripts_rely_on(report: FitReport) -> None:
    document = json.loads(report.to_json())

    assert set(document) >= {"mapping", "rows", "layers", "seconds", "bytes", "provenance"}
    assert (document["mapping"], document["bytes"]) == (None, None)
    assert document["rows"] == 1_024
    assert [layer["target"] for layer in document["layers"]] == [0, 1]
    for layer in document["layers"]:
        assert set(layer) >= {"target", "sources", "r2_keys", "r2_values"}
    stages = {"source_forward", "target_forward", "statistics", "solve"}
    assert set(document["seconds"]) >= stages


def test_a_report_is_true_where_both_kinds_are_explained_better_than_by_their_mean(
    report: FitReport,
) -> None:
    def of(r2_keys: float, r2_values: float) -> FitReport:
        layers = tuple(
            replace(layer, r2_keys=r2_keys, r2_values=r2_values) for layer in report.layers
        )
        return replace(report, layers=layers)

    assert of(0.5, 0.1)
    assert not of(0.5, -0.1)
    assert not of(-0.1, 0.5)


def test_what_was_fitted_takes_the_sources_cache_to_the_targets(
    report: FitReport, source: LanguageModel, target: LanguageModel
) -> None:
    ids = source.encode(builtin("heldout")[0])[None, :48]
    own, mapped, control = (
        prefill(target, ids),
        report.mapping(prefill(source, ids)),
        report.mapping(prefill(source, ids), shuffled=True),
    )

    def lost(values: tuple[torch.Tensor, ...]) -> float:
        pairs = zip(values, own.values, strict=True)
        return float(sum((a - b).square().sum() for a, b in pairs))

    assert lost(mapped.values) < 0.95 * lost(control.values)


def test_one_capture_serves_every_choice(
    report: FitReport, source: LanguageModel, target: LanguageModel
) -> None:
    captured = capture_texts(source, target, builtin("fit"), SETTINGS)

    again = fit_captured(captured, source, target, SETTINGS)
    low = fit_captured(captured, source, target, replace(SETTINGS, layers="all", rank=5))

    assert again.layers == report.layers
    assert low.layers[0].sources == (0, 1, 2)
    keys = low.mapping.layers[0].keys
    assert isinstance(keys, LowRank)
    assert keys.down.shape == (96, 5)


def test_the_mapping_remembers_how_it_was_fitted(report: FitReport) -> None:
    settings, quality = report.mapping.settings, report.mapping.quality

    assert settings["tokens"] == 1_024
    assert settings["chunk"] == 64
    assert settings["layers"] == 1
    assert any("keys" in name for name in quality)
    assert report.mapping.provenance["seed"] == 0


@pytest.mark.parametrize(("layers", "needed"), [(1, 33), (2, 65), ("all", 97)])
def test_too_few_tokens_are_refused_before_a_text_is_read(
    source: LanguageModel, target: LanguageModel, layers: Any, needed: int
) -> None:
    settings = FitSettings(tokens=needed - 1, chunk=16, layers=layers)

    with pytest.raises(UnderdeterminedFit, match=f"{needed - 1} rows") as caught:
        fit(source, target, Unread(), settings)

    assert f"at least {needed} rows" in str(caught.value.hint)


def test_a_text_that_runs_out_before_there_are_rows_enough_is_refused(
    source: LanguageModel, target: LanguageModel
) -> None:
    text = source.decode(source.encode(builtin("fit")[0])[:40])

    with pytest.raises(UnderdeterminedFit, match="32 coefficients"):
        fit(source, target, [text], FitSettings(tokens=512, chunk=10, layers=1))


def test_more_source_layers_than_there_are_is_a_mistake(
    source: LanguageModel, target: LanguageModel
) -> None:
    with pytest.raises(ValueError, match=r"4 source layers, .* has 3"):
        fit(source, target, Unread(), FitSettings(layers=4))


def test_a_pair_that_no_map_can_join_is_refused_before_a_text_is_read(
    source: LanguageModel, target: LanguageModel
) -> None:
    latent = tuple(replace(layer, kind="latent") for layer in target.spec.layers)
    other = replace(target, spec=replace(target.spec, layers=latent))

    with pytest.raises(IncompatibleModels, match="latent"):
        fit(source, other, Unread(), SETTINGS)


@pytest.mark.parametrize(
    "changed",
    [{"tokens": 0}, {"chunk": 0}, {"batch": -1}, {"layers": 0}, {"rank": 0}, {"strength": -1.0}],
    ids=str,
)
def test_settings_that_mean_nothing_are_a_mistake(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(changed))):
        FitSettings(**changed)


def test_progress_is_told_in_tokens_and_in_layers(
    source: LanguageModel, target: LanguageModel
) -> None:
    told: list[tuple[str, int]] = []

    fit(
        source,
        target,
        builtin("fit"),
        replace(SETTINGS, tokens=256),
        progress=lambda stage, done: told.append((stage, done)),
    )

    assert sum(done for stage, done in told if stage == "solve") == 2
    assert sum(done for stage, done in told if stage == "capture") == 256 + 64
