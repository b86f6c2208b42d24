"""Texts read apart and put one after another: what of that is exact, and what is not."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtransfer.errors import RotationError
from kvtransfer.geometry.join import one_after_another
from kvtransfer.guides.concat import concat
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill, score

from .compare import cache_error, is_still, relative_error, snapshot
from .prose import prose
from .ropes import LINEAR, LLAMA3, LONGROPE, YARN

LENGTHS = (9, 7, 6)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("llama", {}),
    "linear": ("llama", {"rope_parameters": LINEAR}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "longrope": ("llama", {"rope_parameters": LONGROPE}),
    "norms": ("qwen3", {}),
    "windows": ("mistral", {"sliding_window": 8}),
    "two thetas": ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 2}),
    "partial": ("gpt_neox", {}),
    "interleaved": ("glm", {}),
    "some without": ("cohere2", {"sliding_window": 8}),
    "chunks": ("llama4_text", {"attention_chunk_size": 8}),
    "alibi": ("bloom", {}),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tiny: Callable[..., LanguageModel]) -> LanguageModel:
    architecture, config = MODELS[request.param]
    return tiny(architecture, **config)


def texts(model: LanguageModel) -> tuple[Tensor, Sequence[Tensor]]:
    """The joint ids, and those of each text."""
    ids = prose(model, sum(LENGTHS))
    return ids, ids.split(LENGTHS, dim=1)


def test_layer_0_is_that_of_a_joint_read_and_no_other_is(model: LanguageModel) -> None:
    ids, parts = texts(model)
    joint = prefill(model, ids)

    found = concat(model, [prefill(model, part) for part in parts])

    assert torch.equal(found.positions, joint.positions)
    assert relative_error(found.keys[0], joint.keys[0]) < 1e-5
    assert relative_error(found.values[0], joint.values[0]) < 1e-5
    for layer in range(1, len(found)):
        assert relative_error(found.values[layer], joint.values[layer]) > 0.01
    assert found.approximate == "pieces 2, 3 of 3 never saw what stands before them"


def test_keys_that_are_not_turned_are_wrong_in_layer_0_already(model: LanguageModel) -> None:
    ids, parts = texts(model)
    pieces = [prefill(model, part) for part in parts]

    error = relative_error(one_after_another(pieces).keys[0], prefill(model, ids).keys[0])

    assert (error > 0.1) is (model.spec.layers[0].rotation is not None)


def test_the_first_piece_and_one_alone_stay_as_they_are(model: LanguageModel) -> None:
    first, second, _ = (prefill(model, part) for part in texts(model)[1])
    before = snapshot(first), snapshot(second)

    found = concat(model, [first, second])

    assert concat(model, [first]) is first
    assert is_still(found.prefix(first.tokens), before[0])
    assert is_still(first, before[0])
    assert is_still(second, before[1])
    assert found.approximate == "the second of 2 pieces never saw what stands before it"


def test_a_text_of_one_layer_is_exact_however_it_was_put_together(
    tiny: Callable[..., LanguageModel],
) -> None:
    """With no layer above the first, there is nothing that another text could have changed."""
    shallow, deep = (tiny("llama", num_hidden_layers=layers) for layers in (1, 2))
    errors = []
    for model in (shallow, deep):
        ids, parts = texts(model)
        live = prose(model, 5, skip=40)
        found = concat(model, [prefill(model, part) for part in parts])
        errors.append(
            relative_error(score(model, live, found), score(model, live, prefill(model, ids)))
        )

    assert errors[0] < 1e-5
    assert errors[1] > 0.01


def test_put_together_twice_is_put_together_once(model: LanguageModel) -> None:
    one, two, three = (prefill(model, part) for part in texts(model)[1])

    nested = concat(model, [concat(model, [one, two]), three])
    flat = concat(model, [one, two, three])

    assert cache_error(nested, flat) < 1e-5
    assert nested.approximate is not None
    assert "the second of 2 pieces never saw what stands before it; " in nested.approximate


@pytest.mark.parametrize("architecture", ["gpt2", "opt", "gpt_neo"])
def test_learned_positions_are_inside_keys_and_values(
    tiny: Callable[..., LanguageModel], architecture: str
) -> None:
    more = {"attention_types": [[["global"], 4]]} if architecture == "gpt_neo" else {}
    model = tiny(architecture, **more)
    pieces = [prefill(model, part) for part in texts(model)[1]]

    with pytest.raises(RotationError, match=r"piece 2 of 3: .* inside keys and values"):
        concat(model, pieces)
    assert concat(model, pieces[:1]) is pieces[0]


def test_no_text_grows_across_the_length_at_which_the_table_changes(
    tiny: Callable[..., LanguageModel],
) -> None:
    model = tiny("llama", rope_parameters=LONGROPE)  # another table beyond 128 tokens
    short, long = prefill(model, prose(model, 100)), prefill(model, prose(model, 150))

    with pytest.raises(RotationError, match=r"piece 2 of 2: .* crosses 128 tokens"):
        concat(model, [short, short])
    with pytest.raises(RotationError, match="another table"):
        concat(model, [short, long])
    assert concat(model, [long, long]).tokens == 300
