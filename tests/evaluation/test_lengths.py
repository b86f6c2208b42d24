"""The same tokens after prefixes of different lengths, each of which is a text of its own."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor
from torch.nn import functional

from kvtransfer.errors import CacheLayoutError, IncompatibleModels, TextError
from kvtransfer.evaluation.conditions import Pair
from kvtransfer.evaluation.evaluate import bare
from kvtransfer.evaluation.lengths import (
    LENGTHS,
    calibrated_on,
    checked_lengths,
    ending,
    evaluate_lengths,
)
from kvtransfer.evaluation.lengths_report import LengthsResult
from kvtransfer.evaluation.rivals import PLAIN, pair_of
from kvtransfer.evaluation.text import TextResult
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.texts import builtin
from kvtransfer.hf.model import LanguageModel

from .conftest import identity

LENGTHS_HERE, SCORED, WINDOWS = (8, 32, 128), 16, 4


def calibrated(mapping: KVMapping, chunk: int) -> KVMapping:
    return replace(mapping, settings={"chunk": chunk})


@pytest.fixture(scope="module")
def pair(model: LanguageModel) -> Pair:
    """``mapped`` is the identity, ``worse`` the control's maps, calibrated on 32 tokens."""
    same = identity(model)
    worse = calibrated(replace(same, layers=same.shuffled), 32)
    return Pair(model, model, same, {"worse": worse})


@pytest.fixture(scope="module")
def result(pair: Pair) -> LengthsResult:
    return evaluate_lengths(
        pair,
        builtin("heldout"),
        (*PLAIN, "worse"),
        lengths=LENGTHS_HERE,
        continuation=SCORED,
        items=WINDOWS,
    )


def windows(model: LanguageModel) -> Tensor:
    """The text cut by hand, with a blank line between documents."""
    first, *others = builtin("heldout")[:40]
    pieces = [first, *(f"\n\n{each}" for each in others)]
    ids = list(chain.from_iterable(model.tokenizer(each)["input_ids"] for each in pieces))
    return torch.tensor(ids)[: WINDOWS * (128 + SCORED)].reshape(WINDOWS, -1)


def plain_nll(model: LanguageModel, ids: Tensor) -> float:
    """NLL of the last tokens in one forward pass of transformers alone."""
    with torch.no_grad():
        logits = model.module(ids[None, :-1]).logits[0, -SCORED:]
    return float(functional.cross_entropy(logits, ids[-SCORED:]))


def test_own_is_one_forward_pass_over_prefix_and_what_follows_at_each_length(
    result: LengthsResult, model: LanguageModel
) -> None:
    for length in LENGTHS_HERE:
        expected = [plain_nll(model, ids[-SCORED - length :]) for ids in windows(model)]
        found = result.texts[length].columns["own"]["nll"]
        np.testing.assert_allclose(found, expected, atol=1e-5)
    # A longer prefix is another text: else the lengths would be one.
    own = [result.texts[length].columns["own"]["nll"] for length in LENGTHS_HERE]
    assert abs(own[0] - own[1]).max() > 1e-2
    assert abs(own[1] - own[2]).max() > 1e-2


def test_a_model_mapped_to_itself_is_itself_at_each_length(result: LengthsResult) -> None:
    for found in result.texts.values():
        for name in ("mapped", "source"):
            own = found.columns["own"]["nll"]
            np.testing.assert_allclose(found.columns[name]["nll"], own, atol=1e-4)
            np.testing.assert_allclose(found.columns[name]["kl_to_own"], 0, atol=1e-5)
        assert found.columns["worse"]["kl_to_own"].mean() > 1e-2


def test_the_floor_is_the_same_at_each_length_since_the_scored_tokens_are(
    result: LengthsResult,
) -> None:
    floors = [found.columns["none"]["nll"] for found in result.texts.values()]

    for floor in floors:
        np.testing.assert_array_equal(floor, floors[0])
    assert len(set(floors[0])) == WINDOWS


@given(
    lengths=st.lists(st.integers(3, 30), min_size=2, max_size=4, unique=True),
    scored=st.integers(1, 9),
    opening=st.lists(st.integers(100, 109), max_size=2),
)
def test_all_lengths_end_in_the_same_tokens_behind_the_opening(
    lengths: list[int], scored: int, opening: list[int]
) -> None:
    begin = torch.tensor(opening, dtype=torch.long)
    window = torch.arange(max(lengths) - len(opening) + scored)

    for length in lengths:
        ids = ending(window, length, scored, begin)
        assert len(ids) == length + scored
        assert ids[: len(opening)].tolist() == opening
        text = ids[len(opening) :]
        assert torch.equal(text, window[len(window) - len(text) :])


def test_beyond_its_calibration_a_mapping_is_compared_with_the_longest_prefix_within(
    result: LengthsResult,
) -> None:
    assert result.calibrated == {"mapped": None, "worse": 32}
    assert [result.beyond("worse", each) for each in LENGTHS_HERE] == [False, False, True]
    assert result.beyond("mapped", 128) is None
    assert result.reference("worse") == 32
    assert result.change("worse", 32) is None
    assert result.change("mapped", 128) is None

    found = result.change("worse", 128)

    def share(length: int) -> float:
        nll = {k: v["nll"].mean() for k, v in result.texts[length].columns.items()}
        return float((nll["none"] - nll["worse"]) / (nll["none"] - nll["own"]))

    def divergence(length: int) -> float:
        return float(result.texts[length].columns["worse"]["kl_to_own"].mean())

    assert found is not None
    gap, kl = found["gap_recovered"], found["kl_to_own"]
    assert gap is not None and kl is not None
    assert gap.value == pytest.approx(share(128) - share(32))
    assert kl.value == pytest.approx(divergence(128) - divergence(32))
    assert kl.n == WINDOWS


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({}, None),
        ({"chunk": 512}, 512),
        ({"chunk": 256, "refine": {"prefix": 384}}, 384),
        ({"chunk": 256, "refine": None}, 256),
    ],
)
def test_a_mapping_says_how_long_the_texts_of_its_fit_were(
    settings: dict[str, object], tokens: int | None, model: LanguageModel
) -> None:
    assert calibrated_on(replace(identity(model), settings=settings)) == tokens


