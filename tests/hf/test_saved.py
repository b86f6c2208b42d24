"""What is told of a saved model without loading it is what loading it tells."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from kvtransfer.errors import ModelNotFound, UnsupportedModel
from kvtransfer.hf.model import LanguageModel, load
from kvtransfer.hf.saved import saved_spec

Tiny = Callable[..., LanguageModel]


def kept(model: LanguageModel, folder: Path, **how: Any) -> str:
    model.module.save_pretrained(folder, **how)
    model.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("olmo2", {}),
    ],
    ids=["llama", "tied", "qwen2", "qwen3", "olmo2"],
)
@pytest.mark.parametrize("shard", ["5GB", "50KB"])
def test_it_is_the_spec_of_the_loaded_model(
    tiny: Tiny, tmp_path: Path, architecture: str, config: dict[str, Any], dtype: str, shard: str
) -> None:
    name = kept(tiny(architecture, **config), tmp_path, max_shard_size=shard)

    assert len(list(tmp_path.glob("*.safetensors"))) == 1 or shard == "50KB"
    assert saved_spec(name, dtype=dtype) == load(name, dtype=dtype).spec


def test_one_number_in_each_tensor_tells_a_sibling(tiny: Tiny, tmp_path: Path) -> None:
    name = kept(tiny(), tmp_path)
    before = saved_spec(name, dtype="float32")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    # Memory that a file is mapped into must not be what is written to that file.
    changed = {each: tensor.clone() for each, tensor in tensors.items()}
    changed["model.layers.3.mlp.up_proj.weight"] += 0.01
    save_file(changed, file, metadata={"format": "pt"})

    assert saved_spec(name, dtype="float32").weights != before.weights


def test_a_weight_that_is_missing_or_of_another_shape_is_named(tiny: Tiny, tmp_path: Path) -> None:
    name = kept(tiny(), tmp_path)
    file = tmp_path / "model.safetensors"
    sound = {each: tensor.clone() for each, tensor in load_file(file).items()}
    norm = "model.norm.weight"

    save_file({each: held for each, held in sound.items() if each != norm}, file)
    with pytest.raises(UnsupportedModel, match=f"no weight {norm}"):
        saved_spec(name, dtype="float32")
    save_file(sound | {norm: torch.ones(3)}, file)
    with pytest.raises(ModelNotFound, match=rf"{norm} has shape \(3,\) .*\(64,\)"):
        saved_spec(name, dtype="float32")


def test_weights_that_are_saved_under_other_names_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    name = kept(tiny("gpt_neox", head_dim=None), tmp_path)  # its lm_head is called embed_out there

    with pytest.raises(UnsupportedModel, match=r"no weight lm_head\.weight by that name"):
        saved_spec(name, dtype="float32")


def test_files_that_are_broken_or_none_are_said(tiny: Tiny, tmp_path: Path) -> None:
    name = kept(tiny(), tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()

    file.write_bytes(whole[:1000])
    with pytest.raises(ModelNotFound, match="cannot be read"):
        saved_spec(name, dtype="float32")
    file.unlink()
    with pytest.raises(UnsupportedModel, match=r"neither model\.safetensors nor"):
        saved_spec(name, dtype="float32")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": 3}))
    with pytest.raises(ModelNotFound, match="cannot be read"):
        saved_spec(name, dtype="float32")


def test_a_model_of_the_hub_is_the_one_that_was_downloaded(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    here = tmp_path / "models--nobody--tiny"
    model = tiny()
    kept(model, here / "snapshots" / "c0ffee")
    (here / "refs").mkdir()
    (here / "refs" / "main").write_text("c0ffee")

    assert saved_spec("nobody/tiny", dtype="float32").identity == model.spec.identity
    with pytest.raises(ModelNotFound, match="nobody/other was not downloaded"):
        saved_spec("nobody/other", dtype="float32")
