"""A fingerprint is of the weights: the same wherever they lie, another as soon as they change."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from kvtransfer.hf.fingerprint import fingerprint
from kvtransfer.hf.model import LanguageModel, load


def test_another_seed_has_another(tiny: Callable[..., LanguageModel]) -> None:
    found = {tiny("llama", seed=seed).spec.weights for seed in range(4)}

    assert len(found) == 4


def test_the_same_seed_has_the_same(tiny: Callable[..., LanguageModel]) -> None:
    assert tiny("llama", seed=3).spec.weights == tiny("llama", seed=3).spec.weights


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.norm.weight",
    ],
)
def test_tuning_one_parameter_changes_it(model: LanguageModel, name: str) -> None:
    tuned = deepcopy(model.module)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        weight = tuned.get_parameter(name)
        weight.add_(torch.randn(weight.shape, generator=random), alpha=0.01)

    assert fingerprint(tuned) != fingerprint(model.module)
    assert fingerprint(deepcopy(model.module)) == fingerprint(model.module)


def test_a_merged_low_rank_adapter_changes_it(model: LanguageModel) -> None:
    tuned = deepcopy(model.module)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        weight = tuned.get_parameter("model.layers.1.self_attn.v_proj.weight")
        down = torch.randn(1, weight.shape[1], generator=random)
        weight.add_(torch.randn(weight.shape[0], 1, generator=random) @ down, alpha=0.05)

    assert fingerprint(tuned) != fingerprint(model.module)


def test_saving_and_loading_keeps_it(model: LanguageModel, pristine: Path) -> None:
    assert load(str(pristine)).spec.weights == model.spec.weights


def test_it_is_the_same_in_bfloat16_as_in_float32(model: LanguageModel, pristine: Path) -> None:
    narrow = load(str(pristine), dtype="bfloat16")

    assert narrow.spec.dtype == "bfloat16"
    assert narrow.spec.weights == model.spec.weights


def test_swapping_two_layers_changes_it(model: LanguageModel) -> None:
    swapped = deepcopy(model.module)
    first, second = (swapped.get_submodule(f"model.layers.{i}").state_dict() for i in (0, 1))
    first, second = ({k: v.clone() for k, v in each.items()} for each in (first, second))
    swapped.get_submodule("model.layers.0").load_state_dict(second)
    swapped.get_submodule("model.layers.1").load_state_dict(first)

    assert fingerprint(swapped) != fingerprint(model.module)
