"""The curve of a repaired prefix begins at the mapped one and ends at the target's own."""

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from kvtransfer.evaluation.curve import condition_of
from kvtransfer.evaluation.evaluate import evaluate
from kvtransfer.evaluation.report import EvalReport
from kvtransfer.fitting.affine import Affine
from kvtransfer.fitting.layer_map import LayerMap
from kvtransfer.fitting.texts import builtin
from kvtransfer.hf.model import LanguageModel

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
