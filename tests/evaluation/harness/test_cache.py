"""Answers of one mapping are never given for another, though lm-eval's key names none."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.model import CachingLM

from kvtransfer.evaluation.harness.lm import KVTransferLM
from kvtransfer.fitting.affine import Affine
from kvtransfer.fitting.digest import digest
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.hf.model import LanguageModel

from ..conftest import identity
from .conftest import CONTEXT, asked, forwards

PAIRS = ((CONTEXT, " Marlow"), (CONTEXT, " Quennell"))
REQUESTS = {
    "loglikelihood": [asked("loglikelihood", *pair) for pair in PAIRS],
    "loglikelihood_rolling": [asked("loglikelihood_rolling", CONTEXT)],
    "generate_until": [asked("generate_until", CONTEXT, {"until": ["\n"], "max_gen_toks": 3})],
}


def nudged(mapping: KVMapping) -> KVMapping:
    """With one number of one map changed."""
    first = mapping.layers[0]
    assert isinstance(first.values, Affine)
    weight = first.values.weight.clone()
    weight[0, 0] += 0.5
    layer = replace(first, values=replace(first.values, weight=weight))
    return replace(mapping, layers=(layer, *mapping.layers[1:]))


@pytest.mark.parametrize("kind", REQUESTS)
def test_a_database_gives_back_what_was_asked_of_the_same_condition_alone(
    model: LanguageModel, tmp_path: Path, kind: str
) -> None:
    mapping = identity(model)

    def answered(mapping: KVMapping, condition: str) -> tuple[Any, int]:
        caching = CachingLM(
            KVTransferLM(model, model, mapping, condition), str(tmp_path / "answers.db")
        )
        with forwards(model) as read:
            found = getattr(caching, kind)(REQUESTS[kind])
        caching.dbdict.close()
        return found, len(read)

    first, read = answered(mapping, "mapped")
    assert read
    assert answered(mapping, "mapped") == (first, 0)
    for other, condition in ((nudged(mapping), "mapped"), (mapping, "none"), (mapping, "own")):
        _, read = answered(other, condition)
        assert read
    assert answered(mapping, "mapped") == (first, 0)


def test_what_answers_depend_on_is_told_apart_and_what_they_do_not_is_not(
    model: LanguageModel,
) -> None:
    mapping, same = identity(model), identity(model)
    assert digest(same) == digest(mapping) != digest(nudged(mapping))

    one = KVTransferLM(model, model, mapping).identity
    assert KVTransferLM(model, model, same, batch_size=5).identity == one
    assert KVTransferLM(model, model, mapping, max_length=64).identity != one
    assert KVTransferLM(model, model, mapping, add_bos_token=True).identity != one
    wider = replace(model, module=copy.deepcopy(model.module).bfloat16())
    assert wider.spec.identity == model.spec.identity
    assert KVTransferLM(wider, wider, mapping).identity != one
