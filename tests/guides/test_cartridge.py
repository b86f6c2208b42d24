"""A guide goes to peft and back, and peft's model reads it as ours does."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from kvtransfer.errors import ArtifactError, CacheLayoutError
from kvtransfer.guides.cartridge import export_cartridge, read_cartridge
from kvtransfer.guides.pack import GuidePack
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import score

Tiny = Callable[..., LanguageModel]
TEXT = "The tide comes in twice a day, and the harbour empties twice."
LIVE = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture(params=["llama", "qwen3"])
def model(tiny: Tiny, request: pytest.FixtureRequest) -> LanguageModel:
    return tiny(request.param, seed=4)


def test_a_guide_comes_back_from_peft_bit_for_bit(model: LanguageModel, tmp_path: Path) -> None:
    guide = GuidePack.build(model, [("harbour", TEXT)])["harbour"]
    export_cartridge(guide, tmp_path / "adapter")

    found, own = read_cartridge(tmp_path / "adapter", model), guide.restore(model)

    assert torch.equal(found.positions, own.positions)
    for (keys, values), (own_keys, own_values) in zip(found, own, strict=True):
        assert torch.equal(keys, own_keys)
        assert torch.equal(values, own_values)
    assert torch.equal(score(model, LIVE, found), score(model, LIVE, own))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*past_key_values:FutureWarning")
def test_pefts_own_model_reads_it_as_ours_does(model: LanguageModel, tmp_path: Path) -> None:
    guide = GuidePack.build(model, [("harbour", TEXT)])["harbour"]
    expected = score(model, LIVE, guide.restore(model))
    export_cartridge(guide, tmp_path / "adapter")

    adapted = PeftModel.from_pretrained(deepcopy(model.module), str(tmp_path / "adapter"))
    with torch.no_grad():
        found = adapted(input_ids=LIVE, attention_mask=torch.ones_like(LIVE)).logits

    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert (expected - score(model, LIVE)).abs().max() > 0.1  # the guide is heard


def test_what_does_not_fit_is_refused_by_name(tiny: Tiny, tmp_path: Path) -> None:
    model = tiny("llama")
    guide = GuidePack.build(model, [("harbour", TEXT)])["harbour"]
    export_cartridge(guide, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"

    with pytest.raises(CacheLayoutError, match=r"where .* keeps 192 numbers a token"):
        read_cartridge(tmp_path / "adapter", tiny("llama", num_hidden_layers=3))
    with pytest.raises(ArtifactError, match="no adapter at"):
        read_cartridge(tmp_path / "nowhere", model)
    matrix = load_file(path)["prompt_embeddings"]
    matrix[0, 0] = torch.nan
    save_file({"prompt_embeddings": matrix}, path)
    with pytest.raises(CacheLayoutError, match="not all finite"):
        read_cartridge(tmp_path / "adapter", model)
    save_file({"lora_A": matrix}, path)
    with pytest.raises(ArtifactError, match="holds no prompt_embeddings"):
        read_cartridge(tmp_path / "adapter", model)
    path.write_bytes(b"short")
    with pytest.raises(ArtifactError, match="truncated"):
        read_cartridge(tmp_path / "adapter", model)
    with pytest.raises(ArtifactError, match="is not empty"):
        export_cartridge(guide, tmp_path / "adapter")
    with pytest.raises(ArtifactError, match="cannot be written"):
        export_cartridge(guide, "/proc/adapter")
