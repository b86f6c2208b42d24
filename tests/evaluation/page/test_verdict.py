"""The answer follows from the numbers, by the rule that the page states."""

from dataclasses import replace

import numpy as np
import pytest

from kvtransfer.evaluation.gated import Gated
from kvtransfer.evaluation.page.verdict import RULE, Verdict
from kvtransfer.fitting.gate import Gate

from .conftest import NLL, RIGHT, Plain, Turns, guides, report, text

GOOD = dict(NLL, mapped=2.80)
RIGHTS = dict(RIGHT, mapped=0.92)


def signs(verdict: Verdict) -> list[str]:
    return [reason.text for reason in verdict.reasons if reason.sign != "for"]


def test_yes_is_said_where_nothing_speaks_against_it() -> None:
    found = Verdict.of(report(text=text(nll=GOOD), guides=guides(RIGHTS)))

    assert found.answer == "Yes"
    assert not signs(found)
    assert found.sentence == (
        "96\u202f% of the benefit of having read the text comes across; 4\u202f% is lost."
    )
    assert "answers 92\u202f%: 79 points more" in found.also
    assert "1 fewer than if it had read it itself" in found.also


@pytest.mark.parametrize(
    ("nll", "right", "n", "reason"),
    [
        (dict(GOOD, mapped=2.93), RIGHTS, 24, "of the gap from no prefix to its own"),
        (dict(GOOD, source=2.80), RIGHTS, 24, "not shown to be better than staying"),
        (GOOD, dict(RIGHT, mapped=0.6), 24, "as many right answers"),
        (GOOD, dict(RIGHTS, source=0.92), 24, "On guides it is not shown to be better"),
        (GOOD, dict(RIGHTS, unrotated=0.92), 24, "On guides it is not shown to beat unrotated"),
        (GOOD, RIGHTS, 8, "Only 8 text items"),
    ],
)
def test_one_doubt_is_enough_for_care(
    nll: dict[str, float], right: dict[str, float], n: int, reason: str
) -> None:
    found = Verdict.of(report(text=text(n, nll=nll), guides=guides(right)))

    assert found.answer == "With care"
    (only,) = signs(found)
    assert reason in only


def test_a_control_that_is_not_beaten_makes_it_no() -> None:
    found = Verdict.of(report(text=text(nll=dict(GOOD, shuffled=2.8)), guides=guides(RIGHTS)))

    assert found.answer == "No"
    assert "On text it is not shown to beat shuffled." in signs(found)


def test_a_share_of_nothing_is_no_share() -> None:
    found = Verdict.of(report(text=text(nll=dict(NLL, none=2.78, mapped=2.78)), guides=None))

    assert found.answer == "No"
    assert "not shown to help" in found.sentence


@pytest.mark.parametrize(
    ("mapped", "said"), [(3.5, "Nothing comes across"), (2.7, "All of the benefit")]
)
def test_shares_below_none_and_above_all_are_said_in_words(mapped: float, said: str) -> None:
    assert said in Verdict.of(report(text=text(nll=dict(NLL, mapped=mapped)))).sentence


def test_guides_alone_carry_a_verdict() -> None:
    good = Verdict.of(report(text=None, guides=guides(RIGHTS)))
    bad = Verdict.of(report(text=None, guides=guides(dict(RIGHT, mapped=0.13))))

    assert good.answer == "Yes"
    assert "answers 92\u202f%" in good.sentence
    assert bad.answer == "No"
    assert "0 points more than without the guide" in bad.sentence


def test_a_part_that_says_no_and_a_note_are_doubts() -> None:
    whole = report(text=text(nll=GOOD), guides=guides(RIGHTS))

    assert Verdict.of(whole.with_part("turns", Turns())).answer == "Yes"
    assert Verdict.of(whole.with_part("turns", Turns(good=False))).answer == "With care"
    assert Verdict.of(replace(whole, notes=("another's weights",))).answer == "With care"


def test_parts_alone_are_said_and_nothing_at_all_is_not_measured() -> None:
    bare = report(text=None, guides=None)

    assert Verdict.of(bare.with_part("turns", Turns())).sentence.startswith("After 10 turns")
    assert Verdict.of(bare).answer == "Not measured"
    for alone in (Plain(), Turns()):  # however good: the rule asks for controls
        assert Verdict.of(bare.with_part("other", alone)).answer == "With care"


@pytest.mark.parametrize(("threshold", "answer"), [(0.5, "Yes"), (0.99, "With care")])
def test_a_gate_speaks_for_nothing_and_below_it_is_a_doubt(threshold: float, answer: str) -> None:
    gate = Gated(Gate("kl", threshold).judge(0.9, on="this text"))
    bare = report(text=None, guides=None)

    found = Verdict.of(report(text=text(nll=GOOD), guides=guides(RIGHTS)).with_part("gate", gate))

    assert found.answer == answer
    assert ["Below the gate" in each for each in signs(found)] == [True] * (answer != "Yes")
    assert not any("ate" in each.text[:20] for each in found.reasons if each.sign == "for")
    assert Verdict.of(bare.with_part("gate", gate)).answer == "Not measured"


def test_the_rule_names_its_numbers() -> None:
    assert "80\u202f%" in RULE
    assert "20 items" in RULE


def test_one_item_shows_nothing() -> None:
    one = text(1, nll=GOOD)
    assert np.isfinite(one.columns["own"]["nll"]).all()
    assert Verdict.of(report(text=one, guides=None)).answer == "No"
