"""A gate says what it looks at, what it needs, and when it cannot judge."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest

from kvtransfer.evaluation.evaluate import evaluate
from kvtransfer.fitting.chunks import chunks
from kvtransfer.fitting.diagnose import diagnose
from kvtransfer.fitting.fit import fit
from kvtransfer.fitting.gate import MEASURES, Gate, Measure
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.refine import refine
from kvtransfer.fitting.refine_settings import RefineSettings
from kvtransfer.fitting.seen import CONTROL, COSINE, KL, seen
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.texts import builtin
from kvtransfer.hf.model import LanguageModel
from kvtransfer.measures.agreement import cosine_gain

from .conftest import MakeMapping

QUICK = FitSettings(tokens=1024, chunk=64, layers=1)


def carrying(mapping: KVMapping, **quality: Any) -> KVMapping:
    return replace(mapping, quality=quality)


@pytest.mark.parametrize(
    ("text", "gate"),
    [
        ("0.3", Gate(threshold=0.3)),
        ("-0.5", Gate(threshold=-0.5)),
        ("probe=0.3", Gate("probe", 0.3)),
        ("cosine = 0.9", Gate("cosine", 0.9)),
        ("r2-keys=1", Gate("r2-keys", 1.0)),
        ("none", None),
    ],
)
def test_a_gate_is_read_as_it_is_written(text: str, gate: Gate | None) -> None:
    assert Gate.parse(text) == gate


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "takes a number"),
        ("high", "takes a number, such as 0.5 or probe=0.3, or 'none', not 'high'"),
        ("probe", "takes a number"),
        ("probe=", "takes a number"),
        ("cosine=0.9=1", "looks at 'cosine=0.9'"),
        ("r2=0.5", "looks at 'r2'; one of kl, cosine-gain, cosine, r2-keys, r2-values, probe"),
        ("=0.5", "looks at ''"),
        ("nan", "a gate of nan"),
        ("inf", "a gate of inf"),
        ("cosine=1.5", "a gate of 1.5: attention cosine reaches 1 at most"),
    ],
)
def test_what_is_no_gate_is_a_mistake_that_says_what_one_is(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says.replace("(", r"\(")):
        Gate.parse(text)


def test_the_gain_is_what_the_control_lacks_and_the_mapping_brings() -> None:
    assert cosine_gain(0.9, 0.9) == 0
    assert cosine_gain(1.0, 0.9) == 1
    assert cosine_gain(0.95, 0.9) == pytest.approx(0.5)
    # The same cosine is a high one, or worse than none, as the target's attention is.
    assert cosine_gain(0.92, 0.7) > 0.7
    assert cosine_gain(0.92, 0.93) < 0


def test_a_gate_compares_with_what_was_recorded(make_mapping: MakeMapping) -> None:
    mapping = carrying(
        make_mapping(), **{KL: 0.6, COSINE: 0.9, CONTROL: 0.8, "held-out R² of keys": 0.25}
    )

    found = {name: Gate(name, 0.5).of(mapping).to_dict() | {"on": ...} for name in MEASURES}

    values = {name: each["value"] for name, each in found.items()}
    below = {name: each["below"] for name, each in found.items()}
    assert values["cosine-gain"] == pytest.approx(0.5)
    assert (values["kl"], values["cosine"], values["r2-keys"]) == (0.6, 0.9, 0.25)
    assert values["r2-values"] is values["probe"] is None
    assert (below["cosine"], below["r2-keys"], below["r2-values"]) == (False, True, None)
    assert Gate("cosine", 0.9).of(mapping).below is False  # reached
    assert Gate("cosine", 0.91).of(mapping).below is True


def test_what_it_says_has_both_numbers(make_mapping: MakeMapping) -> None:
    mapping = carrying(make_mapping(), **{COSINE: 0.71})

    low, high = (Gate("cosine", each).of(mapping).said() for each in (0.85, 0.5))

    assert low == "below the gate: attention cosine 0.71 < 0.85 on its fit's held-out text"
    assert high == "above the gate: attention cosine 0.71 ≥ 0.5 on its fit's held-out text"


@pytest.mark.parametrize(
    ("measure", "quality"),
    [
        ("kl", {}),
        ("kl", {KL: "high"}),
        ("kl", {KL: float("nan")}),
        ("kl", {KL: True}),
        ("kl", {f"{KL}, before refining": 0.9}),
        ("cosine-gain", {COSINE: 0.9}),
        ("cosine-gain", {CONTROL: 0.9}),
        ("cosine-gain", {COSINE: 1.0, CONTROL: 1.0}),
    ],
    ids=str,
)
def test_what_is_not_carried_cannot_be_judged_and_that_is_said(
    make_mapping: MakeMapping, measure: Measure, quality: dict[str, Any]
) -> None:
    gate = Gate(measure, 0.4)
    found = gate.of(carrying(make_mapping(), **quality))

    assert found.below is None
    assert found.said().startswith("the gate cannot judge: the mapping does not carry")
    assert "fit it again" in found.to_dict()["why"]
    whole = carrying(make_mapping(), **{KL: 0.9, COSINE: 0.9, CONTROL: 0.5})
    assert gate.of(whole).below is False


def test_what_is_recorded_is_what_diagnose_finds(
    source: LanguageModel, target: LanguageModel, make_mapping: MakeMapping
) -> None:
    mapping = make_mapping()
    windows = list(islice(chunks(builtin("heldout"), target.encode, length=33), 3))

    found = seen(mapping, source, target, [ids[:-1] for ids in windows])
    look = diagnose(
        mapping, source, target, builtin("heldout"), prefix=17, continuation=16, items=3
    )

    assert look.cosine is not None
    assert look.margin is not None
    assert found[COSINE] == pytest.approx(look.cosine.value, abs=1e-4)
    assert found[CONTROL] == pytest.approx(look.cosine.value - look.margin.value, abs=2e-4)
    assert seen(make_mapping(shuffled=False), source, target, [windows[0]]).keys() == {COSINE, KL}
    assert abs(cosine_gain(found[COSINE], found[CONTROL])) < 0.5  # random maps gain nothing


def test_a_fit_records_it_and_so_does_refining(tiny: Callable[..., LanguageModel]) -> None:
    """Of a model to itself all is gained."""
    model = tiny("llama", seed=1, num_hidden_layers=2)

    report = fit(model, model, builtin("fit"), QUICK)
    quick = RefineSettings(windows=2, prefix=16, continuation=8, heldout=1, rank=2)
    refined = refine(report.mapping, model, model, builtin("fit"), quick).mapping

    assert report.mapping.quality[KL] > 0.99
    assert report.mapping.quality[COSINE] > 0.999
    assert report.mapping.quality[CONTROL] < 0.95
    assert report.to_dict()["quality"] == report.mapping.quality
    assert report.seconds["look"] > 0
    assert Gate(threshold=0.95).of(report.mapping).below is False
    assert {KL, COSINE, CONTROL, f"{KL}, before refining"} <= refined.quality.keys()
    assert Gate(threshold=0.95).of(refined).below is False


def test_kl_taken_away_is_what_eval_finds_on_the_same_ids(
    source: LanguageModel, target: LanguageModel, make_mapping: MakeMapping
) -> None:
    """Of random maps next to nothing, or less."""
    mapping = make_mapping()
    windows = list(islice(chunks(builtin("heldout"), target.encode, length=33), 3))

    found = seen(mapping, source, target, [ids[:-1] for ids in windows])
    text = evaluate(
        source,
        target,
        mapping,
        texts=builtin("heldout"),
        conditions=("mapped",),
        prefix=17,
        continuation=16,
        items=3,
    ).text

    assert text is not None
    ours, none = (text.columns[name]["kl_to_own"].mean() for name in ("mapped", "none"))
    assert found[KL] == pytest.approx(1 - ours / none, abs=1e-3)
    assert Gate().judge(found[KL], on="this").below is True
