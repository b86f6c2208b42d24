"""A gate stands beside the outcome: said in the table, the sentence and JSON, and changing none."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from kvtransfer.evaluation.gated import gated
from kvtransfer.evaluation.report import EvalReport
from kvtransfer.fitting.gate import Gate
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.seen import CONTROL, COSINE, KL
from kvtransfer.hf.model import LanguageModel

from .conftest import identity


@pytest.fixture
def mapping(model: LanguageModel) -> KVMapping:
    return replace(
        identity(model), quality={KL: 0.2, COSINE: 0.6, CONTROL: 0.5, "held-out R² of keys": 0.9}
    )


def printed(report: EvalReport) -> str:
    console = Console(width=120, record=True)
    console.print(report)
    return console.export_text()


@pytest.mark.parametrize("gate", [Gate(), Gate("cosine-gain", 0.5)], ids=str)
def test_what_is_judged_is_of_the_text_at_hand(
    itself: EvalReport, mapping: KVMapping, gate: Gate
) -> None:
    """Of the identity all is gained; what was recorded with this mapping is another number."""
    assert itself.text is not None
    document = json.loads(gated(itself, mapping, gate).to_json())["gate"]
    alone = gated(replace(itself, text=None), mapping, gate).to_dict()["gate"]

    assert document["measure"] == gate.measure
    assert document["value"] == pytest.approx(1, abs=1e-3)
    assert (document["below"], document["on"]) == (False, "this text")
    assert alone["value"] == pytest.approx(0.2)
    assert (alone["below"], alone["on"]) == (True, "its fit's held-out text")


def test_without_the_control_a_gain_is_the_recorded_one(
    itself: EvalReport, mapping: KVMapping
) -> None:
    assert itself.text is not None
    columns = {name: each for name, each in itself.text.columns.items() if name != "shuffled"}
    report = replace(itself, text=replace(itself.text, columns=columns))

    gain = gated(report, mapping, Gate("cosine-gain", 0.5)).to_dict()["gate"]
    assert gain["value"] == pytest.approx(0.2)
    cosine = gated(report, mapping, Gate("cosine", 0.9)).to_dict()["gate"]
    assert (cosine["on"], cosine["below"]) == ("this text", False)


def test_below_is_said_everywhere_and_the_verdict_stays(
    itself: EvalReport, mapping: KVMapping
) -> None:
    report = gated(itself, mapping, Gate("r2-keys", 0.95))

    said = "below the gate: R² of keys 0.9 < 0.95 on its fit's held-out text"
    assert said in report.sentence()
    assert "Below the gate: R² of keys 0.9 < 0.95" in printed(report)
    assert bool(report) == bool(itself)
    above = gated(itself, mapping, Gate("r2-keys", 0.85))
    assert "gate" not in above.sentence()
    assert "Above the gate" in printed(above)


def test_a_probe_is_run_where_a_gate_looks_at_one(itself: EvalReport, mapping: KVMapping) -> None:
    gate = Gate("probe", 0.3)

    assert gated(itself, mapping, gate, probe=lambda: 0.25).to_dict()["gate"]["below"] is True
    unknown = gated(itself, mapping, gate)
    assert unknown.to_dict()["gate"]["below"] is None
    assert "The gate cannot judge: no probe is recorded" in printed(unknown)
    # What another gate looks at is not probed for.
    refuse: Callable[[], float] = lambda: pytest.fail("probed")  # noqa: E731
    assert gated(itself, mapping, probe=refuse).to_dict()["gate"]["measure"] == "kl"


def test_no_gate_is_no_word(itself: EvalReport, mapping: KVMapping) -> None:
    assert gated(itself, mapping, None) is itself
