"""Two models take turns: exact maps never drift, wrong ones do, and reading again repairs that."""

import io
import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy.stats import spearmanr

from kvtransfer.errors import CacheLayoutError, IncompatibleModels, TextError
from kvtransfer.evaluation.drawn import plot
from kvtransfer.evaluation.evaluate import bare
from kvtransfer.evaluation.turns import evaluate_turns
from kvtransfer.evaluation.turns_report import Turns, _rank_correlation
from kvtransfer.fitting.chunks import chunks
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.texts import builtin
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill, score
from kvtransfer.measures.agreement import nll
from kvtransfer.report import Estimate

from .conftest import identity

TURNS, TOKENS, ITEMS = 5, 12, 3


def measured(model: LanguageModel, mapping: KVMapping, *, bound: float = 0.1) -> Turns:
    return evaluate_turns(
        model,
        model,
        mapping,
        mapping,
        texts=builtin("heldout"),
        turns=TURNS,
        tokens=TOKENS,
        items=ITEMS,
        bound=bound,
    )


@pytest.fixture(scope="module")
def itself(model: LanguageModel) -> Turns:
    return measured(model, identity(model))


@pytest.fixture(scope="module")
def wrong(model: LanguageModel) -> Turns:
    mapping = identity(model)
    return measured(model, replace(mapping, layers=mapping.shuffled), bound=0.02)


def test_a_mapping_that_changes_nothing_is_the_models_own_at_every_turn(itself: Turns) -> None:
    for arm in ("whole", "new", "bound"):
        assert itself.columns[arm]["kl_to_own"].max() < 1e-5
        assert itself.columns[arm]["top1_agreement"].min() == 1
        assert np.allclose(itself.columns[arm]["nll"], itself.columns["own"]["nll"], atol=1e-4)
    assert not itself.columns["bound"]["re_prefilled"].any()
    assert itself.columns["none"]["kl_to_own"].min() > 0.001
    assert itself.restored() is None
    assert "no drift passes the bound" in itself.sentence()


def test_a_wrong_one_drifts_and_reading_again_brings_it_back(wrong: Turns) -> None:
    again = wrong.columns["bound"]["re_prefilled"].astype(bool)

    assert wrong.columns["whole"]["kl_to_own"].mean() > 0.02
    assert again.any()
    assert wrong.columns["bound"]["kl_to_own"][again].max() < 1e-5
    restored, before = wrong.restored(), wrong.unrestored()
    assert restored is not None
    assert before is not None
    assert restored.value < 1e-5 < 0.01 < before.value
    assert all(gain.value > 0 for gain in wrong.lower("bound").values())
    assert "a session re-prefills" in wrong.sentence()


def test_each_turn_is_scored_on_all_turns_before_it(itself: Turns, model: LanguageModel) -> None:
    (ids, *_) = chunks(
        builtin("heldout"), model.encode, length=TURNS * TOKENS, opening=model.opening
    )
    for turn in range(1, TURNS):
        start = turn * TOKENS
        live, wanted = ids[start - 1 : start + TOKENS - 1], ids[start : start + TOKENS]
        own = score(model, live[None], prefill(model, ids[None, : start - 1]))[0]
        none = score(model, live[None])[0]
        found = {arm: itself.columns[arm]["nll"][0, turn - 1] for arm in ("own", "none")}
        assert found["own"] == pytest.approx(float(nll(own, wanted).mean()), abs=1e-4)
        assert found["none"] == pytest.approx(float(nll(none, wanted).mean()), abs=1e-4)


def test_it_is_true_where_the_history_is_worth_something_to_both(itself: Turns) -> None:
    columns = {arm: dict(found) for arm, found in itself.columns.items()}
    steps = np.linspace(0, 0.01, ITEMS)[:, None]
    columns["new"]["nll"] = columns["none"]["nll"] - 0.5 + steps
    better = replace(itself, columns=columns, source="one", target="two")
    columns = {arm: dict(found) for arm, found in columns.items()}
    sources_turns = np.arange(TURNS - 1) % 2
    columns["new"]["nll"] = columns["new"]["nll"] + sources_turns
    worse = replace(better, columns=columns)

    assert better
    assert not worse
    assert {name: margin.value > 0 for name, margin in worse.margins("new").items()} == {
        "two": True,
        "one": False,
    }
    assert "do not rely on these mappings" in worse.sentence()


