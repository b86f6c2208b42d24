"""An intervention is a condition: the same evaluator, the prefix edited first."""

import numpy as np
import pytest
import torch

from kvtransfer.errors import SteeringError
from kvtransfer.evaluation.evaluate import evaluate
from kvtransfer.evaluation.report import EvalReport
from kvtransfer.fitting.texts import builtin
from kvtransfer.geometry.cache import KVCache
from kvtransfer.guides.pack import GuidePack
from kvtransfer.hf.model import LanguageModel
from kvtransfer.steering.interventions import Scale
from kvtransfer.steering.vector import CacheVector

from .conftest import CONTINUATION, GUIDES, ITEMS, PREFIX, identity

EDITED = (
    "own+Ablate(both)",
    "own+Scale(1.0)",
    "mapped+Ablate(removed)",
    "mapped+Scale(0.5, values, layers=1)",
    "mapped+half",
)


@pytest.fixture(scope="module")
def report(model: LanguageModel) -> EvalReport:
    return evaluate(
        model,
        model,
        identity(model),
        texts=builtin("heldout"),
        guides=GUIDES,
        conditions=("zeroed", *EDITED),
        bound={"half": Scale(0.5, "values", layers=(1,))},
        prefix=PREFIX,
        continuation=CONTINUATION,
        items=ITEMS,
    )


def test_an_edit_is_measured_on_text_and_on_guides(report: EvalReport) -> None:
    assert report.text is not None and report.guides is not None
    for measured in (report.text.columns, report.guides.right):
        assert set(EDITED) < set(measured)
        assert {"none", "own", "mapped"} < set(measured)


def test_an_edit_is_what_it_says(report: EvalReport) -> None:
    assert report.text is not None
    nll = {name: found["nll"] for name, found in report.text.columns.items()}

    np.testing.assert_array_equal(nll["own+Ablate(both)"], nll["zeroed"])
    np.testing.assert_array_equal(nll["own+Scale(1.0)"], nll["own"])
    np.testing.assert_array_equal(nll["mapped+half"], nll["mapped+Scale(0.5, values, layers=1)"])
    # Removed is the run without it, at other positions, which RoPE does not tell apart.
    np.testing.assert_allclose(nll["mapped+Ablate(removed)"], nll["none"], rtol=1e-4)
    assert abs(nll["mapped+half"] - nll["own"]).max() > 1e-3
    assert abs(nll["own+Ablate(both)"] - nll["none"]).max() > 1e-3


def test_attention_is_not_compared_where_tokens_are_hidden(report: EvalReport) -> None:
    assert report.text is not None
    columns = report.text.columns

    assert "attention_cosine" not in columns["mapped+Ablate(removed)"]
    assert "attention_cosine" in columns["mapped+half"]


def test_an_edit_is_no_rival_mapping(report: EvalReport) -> None:
    assert "the mapping 'mapped+" not in report.sentence()


def test_a_vector_steers_a_transferred_guide_a_pack_and_a_rival_mapping(
    model: LanguageModel,
) -> None:
    depth, (heads, width) = len(model.spec.layers), (model.spec.layers[0].kv_heads, 16)
    random = torch.Generator().manual_seed(0)
    vector = CacheVector(
        keys=tuple(torch.randn(heads, width, generator=random) for _ in range(depth)),
        values=tuple(torch.randn(heads, width, generator=random) for _ in range(depth)),
        spec=model.spec,
        made={},
        provenance={},
    )
    steered = [f"{base}+Steer(v,4.0,tokens=(0,None))" for base in ("mapped", "pack", "other")]
    seen = []

    def watch(cache: KVCache) -> KVCache:
        seen.append(cache.approximate)
        return cache

    report = evaluate(
        model,
        model,
        identity(model),
        guides=GUIDES,
        conditions=["own", *steered, "pack+watch"],
        rivals={"other": identity(model)},
        packs={"pack": GuidePack.build(model, GUIDES)},
        bound={"v": vector, "watch": watch},
    )

    assert report.guides is not None
    right = report.guides.right
    assert set(steered) < set(right)
    np.testing.assert_array_equal(right["pack+watch"], right["own"])
    assert len(seen) == len(GUIDES)
    # Of an identity mapping and a pack of the model's own, steering gives the same.
    np.testing.assert_array_equal(right[steered[0]], right[steered[1]])
    np.testing.assert_array_equal(right[steered[0]], right[steered[2]])
    texts = report.guides.examples[0].texts
    assert texts[steered[0]] != texts["own"]


@pytest.mark.parametrize(
    ("condition", "kind", "words"),
    [
        ("mapped+Twist(1)", SteeringError, "no intervention is called 'Twist'"),
        ("mapped+Scale(0.5, layers=9)", SteeringError, "no layer 9 in a model of 2"),
        ("none+Scale(0.5)", SteeringError, "none has no prefix to edit"),
        ("maped+Scale(0.5)", ValueError, "no condition maped"),
    ],
)
def test_an_edit_of_what_is_not_there_is_a_named_error(
    condition: str, kind: type[Exception], words: str, model: LanguageModel
) -> None:
    with pytest.raises(kind, match=words):
        evaluate(
            model,
            model,
            identity(model),
            texts=builtin("heldout"),
            conditions=(condition,),
            prefix=PREFIX,
            continuation=CONTINUATION,
            items=1,
        )
