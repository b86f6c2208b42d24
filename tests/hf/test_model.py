"""Models load whole, on a device that can run them, or not at all."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase

from kvtransfer.errors import (
    CacheLayoutError,
    DeviceError,
    IncompatibleModels,
    ModelNotFound,
    UnsupportedModel,
)
from kvtransfer.hf.fits import check_ids
from kvtransfer.hf.model import LanguageModel, load, usable_device, wrap
from kvtransfer.hf.run import prefill, score


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(K_PROJ), f"lack {K_PROJ}"),
        (lambda t: [t.pop(name) for name in list(t) if ".mlp." in name], "and 5 more"),
        (
            lambda t: t.update({K_PROJ: torch.zeros(16, 64)}),
            rf"{K_PROJ} of .* has shape \(16, 64\) in the file, \(32, 64\) by config.json",
        ),
    ],
)
def test_weights_that_do_not_fill_the_model_are_refused_by_name(
    folder: Path, change: Callable[[dict[str, Tensor]], object], says: str
) -> None:
    edit(folder, change)

    with pytest.raises(ModelNotFound, match=says) as caught:
        load(str(folder))

    assert caught.value.hint


def test_weights_that_a_model_has_no_use_for_do_no_harm(folder: Path, model: LanguageModel) -> None:
    edit(folder, lambda tensors: tensors.update(extra=torch.zeros(3)))

    assert load(str(folder)).spec.weights == model.spec.weights


@pytest.mark.parametrize("size", [0, 100, 5_000])
def test_truncated_weights_are_an_error_in_one_line(folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])

    with pytest.raises(ModelNotFound, match=r"weights of .* cannot be loaded") as caught:
        load(str(folder))

    assert "\n" not in caught.value.message
    assert "truncated" in str(caught.value.hint)


def test_missing_weights_are_an_error(folder: Path) -> None:
    (folder / "model.safetensors").unlink()

    with pytest.raises(ModelNotFound, match=r"weights of .* cannot be loaded"):
        load(str(folder))


def test_a_model_runs_in_the_dtype_it_was_saved_in_or_asked_for(pristine: Path) -> None:
    assert load(str(pristine)).dtype == torch.float32
    assert load(str(pristine), dtype="float16").dtype == torch.float16


@pytest.mark.parametrize(
    ("device", "dtype", "says"),
    [
        ("cpu", "float99", "no dtype 'float99'"),
        ("abacus", None, "device 'abacus' cannot compute in float32"),
        ("meta", None, "device 'meta' cannot compute"),
        ("cuda:99", "bfloat16", "device 'cuda:99' cannot compute in bfloat16"),
    ],
)
def test_a_device_or_dtype_that_is_not_there_is_refused(
    device: str, dtype: str | None, says: str
) -> None:
    with pytest.raises(DeviceError, match=says) as caught:
        usable_device(device, dtype)

    assert caught.value.hint


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_cuda_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(DeviceError, match="device 'cuda' cannot compute"):
        load("nobody/nothing", device="cuda")


def test_a_model_without_keys_and_values_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    config = AutoConfig.for_model(
        "mamba", vocab_size=512, hidden_size=16, num_hidden_layers=1, state_size=4
    )

    with pytest.raises(UnsupportedModel, match=r"layer 0 of .* \(mamba\) is linear") as caught:
        wrap(AutoModelForCausalLM.from_config(config), tokenizer)

    assert "kvtransfer check" in str(caught.value.hint)


def test_a_text_is_the_ids_that_decode_to_it(model: LanguageModel) -> None:
    text = "Nothing is added: no beginning, no end. Ünïcode 漢字\n"

    ids = model.encode(text)

    assert model.tokenizer.eos_token_id not in ids.tolist()
    assert model.decode(ids) == text
    assert len(model.encode("")) == 0


def test_a_model_in_training_mode_is_refused(tiny: Callable[..., LanguageModel]) -> None:
    model = tiny("llama", num_hidden_layers=1, attention_dropout=0.5)
    ids = torch.arange(5, 15)[None]
    cache = prefill(model, ids)

    model.module.train()

    for use in (lambda: prefill(model, ids), lambda: score(model, ids, cache)):
        with pytest.raises(IncompatibleModels, match="training mode"):
            use()
    with pytest.raises(UnsupportedModel, match="training mode"):
        wrap(model.module, model.tokenizer)


def test_a_model_that_sees_ahead_is_refused(tiny: Callable[..., LanguageModel]) -> None:
    """Nothing in its config or its rotations says it; two tokens do."""
    model = tiny("llama", num_hidden_layers=2)
    config: Any = model.module.config
    config.is_causal = False

    with pytest.raises(UnsupportedModel, match=r"layer 1 .* when another token follows it"):
        wrap(model.module, model.tokenizer)


def test_adapters_that_change_after_wrapping_are_noticed(
    tiny: Callable[..., LanguageModel],
) -> None:
    plain = tiny("llama", num_hidden_layers=2)
    ids = torch.arange(5, 15)[None]
    config = peft.LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by an older name
        adapted = peft.get_peft_model(plain.module, config).eval()
    model = wrap(adapted, plain.tokenizer)
    cache = prefill(model, ids)

    with adapted.disable_adapter(), pytest.raises(IncompatibleModels, match="other adapters act"):
        score(model, ids, cache)
    with pytest.raises(IncompatibleModels, match="other adapters act"):
        prefill(plain, ids)  # its handle is older than the adapter

    assert score(model, ids, cache).isfinite().all()


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (torch.arange(5), r"shape \(5,\)"),
        (torch.ones(1, 5), "torch.float32"),
        (torch.tensor([[5, 600]]), "knows 512"),
        (torch.tensor([[5, -1]]), "from -1 to 5"),
    ],
    ids=["one sequence", "fractions", "unknown", "negative"],
)
def test_ids_that_are_none_are_refused(model: LanguageModel, ids: Tensor, says: str) -> None:
    with pytest.raises(CacheLayoutError, match=says) as caught:
        check_ids(model, ids)  # which every door goes through

    assert caught.value.hint
