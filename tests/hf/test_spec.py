"""What a config says of a cache: of many architectures, without any weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    T5Config,
)
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING

from kvtransfer.errors import ModelNotFound, UnsupportedModel
from kvtransfer.geometry.spec import Kind, LayerSpec, ModelSpec
from kvtransfer.hf.layers import KINDS
from kvtransfer.hf.model import LanguageModel, load, wrap
from kvtransfer.hf.run import prefill
from kvtransfer.hf.spec import read_spec, spec_of, tokenizer_digest


def described(architecture: str, **config: Any) -> ModelSpec:
    return spec_of(AutoConfig.for_model(architecture, **config), name=architecture)


def kinds(spec: ModelSpec) -> list[str]:
    return [layer.kind for layer in spec.layers]


def rotated(layer: LayerSpec) -> tuple[str, float | None, int, str] | None:
    turn = layer.rotation
    return None if turn is None else (turn.type, turn.theta, turn.rotary_dim, turn.pairing)


def test_llama() -> None:
    spec = described(
        "llama",
        num_hidden_layers=3,
        num_key_value_heads=8,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )

    assert kinds(spec) == ["full"] * 3
    layer = spec.layers[0]
    assert (layer.kv_heads, layer.key_dim, layer.value_dim, layer.window) == (8, 128, 128, None)
    assert rotated(layer) == ("llama3", 500_000.0, 128, "half")
    assert layer.rotation is not None
    assert dict(layer.rotation.scaling)["factor"] == 8.0
    assert (spec.positions, spec.architecture) == ("rotary", "llama")


def test_qwen3_has_heads_wider_than_its_hidden_size_says() -> None:
    spec = described("qwen3", hidden_size=1024, num_attention_heads=16, num_key_value_heads=8)

    assert (spec.layers[0].kv_heads, spec.layers[0].key_dim) == (8, 128)
    assert rotated(spec.layers[0]) == ("default", 10_000.0, 128, "half")


def test_gemma3_has_two_kinds_of_layers_with_a_theta_each() -> None:
    spec = described("gemma3_text", sliding_window=512)

    assert kinds(spec)[:7] == ["sliding"] * 5 + ["full", "sliding"]
    assert {(layer.kind, layer.window) for layer in spec.layers} == {
        ("sliding", 512),
        ("full", None),
    }
    assert rotated(spec.layers[0]) == ("default", 10_000.0, 256, "half")
    assert rotated(spec.layers[5]) == ("default", 1_000_000.0, 256, "half")


@pytest.mark.parametrize(("window", "kind"), [(4096, "sliding"), (None, "full")])
def test_mistral_slides_only_where_it_has_a_window(window: int | None, kind: str) -> None:
    spec = described("mistral", sliding_window=window)

    assert set(kinds(spec)) == {kind}
    assert spec.layers[0].window == window
    assert spec.layers[0].kv_heads == 8


def test_qwen2_slides_only_where_it_is_told_to() -> None:
    assert set(kinds(described("qwen2", sliding_window=4096))) == {"full"}


@pytest.mark.parametrize(("architecture", "scheme"), [("gpt2", "learned"), ("bloom", "alibi")])
def test_gpt2_and_bloom_put_no_position_into_a_rotation(architecture: str, scheme: str) -> None:
    spec = described(architecture)

    assert spec.positions == scheme
    assert {layer.rotation for layer in spec.layers} == {None}
    assert set(kinds(spec)) == {"full"}


def test_deepseek_v3_keeps_latents() -> None:
    spec = described("deepseek_v3")

    assert set(kinds(spec)) == {"latent"}
    assert not spec.layers[0].has_kv
    assert spec.numbers_per_token == 0


@pytest.mark.parametrize("architecture", ["mamba", "mamba2", "rwkv"])
def test_mamba_keeps_a_state(architecture: str) -> None:
    assert set(kinds(described(architecture))) == {"linear"}


def test_qwen3_next_is_a_hybrid() -> None:
    assert kinds(described("qwen3_next"))[:4] == ["linear", "linear", "linear", "full"]


def test_smollm3_leaves_every_fourth_layer_without_rope() -> None:
    spec = described("smollm3", num_hidden_layers=8)

    assert [layer.rotation is None for layer in spec.layers] == [False, False, False, True] * 2
    assert rotated(spec.layers[0]) == ("default", 2_000_000.0, 128, "half")
    assert spec.positions == "rotary"


def test_cohere2_rotates_interleaved_pairs_and_only_where_it_slides() -> None:
    spec = described("cohere2")

    for layer in spec.layers:
        assert (layer.rotation is None) == (layer.kind == "full")
    assert rotated(spec.layers[0]) == ("default", 10_000.0, 128, "interleaved")
    assert {"sliding", "full"} == set(kinds(spec))


@pytest.mark.parametrize(
    ("architecture", "config", "rotary_dim", "width"),
    [
        ("phi", {"hidden_size": 2048, "num_attention_heads": 32}, 32, 64),
        ("gpt_neox", {"hidden_size": 6144, "num_attention_heads": 64}, 24, 96),
        ("glm4", {}, 64, 128),
    ],
)
def test_partial_rotary_turns_a_part_of_each_key(
    architecture: str, config: dict[str, Any], rotary_dim: int, width: int
) -> None:
    layer = described(architecture, **config).layers[0]

    assert layer.rotation is not None
    assert (layer.rotation.rotary_dim, layer.key_dim) == (rotary_dim, width)


def test_falcon_with_multi_query_has_one_head() -> None:
    assert described("falcon", multi_query=True).layers[0].kv_heads == 1
    assert (
        described("falcon", multi_query=False, num_attention_heads=8, hidden_size=64)
        .layers[0]
        .kv_heads
        == 8
    )


def test_a_multimodal_model_is_its_text_part() -> None:
    spec = described("gemma3")

    assert spec.architecture == "gemma3_text"
    assert kinds(spec)[5] == "full"


def test_an_architecture_that_nobody_looked_at_has_an_unknown_pairing() -> None:
    layer = described("afmoe").layers[0]

    assert layer.rotation is not None
    assert layer.rotation.pairing == "unknown"


SMALL: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("qwen3", {"num_key_value_heads": 4, "head_dim": 24}),
    ("gemma3_text", {"sliding_window": 8}),
    ("mistral", {"sliding_window": 8}),
    ("phi", {"partial_rotary_factor": 0.5}),
    ("gpt_neox", {"num_key_value_heads": 4}),
    ("smollm3", {"num_key_value_heads": 2}),
    ("cohere2", {"sliding_window": 8}),
    ("olmo2", {}),
    ("gpt2", {"num_key_value_heads": 4}),
    ("bloom", {"num_key_value_heads": 4}),
]


@pytest.mark.parametrize(("architecture", "config"), SMALL, ids=[name for name, _ in SMALL])
def test_the_cache_that_a_model_makes_has_the_shape_that_its_config_promised(
    tiny: Callable[..., LanguageModel], architecture: str, config: dict[str, Any]
) -> None:
    model = tiny(architecture, **config)

    assert_promise_is_kept(model)


@pytest.mark.parametrize(
    "config",
    [
        {"multi_query": True},
        {"multi_query": False},
        {"new_decoder_architecture": True, "num_kv_heads": 2},
    ],
    ids=str,
)
def test_falcon_keeps_as_many_heads_as_its_config_promised(
    tokenizer: PreTrainedTokenizerBase, config: dict[str, Any]
) -> None:
    described = AutoConfig.for_model(
        "falcon",
        vocab_size=512,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        alibi=False,
        **config,
    )

    assert_promise_is_kept(wrap(AutoModelForCausalLM.from_config(described).eval(), tokenizer))


def assert_promise_is_kept(model: LanguageModel) -> None:
    ids = model.encode("The cache of a prefix, and then a little more of it.")
    cache = prefill(model, ids[None])
    assert len(cache) == len(model.spec.layers)
    for (keys, values), layer in zip(cache, model.spec.layers, strict=True):
        assert (keys.shape[1], keys.shape[3]) == (layer.kv_heads, layer.key_dim)
        assert (values.shape[1], values.shape[3]) == (layer.kv_heads, layer.value_dim)
        assert keys.shape[2] == values.shape[2] == len(ids)


def save_config(folder: Path, config: dict[str, Any] | str) -> str:
    text = config if isinstance(config, str) else json.dumps(config)
    (folder / "config.json").write_text(text, encoding="utf-8")
    return str(folder)


def test_an_encoder_decoder_is_refused_by_name(tmp_path: Path) -> None:
    T5Config().save_pretrained(tmp_path)

    with pytest.raises(UnsupportedModel, match=r"\(t5\) is an encoder-decoder") as caught:
        read_spec(str(tmp_path))

    assert "decoder-only" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("architecture", "says"),
    [
        ("bert", r"\(bert\) is an encoder"),
        ("roberta", r"\(roberta\) is an encoder"),
        ("vit", "no causal language model of type vit"),
    ],
)
def test_an_encoder_is_refused(tmp_path: Path, architecture: str, says: str) -> None:
    AutoConfig.for_model(architecture).save_pretrained(tmp_path)

    with pytest.raises(UnsupportedModel, match=says):
        read_spec(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("", "no config for"),
        ("{", "no config for"),
        ("[]", "no config for"),
        ({}, "model_type"),
        ({"hidden_size": 64}, "model_type"),
        ({"model_type": "unheard-of"}, "unheard-of"),
        ({"model_type": "llama", "num_hidden_layers": "three"}, "num_hidden_layers"),
        ({"model_type": "llama", "hidden_size": None}, "hidden_size"),
        ({"model_type": "llama", "rope_parameters": 7}, "rope_parameters"),
        ({"model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["x"]}, "layer_types"),
    ],
)
def test_a_broken_config_is_an_error_that_names_the_fault_in_one_line(
    tmp_path: Path, config: dict[str, Any] | str, says: str
) -> None:
    with pytest.raises(ModelNotFound) as caught:
        read_spec(save_config(tmp_path, config))

    assert says in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "num_attention_heads": 0},
        {"model_type": "llama", "num_hidden_layers": 0},
        {"model_type": "llama", "head_dim": -16},
    ],
)
def test_a_config_of_an_impossible_model_is_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises((ModelNotFound, UnsupportedModel)) as caught:
        read_spec(save_config(tmp_path, config))

    assert caught.value.hint


def test_a_layer_type_that_is_not_known_is_refused_by_its_name() -> None:
    config = AutoConfig.for_model("llama", num_hidden_layers=2)
    config.layer_types = ["full_attention", "quantum_attention"]

    with pytest.raises(UnsupportedModel, match="'quantum_attention' is not known"):
        spec_of(config, name="m")


def test_every_kind_that_transformers_has_a_word_for_is_one_of_ours() -> None:
    assert set(DYNAMIC_LAYER_TYPE_MAPPING) - {"dummy"} <= set(KINDS)
    assert set(KINDS.values()) | {"latent", "shared"} == set(get_args(Kind))


def test_reading_a_spec_twice_gives_the_same_and_needs_no_weights(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        path.unlink()

    first, second = read_spec(str(folder)), read_spec(str(folder))

    assert first == second
    assert first.weights is None
    assert first.tokenizer is not None


def test_a_model_with_its_tokenizer_lost_can_still_be_compared_but_not_loaded(folder: Path) -> None:
    for path in folder.glob("token*"):
        path.unlink()

    assert read_spec(str(folder)).tokenizer is None
    with pytest.raises(ModelNotFound, match="no tokenizer for"):
        load(str(folder))


def test_a_tokenizers_digest_is_that_of_what_it_does(
    tokenizer: PreTrainedTokenizerBase, folder: Path, tiny: Callable[..., LanguageModel]
) -> None:
    digest = tokenizer_digest(tokenizer)
    assert read_spec(str(folder)).tokenizer == digest  # also after a stay on the disk

    path = folder / "tokenizer.json"
    inside = json.loads(path.read_text(encoding="utf-8"))
    merge = inside["model"]["merges"].pop()
    path.write_text(json.dumps(inside), encoding="utf-8")

    assert merge
    assert read_spec(str(folder)).tokenizer != digest


def test_a_wrapped_model_has_the_spec_of_the_loaded_one(
    model: LanguageModel, pristine: Path
) -> None:
    loaded = load(str(pristine))

    assert loaded.spec.layers == model.spec.layers
    assert loaded.spec.weights == wrap(loaded.module, loaded.tokenizer).spec.weights
    assert loaded.spec.name == str(pristine)


def test_a_model_of_ones_own_is_read_once_transformers_knows_it() -> None:
    class OwnConfig(LlamaConfig):
        model_type = "one_of_our_own"

    class Own(LlamaForCausalLM):
        config_class = OwnConfig

    with pytest.raises(UnsupportedModel, match="no causal language model of type one_of_our_own"):
        spec_of(OwnConfig(), name="own")

    AutoModelForCausalLM.register(OwnConfig, Own)

    spec = spec_of(OwnConfig(num_hidden_layers=3), name="own")
    assert kinds(spec) == ["full"] * 3
    assert rotated(spec.layers[0]) == ("default", 10_000.0, 128, "unknown")
