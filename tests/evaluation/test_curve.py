"""The curve of a repaired prefix begins at the mapped one and ends at the target's own."""

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from kvtransfer.evaluation.conditions import Pair, Reading, apart
from kvtransfer.evaluation.curve import condition_of
from kvtransfer.evaluation.evaluate import evaluate
from kvtransfer.evaluation.report import EvalReport
from kvtransfer.fitting.affine import Affine
from kvtransfer.fitting.layer_map import LayerMap
from kvtransfer.fitting.texts import builtin
from kvtransfer.hf.model import LanguageModel, wrap
from kvtransfer.hf.run import prefill

from .conftest import GUIDES, identity

SHARES = (1.0, 0.0, 0.25, 0.5, 0.5)


@pytest.fixture(scope="module")
def deep(tiny: Callable[..., LanguageModel]) -> LanguageModel:
    return tiny("llama")


@pytest.fixture(scope="module")
def curved(deep: LanguageModel) -> EvalReport:
    """Of a mapping that forgets a part of every key and value."""
    width = deep.spec.layers[0].kv_heads * deep.spec.layers[0].key_dim
    each = Affine(torch.diag(torch.linspace(0.2, 1.2, width)), torch.zeros(width))
    layers = tuple(LayerMap((index,), each, each) for index in range(4))
    return evaluate(
        deep,
        deep,
        replace(identity(deep), layers=layers),
        texts=builtin("heldout"),
        guides=GUIDES[:1],
        conditions=("none",),
        recompute=SHARES,
        prefix=40,
        continuation=12,
        items=3,
    )


def test_the_curve_goes_from_mapped_to_own(curved: EvalReport) -> None:
    assert curved.text is not None
    columns = curved.text.columns

    assert list(columns) == [
        "none",
        "own",
        "mapped",
        "mapped+25%",
        "mapped+50%",
        "mapped+100%",
    ]
    np.testing.assert_allclose(columns["mapped+100%"]["nll"], columns["own"]["nll"], atol=1e-4)
    np.testing.assert_allclose(columns["mapped+100%"]["kl_to_own"], 0, atol=1e-4)
    off = [columns[condition_of(share)]["kl_to_own"].mean() for share in (0, 0.25, 0.5, 1)]
    assert off == sorted(off, reverse=True)
    assert off[0] > 0.01


def test_the_curve_is_in_the_json_and_in_a_table_and_no_rival_of_the_mapping(
    curved: EvalReport,
) -> None:
    points = json.loads(curved.to_json())["recompute"]
    with (console := Console(width=120)).capture() as shown:
        console.print(curved)

    assert [point["share"] for point in points] == [0.0, 0.25, 0.5, 1.0]
    assert [point["condition"] for point in points][:2] == ["mapped", "mapped+25%"]
    assert points[0]["loss_recovered"]["value"] == 0
    assert points[3]["loss_recovered"]["value"] == pytest.approx(1, abs=1e-3)
    assert set(points[1]) >= {"nll", "kl_to_own", "gap_recovered", "accuracy"}
    assert "a mapped prefix, repaired by the target" in shown.get()
    assert "25 %" in shown.get()
    assert "the mapping 'mapped+25%'" not in curved.sentence()
    assert "mapped+" not in curved.sentence()


@pytest.fixture(scope="module")
def nudged(deep: LanguageModel, tiny: Callable[..., LanguageModel]) -> LanguageModel:
    """A sibling: the same model with other weights near by, as if taught a little more."""
    sibling = tiny("llama")
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in sibling.module.parameters():
            parameter.add_(0.03 * torch.randn(parameter.shape, generator=random))
    return wrap(sibling.module, sibling.tokenizer)


@pytest.mark.parametrize("repair", ["raw", "apart"])
def test_a_siblings_cache_and_a_half_that_was_read_apart_are_repaired_without_a_mapping(
    repair: str, deep: LanguageModel, nudged: LanguageModel
) -> None:
    report = evaluate(
        nudged,
        deep,
        None,
        texts=builtin("heldout"),
        guides=GUIDES[:1],
        conditions=("none",),
        recompute=(0, 0.25, 1),
        repair=repair,
        prefix=40,
        continuation=12,
        items=3,
    )

    assert report.text is not None and report.guides is not None
    columns = report.text.columns
    assert list(columns) == ["none", "own", repair, f"{repair}+25%", f"{repair}+100%"]
    off = [columns[condition_of(share, repair)]["kl_to_own"].mean() for share in (0, 0.25, 1)]
    assert off == sorted(off, reverse=True)
    assert off[0] > 1e-3
    np.testing.assert_allclose(columns[f"{repair}+100%"]["nll"], columns["own"]["nll"], atol=1e-4)
    assert report
    assert report.curve()[2]["loss_recovered"].value == pytest.approx(1, abs=1e-2)
    with (console := Console(width=120)).capture() as shown:
        console.print(report)
    assert f"of {repair}'s loss" in shown.get()
    assert f"of the NLL that {repair} loses" in shown.get().replace("\n", " ").lower().replace(
        "nll", "NLL"
    )


def test_a_half_read_apart_is_read_as_at_the_start_and_put_behind(deep: LanguageModel) -> None:
    ids = deep.encode(next(iter(builtin("heldout"))))[:24]
    reading = Reading.of(Pair(deep, deep, None), ids)

    prefix = apart(reading).prefix

    assert prefix is not None and prefix.approximate is not None
    first, second = prefill(deep, ids[None, :12]), prefill(deep, ids[None, 12:])
    assert torch.equal(prefix.values[3][:, :, :12], first.values[3])
    assert torch.equal(prefix.values[3][:, :, 12:], second.values[3])
    assert prefix.positions[0].tolist() == list(range(24))


def test_what_needs_a_mapping_is_left_out_without_one(deep: LanguageModel) -> None:
    report = evaluate(
        deep, deep, None, texts=builtin("heldout"), prefix=24, continuation=8, items=1
    )

    assert report.text is not None
    assert set(report.text.missing) == {"mapped", "unrotated", "shuffled"}
    assert set(report.text.missing.values()) == {"no mapping was given"}
    assert not report
    assert report.sentence() == "The condition 'mapped' was not measured."


def test_a_prefix_that_is_not_repaired_is_a_mistake(deep: LanguageModel) -> None:
    with pytest.raises(ValueError, match="no prefix of 'own' is repaired"):
        evaluate(deep, deep, None, texts=["x"], recompute=(0.5,), repair="own")


def test_without_shares_there_is_no_curve(itself: EvalReport) -> None:
    document = json.loads(itself.to_json())

    assert "recompute" not in document
    assert not any("+" in name for name in document["text"]["conditions"])


@pytest.mark.parametrize("share", [-0.5, 1.5, float("nan")])
def test_a_share_that_is_none_is_a_mistake(deep: LanguageModel, share: float) -> None:
    with pytest.raises(ValueError, match="lies between 0 and 1"):
        evaluate(deep, deep, identity(deep), texts=["x"], recompute=(share,))


def test_no_mapping_takes_the_name_of_a_share(deep: LanguageModel) -> None:
    rivals = {"mapped+25%": identity(deep)}

    with pytest.raises(ValueError, match=r"mapped\+25% is a condition"):
        evaluate(
            deep, deep, identity(deep), texts=["x"], rivals=rivals, recompute=(0.25,), prefix=8
        )
