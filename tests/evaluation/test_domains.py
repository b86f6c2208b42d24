"""A matrix of mappings by texts: each is measured as if it were alone, and swaps are paired."""

import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from kvtransfer.errors import TextError
from kvtransfer.evaluation.conditions import Pair
from kvtransfer.evaluation.domains import DomainsResult, evaluate_domains
from kvtransfer.evaluation.evaluate import bare, evaluate
from kvtransfer.evaluation.rivals import PLAIN
from kvtransfer.evaluation.text import TextResult
from kvtransfer.fitting.texts import builtin
from kvtransfer.hf.model import LanguageModel

from .conftest import identity

HELD = builtin("heldout")
TEXTS = {"early": HELD[:80], "late": HELD[80:160]}
HIDDEN, SCORED, ITEMS = 24, 12, 3


@pytest.fixture(scope="module")
def pair(model: LanguageModel) -> Pair:
    """``mapped`` and ``early`` are the identity, ``late`` the control's maps."""
    same = identity(model)
    return Pair(model, model, same, {"early": same, "late": replace(same, layers=same.shuffled)})


@pytest.fixture(scope="module")
def result(pair: Pair) -> DomainsResult:
    return evaluate_domains(
        pair,
        TEXTS,
        (*PLAIN, "early", "late"),
        prefix=HIDDEN,
        continuation=SCORED,
        items=ITEMS,
    )


@pytest.mark.parametrize("text", TEXTS)
def test_each_text_is_measured_as_if_it_were_alone(
    text: str, result: DomainsResult, pair: Pair
) -> None:
    alone = evaluate(
        pair.source,
        pair.target,
        pair.mapping,
        rivals=pair.rivals,
        texts=TEXTS[text],
        conditions=PLAIN,
        prefix=HIDDEN,
        continuation=SCORED,
        items=ITEMS,
        stream=True,
    ).text

    assert alone is not None
    assert set(result.texts[text].columns) == set(alone.columns) == {*PLAIN, "early", "late"}
    for name, found in alone.columns.items():
        np.testing.assert_array_equal(result.texts[text].columns[name]["nll"], found["nll"])
    assert result.mappings == ("mapped", "early", "late")


def test_the_identity_is_own_on_every_text_and_the_texts_differ(result: DomainsResult) -> None:
    for found in result.texts.values():
        for name in ("mapped", "early"):
            own = found.columns["own"]["nll"]
            np.testing.assert_allclose(found.columns[name]["nll"], own, atol=1e-4)
        assert found.columns["late"]["kl_to_own"].mean() > 1e-2
    early, late = (found.columns["own"]["nll"] for found in result.texts.values())
    assert abs(early - late).max() > 1e-2


def test_a_swap_is_against_the_mapping_at_home_on_the_same_items(result: DomainsResult) -> None:
    assert result.swap("early", "early") is None

    found = result.swap("early", "late")

    columns = result.texts["early"].columns
    nll = {name: column["nll"].mean() for name, column in columns.items()}
    gap = nll["none"] - nll["own"]
    expected = (nll["none"] - nll["late"]) / gap - (nll["none"] - nll["early"]) / gap
    assert found is not None and found["gap_recovered"] is not None
    assert found["gap_recovered"].value == pytest.approx(expected)
    assert found["kl_to_own"] is not None
    assert found["kl_to_own"].value == pytest.approx(
        (columns["late"]["kl_to_own"] - columns["early"]["kl_to_own"]).mean()
    )


def made(**mapped: dict[str, float]) -> DomainsResult:
    """By text and mapping, its NLL between a floor of 2 and a ceiling of 1."""
    spread = np.array([0.0, 0.1, -0.1, 0.05])

    def found(of: dict[str, float]) -> TextResult:
        nlls = {"none": 2.0, "own": 1.0} | of
        columns = {
            name: {"nll": nll + spread * nll, "kl_to_own": nll - 1 + spread**2}
            for name, nll in nlls.items()
        }
        return TextResult(columns, {}, 8, 4)

    return DomainsResult(
        texts={text: found(of) for text, of in mapped.items()},
        mappings=tuple(next(iter(mapped.values()))),
    )


def test_it_is_true_where_every_mapping_beats_no_prefix_on_every_text() -> None:
    assert made(a={"mapped": 1.2}, b={"mapped": 1.6})
    assert not made(a={"mapped": 1.2}, b={"mapped": 2.1})
    assert not made(a={"x": 1.2, "y": 2.1})


def test_the_sentence_says_what_swaps_cost_or_where_each_mapping_stands() -> None:
    swapped = made(a={"a": 1.2, "b": 1.5}, b={"a": 1.3, "b": 1.2}).sentence()
    alone = made(a={"mapped": 1.2}, b={"mapped": 1.6}).sentence()

    assert "-10 points" in swapped and "('a' on b, n = 4)" in swapped
    assert "-30 points" in swapped and "('b' on a, n = 4)" in swapped
    assert alone.startswith("'mapped' recovers 80%")
    assert "on a, 40%" in alone


def test_the_report_holds_it(result: DomainsResult, model: LanguageModel) -> None:
    report = bare(model, model, None).with_part("domains", result)

    document = json.loads(report.to_json())["domains"]
    with (console := Console(width=120)).capture() as shown:
        console.print(report)

    assert document["mappings"] == ["mapped", "early", "late"]
    assert (document["prefix_tokens"], document["continuation_tokens"]) == (HIDDEN, SCORED)
    assert set(document["texts"]) == set(TEXTS)
    for text, found in document["texts"].items():
        assert found["n"] == ITEMS
        assert set(found["conditions"]) == {*PLAIN, "early", "late"}
        assert set(found["conditions"]["mapped"]["gap_recovered"]) == {"value", "low", "high", "n"}
        assert found["swap"][text] is None
        assert set(found["swap"]["mapped"]) == {"gap_recovered", "kl_to_own"}
        assert len(found["items"]["late"]["nll"]) == ITEMS
    assert shown.get().count("] *") == 4  # share and KL of the two at home
    assert f"early, n = {ITEMS}" in shown.get()


def test_no_text_and_a_short_text_are_named(pair: Pair) -> None:
    with pytest.raises(ValueError, match="no text to evaluate on"):
        evaluate_domains(pair, {}, PLAIN)
    with pytest.raises(TextError, match="brief: the text holds"):
        evaluate_domains(pair, TEXTS | {"brief": ["Too short."]}, PLAIN, prefix=64)
    with pytest.raises(ValueError, match="at least 2, 1 and 1"):
        evaluate_domains(pair, TEXTS, PLAIN, prefix=1)