def test_the_document_holds_every_number_and_the_tables_fit(
    wrong: Turns, model: LanguageModel
) -> None:
    report = bare(model, model, None).with_part("turns", wrong)

    document = json.loads(report.to_json())["turns"]

    assert (document["n"], document["turns"], document["turn_tokens"]) == (ITEMS, TURNS, TOKENS)
    assert [row["turn"] for row in document["by_turn"]] == [2, 3, 4, 5]
    for row in document["by_turn"]:
        assert row["conditions"].keys() == {"own", "whole", "new", "bound", "none"}
        for found in row["conditions"].values():
            assert {"nll", "kl_to_own", "top1_agreement"} <= found.keys()
            assert found["nll"].keys() == {"value", "low", "high", "n"}
    items = np.array(document["items"]["new"]["kl_to_own"])
    assert items.shape == (ITEMS, TURNS - 1)
    assert items[:, 0].mean() == pytest.approx(
        document["by_turn"][0]["conditions"]["new"]["kl_to_own"]["value"]
    )
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report)
    text = console.export_text()
    assert "KL to own by turn" in text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 120


def test_the_curve_shows_values_and_intervals_where_they_are() -> None:
    flat = [Estimate(0.5, 0.25, 1.0, 4), Estimate(0.0, None, None, 1)]

    lines = plot({"A": flat}, first=7)

    column = [line[11] if len(line) > 11 else " " for line in lines[:-1]]
    assert column.index("A") == 5  # 0.5 of 1.0, from the top of twelve lines
    assert "".join(column).strip() == "│││││A│││"
    assert lines[-2][14] == "A"
    assert lines[-1].split() == ["turn", "7", "8"]


def test_the_rank_correlation_is_scipys() -> None:
    random = np.random.default_rng(0)
    one = random.normal(size=(6, 4)).round(1)
    other = (one + random.normal(size=(6, 4))).round(1)

    found = _rank_correlation(one, other)

    assert found is not None
    assert found.value == pytest.approx(spearmanr(one.ravel(), other.ravel()).statistic)
    assert _rank_correlation(one, np.zeros_like(one)) is None


def test_what_cannot_be_measured_is_refused_before_anything_is_read(
    model: LanguageModel, sibling: LanguageModel, tiny: Callable[..., LanguageModel]
) -> None:
    mapping, texts = identity(model), builtin("heldout")

    with pytest.raises(IncompatibleModels, match="a mapping each way") as refused:
        evaluate_turns(model, model, mapping, None, texts=texts)
    assert "--back DIR" in str(refused.value.hint)
    with pytest.raises(IncompatibleModels, match="a mapping each way"):
        evaluate_turns(model, model, None, mapping, texts=texts)
    with pytest.raises(IncompatibleModels, match="this mapping goes"):
        evaluate_turns(model, sibling, mapping, mapping, texts=texts)
    odd = replace(model, spec=replace(model.spec, tokenizer="another"))
    with pytest.raises(IncompatibleModels, match="cut or begin text"):
        evaluate_turns(model, odd, mapping, mapping, texts=texts)
    with pytest.raises(ValueError, match="1 turns of 64"):
        evaluate_turns(model, model, mapping, mapping, texts=texts, turns=1)
    with pytest.raises(ValueError, match="bound"):
        evaluate_turns(model, model, mapping, mapping, texts=texts, bound=-1.0)
    with pytest.raises(TextError, match="fewer than one chunk"):
        evaluate_turns(model, model, mapping, mapping, texts=["short"])
    with pytest.raises(CacheLayoutError, match="at most 512"):
        evaluate_turns(model, model, mapping, mapping, texts=texts, turns=20, tokens=32, items=1)


@pytest.mark.parametrize("turns", [2, 3])
def test_few_turns_have_a_report_too(model: LanguageModel, turns: int) -> None:
    mapping = identity(model)
    found = evaluate_turns(
        model, model, mapping, mapping, texts=builtin("heldout"), turns=turns, tokens=8, items=1
    )
    named = replace(found, source="one", target="two")

    assert named.readers == ("two", "one")[: turns - 1]
    assert named.growth("whole") == {}
    assert not found  # one session has no interval
    assert json.dumps(named.to_dict())
    assert named.sentence()
    assert torch.isfinite(torch.tensor(named.columns["whole"]["nll"])).all()
