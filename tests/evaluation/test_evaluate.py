"""An evaluation measures what a plain run of the model measures, and refuses what means nothing."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kvtransfer.errors import (
    ArtifactError,
    CacheLayoutError,
    IncompatibleModels,
    SeamError,
    TextError,
)
from kvtransfer.evaluation.conditions import USUAL
from kvtransfer.evaluation.evaluate import evaluate
from kvtransfer.evaluation.report import EvalReport
from kvtransfer.evaluation.text import TextResult
from kvtransfer.fitting.chunks import chunks
from kvtransfer.fitting.fit import fit
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.texts import builtin
from kvtransfer.guides.guide import Choice, Guide
from kvtransfer.guides.pack import GuidePack
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import generate, score

from .conftest import CONTINUATION, GUIDES, ITEMS, PREFIX, identity


def sequences(model: LanguageModel) -> list[Tensor]:
    cut = chunks(builtin("heldout"), model.encode, length=PREFIX + CONTINUATION)
    return [next(cut) for _ in range(ITEMS)]


def plain_nll(model: LanguageModel, ids: Tensor, *, skip: int = 0) -> float:
    """NLL of the continuation in one forward pass over everything from ``skip`` on, no cache."""
    with torch.no_grad():
        logits = model.module(ids[None, skip:-1]).logits[0, PREFIX - 1 - skip :]
    return float(functional.cross_entropy(logits, ids[PREFIX:]))


def text_of(report: EvalReport) -> TextResult:
    assert report.text is not None
    return report.text


def test_own_is_what_one_forward_pass_over_the_whole_text_gives(
    itself: EvalReport, model: LanguageModel
) -> None:
    expected = [plain_nll(model, ids) for ids in sequences(model)]

    np.testing.assert_allclose(text_of(itself).columns["own"]["nll"], expected, rtol=1e-4)


def test_none_is_what_a_forward_pass_without_the_prefix_gives(
    itself: EvalReport, model: LanguageModel
) -> None:
    expected = [plain_nll(model, ids, skip=PREFIX - 1) for ids in sequences(model)]

    np.testing.assert_allclose(text_of(itself).columns["none"]["nll"], expected, rtol=1e-4)


def test_a_model_mapped_to_itself_is_itself(itself: EvalReport) -> None:
    columns = text_of(itself).columns
    for name in ("mapped", "raw", "source"):
        np.testing.assert_allclose(columns[name]["nll"], columns["own"]["nll"], rtol=1e-4)
        np.testing.assert_allclose(columns[name]["kl_to_own"], 0, atol=1e-5)
        assert columns[name]["top1_agreement"].mean() == 1
    for name in ("mapped", "raw"):
        np.testing.assert_allclose(columns[name]["attention_cosine"], 1, atol=1e-5)

    estimates = text_of(itself).estimates("mapped")
    for metric in ("gap_recovered", "retention"):
        found = estimates[metric]
        assert found is not None
        assert found.value == pytest.approx(1.0, abs=1e-3)


def test_what_should_not_work_does_not(itself: EvalReport) -> None:
    columns = text_of(itself).columns
    for name in ("none", "zeroed", "unrotated", "shuffled"):
        assert columns[name]["kl_to_own"].mean() > 0.05
    for name in ("zeroed", "unrotated", "shuffled"):
        assert columns[name]["attention_cosine"].mean() < 0.98


def test_margins_are_paired_differences_to_each_control(itself: EvalReport) -> None:
    columns, margins = text_of(itself).columns, text_of(itself).margins()

    assert set(margins) == {"none", "raw", "zeroed", "unrotated", "shuffled"}
    for name, margin in margins.items():
        expected = (columns[name]["nll"] - columns["mapped"]["nll"]).mean()
        assert margin.value == pytest.approx(expected, abs=1e-9)
    assert not itself  # raw is as good here: a mapping that changes nothing beats nothing


def brute_force(model: LanguageModel, guide: str, item: Choice) -> int:
    """The choice with the best mean log-likelihood a token, in whole forward passes."""
    scores = []
    prompt = model.encode(guide + item.prompt)
    for choice in item.choices:
        ids = model.encode(guide + item.prompt + choice)
        start = next(
            (i for i, (a, b) in enumerate(zip(prompt, ids, strict=False)) if a != b), len(prompt)
        )
        with torch.no_grad():
            logits = model.module(ids[None]).logits[0, start - 1 : -1]
        scores.append(-float(functional.cross_entropy(logits, ids[start:])))
    return int(np.argmax(scores))


def test_a_choice_is_the_likeliest_ending_of_the_whole_text(
    itself: EvalReport, model: LanguageModel
) -> None:
    assert itself.guides is not None
    found = {name: column.tolist() for name, column in itself.guides.right.items()}
    choices = [
        (guide, item) for guide in GUIDES for item in guide.items if isinstance(item, Choice)
    ]
    own = [float(brute_force(model, guide.text, item) == item.answer) for guide, item in choices]
    without = [float(brute_force(model, "", item) == item.answer) for _, item in choices]

    where = [
        i for i, each in enumerate(i for g in GUIDES for i in g.items) if isinstance(each, Choice)
    ]
    assert [found["own"][i] for i in where] == own
    assert [found["none"][i] for i in where] == without
    assert found["mapped"] == found["own"]


def test_a_free_answer_is_what_the_model_writes_after_the_whole_text(
    itself: EvalReport, model: LanguageModel
) -> None:
    assert itself.guides is not None
    (example,) = itself.guides.examples
    whole = model.encode(GUIDES[0].text + example.prompt)

    tokens = torch.tensor(list(generate(model, whole, max_new_tokens=12)), dtype=torch.long)

    expected = model.decode(tokens).strip().split("\n")[0]
    assert example.texts["own"] == expected
    assert example.texts["mapped"] == expected


def test_accuracy_is_read_against_guessing(itself: EvalReport) -> None:
    assert itself.guides is not None
    assert itself.guides.n == 4
    assert itself.guides.chance.tolist() == [1 / 3, 1 / 2, 0.0, 1 / 2]


def test_a_pack_of_the_target_answers_as_its_own_caches_do(
    model: LanguageModel, sibling: LanguageModel, tmp_path: Path
) -> None:
    GuidePack.build(model, GUIDES).save_pretrained(tmp_path / "own")
    own = GuidePack.from_pretrained(tmp_path / "own")
    halved = GuidePack(
        maker=own.maker,
        guides={**own.guides, "bell": GuidePack.build(model, [("bell", "The pier.")])["bell"]},
        provenance={},
    )

    report = evaluate(
        model, model, identity(model), guides=GUIDES, conditions=("mapped",), packs={"pack": own}
    )

    assert report.guides is not None
    right = report.guides.right
    assert (right["pack"] == right["own"]).all()
    assert (right["own"] != right["none"]).any()
    texts = [example.texts for example in report.guides.examples]
    assert [each["pack"] for each in texts] == [each["own"] for each in texts]
    assert "pack" in report.to_json()
    with pytest.raises(SeamError, match="other ids of 'bell'"):
        evaluate(model, model, identity(model), guides=GUIDES, packs={"pack": halved})
    with pytest.raises(IncompatibleModels):
        evaluate(
            model,
            model,
            identity(model),
            guides=GUIDES,
            packs={"pack": GuidePack.build(sibling, GUIDES)},
        )
    with pytest.raises(ArtifactError, match="no guide 'bell'"):
        evaluate(
            model,
            model,
            identity(model),
            guides=GUIDES,
            packs={"pack": GuidePack.build(model, GUIDES[:1])},
        )
    with pytest.raises(ValueError, match="own is a condition"):
        evaluate(model, model, identity(model), guides=GUIDES, packs={"own": own})


@pytest.fixture(scope="module")
def across(model: LanguageModel, sibling: LanguageModel) -> EvalReport:
    """A fitted mapping between two models of different shapes."""
    settings = FitSettings(tokens=1_024, chunk=64, layers=1, strength=1e-3)
    fitted = fit(model, sibling, builtin("fit"), settings)
    return evaluate(
        model,
        sibling,
        fitted.mapping,
        texts=builtin("heldout"),
        prefix=PREFIX,
        continuation=CONTINUATION,
        items=2,
    )


def test_a_condition_that_a_pair_does_not_allow_is_left_out_with_the_reason(
    across: EvalReport,
) -> None:
    result = text_of(across)

    assert set(result.missing) == {"raw"}
    assert "heads" in result.missing["raw"]
    assert set(result.columns) == set(USUAL) - {"raw"}


def test_the_source_alone_is_measured_on_the_source(
    across: EvalReport, model: LanguageModel
) -> None:
    expected = [plain_nll(model, ids) for ids in sequences(model)[:2]]

    np.testing.assert_allclose(text_of(across).columns["source"]["nll"], expected, rtol=1e-4)


def test_floor_and_ceiling_are_always_measured(model: LanguageModel) -> None:
    report = evaluate(
        model,
        model,
        identity(model),
        texts=builtin("heldout"),
        conditions=["mapped"],
        prefix=8,
        continuation=4,
        items=1,
    )

    assert list(text_of(report).columns) == ["none", "own", "mapped"]
    assert report.guides is None
    estimate = text_of(report).estimates("mapped")["nll"]
    assert estimate is not None
    assert (estimate.low, estimate.high, estimate.n) == (None, None, 1)


def test_an_unknown_condition_is_a_mistake_that_names_those_there_are(
    model: LanguageModel,
) -> None:
    with pytest.raises(ValueError, match="no condition magic; there are none, own, mapped"):
        evaluate(model, model, identity(model), texts=["x"], conditions=["own", "magic"])


@pytest.mark.parametrize(
    "size", [{"prefix": 1}, {"continuation": 0}, {"items": 0}, {"prefix": -4}], ids=str
)
def test_sizes_that_measure_nothing_are_a_mistake(
    model: LanguageModel, size: dict[str, int]
) -> None:
    with pytest.raises(ValueError, match="are needed"):
        evaluate(model, model, identity(model), texts=builtin("heldout"), **size)  # type: ignore[arg-type]


def test_a_text_shorter_than_an_item_is_refused_with_both_numbers(model: LanguageModel) -> None:
    with pytest.raises(TextError, match=r"holds \d+ tokens, fewer than one chunk of 32") as caught:
        evaluate(model, model, identity(model), texts=["Too short."], prefix=16, continuation=16)

    assert caught.value.hint


def test_no_text_and_no_guides_are_refused(model: LanguageModel) -> None:
    with pytest.raises(TextError):
        evaluate(model, model, identity(model), texts=[])
    with pytest.raises(TextError, match="no guides"):
        evaluate(model, model, identity(model), guides=[])
    with pytest.raises(ValueError, match="nothing to evaluate"):
        evaluate(model, model, identity(model))


def test_a_mapping_for_another_pair_is_refused_before_anything_runs(
    model: LanguageModel, sibling: LanguageModel, tiny: Callable[..., LanguageModel]
) -> None:
    there = replace(identity(model), target=sibling.spec)
    other = tiny("llama", num_hidden_layers=2, seed=8)

    with pytest.raises(IncompatibleModels) as reverse:
        evaluate(sibling, model, there, texts=["x"])
    with pytest.raises(IncompatibleModels) as foreign:
        evaluate(model, other, there, texts=["x"])

    assert "one direction" in str(reverse.value.hint)
    assert "kvtransfer fit" in str(foreign.value.hint)


def test_progress_is_told_once_an_item(model: LanguageModel) -> None:
    told: list[str] = []

    evaluate(
        model,
        model,
        identity(model),
        texts=builtin("heldout"),
        guides=GUIDES[1:],
        conditions=[],
        prefix=8,
        continuation=4,
        items=3,
        progress=told.append,
    )

    assert told == ["text"] * 3 + ["guides"]


def test_a_guide_longer_than_the_model_can_read_is_refused(
    tiny: Callable[..., LanguageModel],
) -> None:
    short = tiny("llama", num_hidden_layers=1, max_position_embeddings=16)
    long = Guide("long", "word " * 40, (Choice(" a", (" b", " c"), 0),))

    with pytest.raises(CacheLayoutError, match="at most 16"):
        evaluate(short, short, identity(short), guides=[long])
    assert score(short, torch.arange(4)[None]).shape[1] == 4
