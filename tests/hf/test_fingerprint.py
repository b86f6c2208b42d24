"""A fingerprint is of the weights: the same wherever they lie, another as soon as they change."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from kvtransfer.errors import IncompatibleModels, UnsupportedModel
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.fingerprint import fingerprint
from kvtransfer.hf.model import LanguageModel, load, wrap
from kvtransfer.hf.run import prefill, score

# peft asks transformers by an older name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")


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


def test_other_files_and_shards_of_the_same_weights_keep_it(
    model: LanguageModel, tmp_path: Path
) -> None:
    model.module.save_pretrained(tmp_path, max_shard_size="100KB")
    model.tokenizer.save_pretrained(tmp_path)

    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert load(str(tmp_path)).spec.weights == model.spec.weights


@pytest.mark.parametrize("levels", [255, 15])
def test_rounding_the_weights_to_few_levels_changes_it(model: LanguageModel, levels: int) -> None:
    """A re-quantised sibling: eight or four bits a weight."""
    tuned = deepcopy(model.module)
    with torch.no_grad():
        for weight in tuned.parameters():
            step = 2 * weight.abs().max() / levels
            weight.copy_((weight / step).round() * step)

    assert fingerprint(tuned) != fingerprint(model.module)


def test_numbers_that_are_no_parameters_count_if_they_are_saved(model: LanguageModel) -> None:
    tuned = deepcopy(model.module)
    inside = tuned.get_submodule("model.norm")

    inside.register_buffer("scratch", torch.ones(3), persistent=False)
    assert fingerprint(tuned) == fingerprint(model.module)

    inside.register_buffer("packed", torch.arange(6, dtype=torch.int8), persistent=True)
    first = fingerprint(tuned)
    assert first != fingerprint(model.module)
    inside.get_buffer("packed").add_(1)
    assert fingerprint(tuned) != first


@pytest.fixture
def adapted(model: LanguageModel) -> Any:
    """The same weights under a peft model with a low-rank adapter that does something."""
    config = peft.LoraConfig(r=2, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    return peft.get_peft_model(deepcopy(model.module), config).eval()


def test_an_active_adapter_is_seen_and_a_sleeping_one_is_not(
    model: LanguageModel, adapted: Any
) -> None:
    awake = wrap(adapted, model.tokenizer)

    with adapted.disable_adapter():
        asleep = wrap(adapted, model.tokenizer)

    assert awake.spec.weights != model.spec.weights
    assert asleep.spec.weights == model.spec.weights


def test_another_adapter_or_another_strength_is_seen(adapted: Any) -> None:
    first = fingerprint(adapted.get_base_model())
    for layer in adapted.modules():
        if hasattr(layer, "lora_A"):
            layer.scaling["default"] *= 2
    stronger = fingerprint(adapted.get_base_model())
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.mul_(1.5)

    assert len({first, stronger, fingerprint(adapted.get_base_model())}) == 3


def test_a_merged_adapter_is_seen_in_the_weights(model: LanguageModel, adapted: Any) -> None:
    awake = wrap(adapted, model.tokenizer)
    ids = torch.arange(5, 25)[None]
    cache = prefill(awake, ids)

    merged = wrap(adapted.merge_and_unload(), model.tokenizer)

    assert merged.spec.weights not in (model.spec.weights, awake.spec.weights)
    torch.testing.assert_close(prefill(merged, ids).keys[1], cache.keys[1], atol=1e-4, rtol=1e-4)
    with pytest.raises(IncompatibleModels):
        read_on(model, cache)


def read_on(model: LanguageModel, cache: KVCache) -> None:
    score(model, torch.arange(3)[None], cache)


def test_an_adapter_that_puts_tokens_before_the_text_is_refused(model: LanguageModel) -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    prompted = peft.get_peft_model(deepcopy(model.module), config)

    with pytest.raises(UnsupportedModel, match="puts tokens of its own before every text"):
        wrap(prompted, model.tokenizer)
