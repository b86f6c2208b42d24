"""The report says the same in JSON, in tables and in a sentence."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from kvtransfer.errors import ArtifactError
from kvtransfer.evaluation.conditions import USUAL
from kvtransfer.evaluation.guide_items import GuideResult
from kvtransfer.evaluation.report import EvalReport
from kvtransfer.evaluation.text import TextResult
from kvtransfer.measures.intervals import Column
from kvtransfer.report import Provenance, write_report

TEXT_METRICS = {
    "nll",
    "perplexity",
    "kl_to_own",
    "top1_agreement",
    "attention_cosine",
    "retention",
    "gap_recovered",
}


def is_estimate(value: Any) -> bool:
    return value is None or set(value) == {"value", "low", "high", "n"}


def test_the_json_shape_is_the_one_that_scripts_rely_on(itself: EvalReport) -> None:
    document = json.loads(itself.to_json())

    assert set(document) >= {"text", "guides", "provenance"}
    assert document["text"]["n"] == 6
    assert document["guides"]["n"] == 4
    for part, metrics in (("text", TEXT_METRICS), ("guides", {"accuracy", "gap_recovered"})):
        conditions = document[part]["conditions"]
        assert set(conditions) == set(USUAL)
        for name, found in conditions.items():
            assert set(found) >= metrics
            assert all(map(is_estimate, found.values())), name
    assert document["provenance"]["seed"]


def test_items_are_kept_so_that_every_number_can_be_had_again(itself: EvalReport) -> None:
    text = json.loads(itself.to_json())["text"]

    for name, found in text["conditions"].items():
        items = np.array(text["items"][name]["nll"])
        assert len(items) == text["n"]
        assert found["nll"]["value"] == pytest.approx(items.mean())
        assert found["perplexity"]["value"] == pytest.approx(math.exp(items.mean()))
        assert found["nll"]["low"] <= found["nll"]["value"] <= found["nll"]["high"]


def test_a_part_that_was_not_measured_is_not_in_the_json() -> None:
    document = made(text=True, guides=False).to_dict()

    assert "guides" not in document
    assert "text" in document


def column(*numbers: float) -> Column:
    return np.array(numbers, dtype=np.float64)


def made(
    *,
    text: bool,
    guides: bool,
    mapped: float = 1.2,
    control: float = 2.0,
    own: float = 1.0,
    floor: float = 2.0,
) -> EvalReport:
    """A report from given numbers: NLL a condition, with a little spread over four items."""
    spread = column(0.0, 0.1, -0.1, 0.05)
    nlls = {"none": floor, "own": own, "mapped": mapped, "zeroed": control}
    return EvalReport(
        source="small",
        target="large",
        text=TextResult({name: {"nll": nll + spread} for name, nll in nlls.items()}, {}, 8, 4)
        if text
        else None,
        guides=GuideResult(
            {
                "none": column(0, 0, 0, 1),
                "own": column(1, 1, 1, 1),
                "mapped": column(1, 1, 0, 1) if mapped < floor else column(0, 0, 0, 1),
            },
            column(0.25, 0.25, 0.25, 0.25),
            (),
            {},
        )
        if guides
        else None,
        provenance=Provenance.here(seed=0),
    )


def test_a_gap_is_recovered_by_the_share_of_nll_won_back() -> None:
    report = made(text=True, guides=True)
    assert report.text is not None
    assert report.guides is not None

    text, guides = report.text.estimates("mapped"), report.guides.estimates("mapped")

    for found, expected in (
        (text["gap_recovered"], 0.8),
        (text["retention"], math.exp(-0.2)),
        (guides["accuracy"], 0.75),
        (guides["gap_recovered"], 2 / 3),
        (guides["retention"], 0.75),
    ):
        assert found is not None
        assert found.value == pytest.approx(expected)


def test_a_report_is_true_where_every_control_is_beaten() -> None:
    assert made(text=True, guides=False)
    assert not made(text=True, guides=False, control=1.2)
    assert not made(text=True, guides=False, mapped=2.5)
    assert made(text=False, guides=True)
    assert not made(text=False, guides=True, mapped=2.5)


def test_where_the_prefix_is_worth_nothing_no_share_of_it_is_given() -> None:
    report = made(text=True, guides=False, floor=1.0)
    assert report.text is not None

    assert report.text.estimates("mapped")["gap_recovered"] is None
    json.loads(report.to_json())
    assert "brings no measurable share across" in report.sentence()


def test_the_sentence_says_the_shares_and_doubts_where_it_must() -> None:
    good, bad = made(text=True, guides=True), made(text=True, guides=True, control=1.2)

    assert "brings 80%" in good.sentence()
    assert "answers 75% of the questions" in good.sentence()
    assert "do not rely" not in good.sentence()
    assert "do not rely" in bad.sentence()


def test_tables_show_every_condition_and_the_number_of_items(itself: EvalReport) -> None:
    console = Console(width=160)
    with console.capture() as captured:
        console.print(itself)

    text = captured.get()
    for name in USUAL:
        assert text.count(name) >= 2
    assert "n = 6 items" in text
    assert "n = 4 items" in text
    assert "guessing gives 33%" in text


def test_a_report_is_written_as_json_and_as_text_and_nothing_else(
    itself: EvalReport, tmp_path: Path
) -> None:
    write_report(itself, tmp_path / "deep" / "out")

    files = sorted(path.name for path in (tmp_path / "deep" / "out").iterdir())
    assert files == ["report.json", "report.txt"]
    assert json.loads((tmp_path / "deep" / "out" / "report.json").read_text()) == itself.to_dict()
    assert "gap recovered" in (tmp_path / "deep" / "out" / "report.txt").read_text()


def test_a_place_that_cannot_be_written_is_an_error(itself: EvalReport, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")

    with pytest.raises(ArtifactError, match="cannot be written"):
        write_report(itself, tmp_path / "file")

    assert (tmp_path / "file").read_text() == "mine"