def made(*, mapped: dict[int, float]) -> LengthsResult:
    """By length, the NLL of ``mapped`` between a floor of 2 and a ceiling of 1."""
    spread = np.array([0.0, 0.1, -0.1, 0.05])

    def found(nll: float) -> TextResult:
        nlls = {"none": 2.0 + spread, "own": 1.0 + spread, "mapped": nll + spread[::-1]}
        columns = {name: {"nll": column, "kl_to_own": column - 1} for name, column in nlls.items()}
        return TextResult(columns, {}, 8, 4)

    return LengthsResult(
        texts={length: found(nll) for length, nll in mapped.items()}, calibrated={"mapped": 64}
    )


def test_it_is_true_where_the_mapping_beats_no_prefix_at_every_length() -> None:
    assert made(mapped={64: 1.2, 128: 1.5})
    assert not made(mapped={64: 1.2, 128: 2.3})
    assert not made(mapped={64: 2.3, 128: 1.2})


def test_the_sentence_says_what_is_lost_beyond_the_calibration() -> None:
    said = made(mapped={32: 1.1, 64: 1.2, 256: 1.5}).sentence()

    assert said.startswith("after prefixes of 32 tokens 'mapped' recovers 90%")
    assert "after 256 50%" in said
    assert "beyond the 64 tokens of a text in its calibration, -30 points" in said
    assert said.endswith("against 64 (n = 4)")
    assert "beyond" not in made(mapped={32: 1.1, 64: 1.2}).sentence()


def test_the_report_holds_it(result: LengthsResult, model: LanguageModel) -> None:
    report = bare(model, model, None).with_part("lengths", result)

    document = json.loads(report.to_json())["lengths"]
    with (console := Console(width=120)).capture() as shown:
        console.print(report)

    assert document["n"] == WINDOWS
    assert document["continuation_tokens"] == SCORED
    assert document["calibrated_on"] == {"mapped": None, "worse": 32}
    assert [point["prefix_tokens"] for point in document["points"]] == list(LENGTHS_HERE)
    last = document["points"][-1]
    assert last["beyond_calibration"] == {"mapped": None, "worse": True}
    assert set(last["conditions"]) == {*PLAIN, "worse"}
    for estimates in last["conditions"].values():
        assert estimates["nll"]["n"] == WINDOWS
        assert set(estimates["kl_to_own"]) == {"value", "low", "high", "n"}
    assert set(last["change"]["worse"]) == {"gap_recovered", "kl_to_own"}
    assert last["change"]["mapped"] is None
    assert len(last["items"]["own"]["nll"]) == WINDOWS
    assert "worse *" in shown.get()
    assert "mapped *" not in shown.get()
    assert "of mapped it is not known" in shown.get().replace("\n", " ")


def test_lengths_are_those_that_the_models_have_positions_for(
    pair: Pair, tiny: Callable[..., LanguageModel]
) -> None:
    assert checked_lengths(None, pair, PLAIN, 16) == (64, 128, 256)
    assert checked_lengths((8, 496), pair, PLAIN, 16) == (8, 496)
    with pytest.raises(CacheLayoutError, match=r"of 497 tokens and 16 after it, and .*512"):
        checked_lengths((8, 497), pair, PLAIN, 16)
    short = tiny("llama", num_hidden_layers=1, max_position_embeddings=32)
    with pytest.raises(CacheLayoutError, match=f"a prefix of {LENGTHS[0]} tokens .* at most 32"):
        checked_lengths(None, Pair(short, short, None), PLAIN, 16)
    # A source that does not stand alone reads the prefix only.
    both = Pair(short, pair.target, None)
    assert checked_lengths((32,), both, ("none", "own"), 16) == (32,)
    with pytest.raises(CacheLayoutError, match="reads at most 32"):
        checked_lengths((32,), both, PLAIN, 16)


@pytest.mark.parametrize("lengths", [(), (0, 8), (1,), (-4, 8), (8, 8), (16, 8)])
def test_lengths_that_are_none_are_a_mistake(lengths: Iterable[int], pair: Pair) -> None:
    with pytest.raises(ValueError, match="ascend and begin with at least 2"):
        evaluate_lengths(pair, builtin("heldout"), PLAIN, lengths=lengths)


def test_a_text_shorter_than_the_longest_prefix_and_what_follows_is_refused(pair: Pair) -> None:
    with pytest.raises(TextError, match="fewer than one chunk of 144"):
        evaluate_lengths(pair, ["Too short."], PLAIN, lengths=LENGTHS_HERE, continuation=SCORED)


def test_what_is_no_pair_is_named(model: LanguageModel, sibling: LanguageModel) -> None:
    def of(mapping: KVMapping | None, **rivals: KVMapping) -> object:
        return pair_of(
            sibling,
            model,
            mapping,
            rivals=rivals,
            conditions=PLAIN,
            bound={},
        )

    with pytest.raises(IncompatibleModels, match="mine: this mapping goes"):
        of(None, mine=identity(model))
    with pytest.raises(ValueError, match="no mapping to measure"):
        of(None)
