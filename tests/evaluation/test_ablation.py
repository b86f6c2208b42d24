"""The ablation matrix: zero is not absence, and only what is removed is gone."""

import json
from collections.abc import Callable

import numpy as np
import pytest
import torch
from rich.console import Console

from kvtransfer.errors import SteeringError, TextError, UnsupportedModel
from kvtransfer.evaluation.ablation import ABLATIONS, ablate, part_out
from kvtransfer.evaluation.ablation_report import METRICS, AblationReport
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill, score
from kvtransfer.hf.variants import attending
from kvtransfer.measures.agreement import nll

from .conftest import GUIDES

ROWS = [*ABLATIONS, "none"]


@pytest.fixture(scope="module", params=["sdpa", "eager"])
def report(request: pytest.FixtureRequest, model: LanguageModel) -> AblationReport:
    with attending(model, request.param):
        return ablate(model, GUIDES)


def test_only_what_is_removed_spends_no_mass_and_equals_the_run_without(
    report: AblationReport,
) -> None:
    columns = report.columns

    assert list(columns) == ROWS
    assert report.removed_to_none is not None
    assert report.removed_to_none < 1e-4
    np.testing.assert_allclose(columns["removed"]["nll"], columns["none"]["nll"], atol=1e-5)
    assert not columns["removed"]["mass"].any()
    for row in ("intact", "keys zeroed", "values zeroed", "both zeroed"):
        assert columns[row]["mass"].min() > 0.05
    # Where only values are gone, attention is spent as before, in the first layer exactly.
    assert abs(columns["both zeroed"]["nll"] - columns["none"]["nll"]).max() > 1e-2
    assert report


def test_the_intact_row_is_the_plain_model(report: AblationReport, model: LanguageModel) -> None:
    guide = GUIDES[1]
    ids = model.encode(guide.text + guide.items[0].prompt + " customs shed")
    hidden = len(model.encode(guide.text))
    answer = len(model.encode(" customs shed"))

    logits = score(model, ids[None, hidden:], prefill(model, ids[None, :hidden]))[0]

    expected = nll(logits[:-1], ids[hidden + 1 :])[-answer:].mean()
    assert report.columns["intact"]["nll"][-1] == pytest.approx(float(expected), abs=1e-5)
    assert not report.columns["intact"]["kl"].any()


def test_ablating_some_layers_leaves_the_others(model: LanguageModel) -> None:
    first = ablate(model, GUIDES, layers="0")

    assert first.removed_to_none is None
    assert not first.columns["removed"]["mass"].any()  # in the layer that was ablated
    assert first.columns["removed"]["kl"].mean() > 1e-3
    gone = abs(first.columns["removed"]["nll"] - first.columns["none"]["nll"])
    assert gone.max() > 1e-3


def test_the_report_reads_and_repeats(report: AblationReport, model: LanguageModel) -> None:
    console = Console(record=True, width=200)
    console.print(report)
    shown = console.export_text()
    document = json.loads(report.to_json())

    for row in ROWS:
        assert row in shown
    assert f"n = {report.n} questions" in shown
    assert set(document["conditions"]["removed"]) == {metric for metric, _, _ in METRICS}
    assert len(document["items"]["intact"]["kl"]) == report.n == 4
    assert [each["expect"] for each in document["answers"]] == ["Marlow"]


def test_what_is_before_any_text_stays(
    model: LanguageModel, tiny: Callable[..., LanguageModel]
) -> None:

    cache = prefill(model, torch.arange(3, 13)[None])

    removed = part_out("removed", "all", 1)(cache)

    assert removed.hidden is not None
    for gone in removed.hidden:
        assert gone is not None
        assert gone[0, 0].tolist() == [False, *[True] * 9]


def test_bad_input_is_named(model: LanguageModel, tiny: Callable[..., LanguageModel]) -> None:
    with pytest.raises(SteeringError, match="no layer 7"):
        ablate(model, GUIDES, layers="7")
    with pytest.raises(TextError, match="no questions"):
        ablate(model, ())
    with pytest.raises(UnsupportedModel, match="saw what was to be hidden"):
        ablate(tiny("mpt", d_model=64, n_heads=4, n_layers=2), GUIDES)
