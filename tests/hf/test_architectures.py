"""Every causal language model of transformers, tiny: what the self-test says of it, and that a
prefix kept apart is read as if it had never been.

The table is literal: what changes here, with a new transformers or a new kvtransfer, changes for a
user. How to read a row of ``ACCEPTED``, layer after layer:

``half 16 × 3, none × 1``   in three layers dims i and i + 8 of a key turn together, in the fourth
                            none does
``interleaved 8 × 4``       dims 2i and 2i + 1, of the first 8
``learned``, ``alibi``      keys carry no rotation, and positions are known to sit elsewhere
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvtransfer.errors import CacheLayoutError, RotationError, UnsupportedModel
from kvtransfer.geometry.join import stack
from kvtransfer.geometry.spec import ModelSpec
from kvtransfer.hf.architectures import COUNTS_COLUMNS
from kvtransfer.hf.model import LanguageModel, require_kv, wrap
from kvtransfer.hf.relocate import relocate
from kvtransfer.hf.run import generate, prefill, score
from kvtransfer.hf.spec import spec_of
from kvtransfer.steering.interventions import Ablate

from ..conftest import SIZES as DENSE

SIZES: dict[str, Any] = DENSE | {
    # The same sizes in the words of other configs; a config ignores those that are not its own.
    "n_layer": 4,
    "n_head": 4,
    "n_embd": 64,
    "ffn_dim": 128,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
PREFIX, LIVE = 24, 8
UNSEEN = (
    *("bloom", "doge", "falcon", "gpt_neo", "gpt_neox_japanese", "mpt", "xglm"),
    "hrm_text",  # its layers run several times, and each run has a cache of its own
)
"""Architectures whose attention does not go through transformers' interface, layer by layer."""

WINDOW: dict[str, Any] = {"sliding_window": 16}
"""Less than the prefix, so that windows matter."""
IN_TURN = ["sliding_attention", "full_attention"] * 2
BY_LAYER_TYPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
GEMMA3N: dict[str, Any] = {
    "vocab_size_per_layer_input": 512,
    "hidden_size_per_layer_input": 16,
    "layer_types": IN_TURN,
    "num_kv_shared_layers": 2,
    "laurel_rank": 8,
    "activation_sparsity_pattern": [0.0] * 4,
}
GEMMA4: dict[str, Any] = {
    "vocab_size_per_layer_input": 512,
    "hidden_size_per_layer_input": 16,
    "global_head_dim": 32,
}
DBRX: dict[str, Any] = {
    "hidden_size": ...,
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 4,
    "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},
    "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
VQ: dict[str, Any] = {
    "base_channels": 32,
    "embed_dim": 8,
    "latent_channels": 8,
    "num_res_blocks": 1,
    "channel_multiplier": [1],
    "codebook_size": 16,
    "attn_resolutions": [],
}
AUDIO: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_blocks": 1,
    "num_attention_heads": 2,
    "ext_pw_out_channel": 32,
    "nemo_conv_channels": 32,
}
WHISPER: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "num_mel_bins": 16,
    "max_source_positions": 50,
}

Rows = Mapping[str, tuple[str, Mapping[str, Any]]]
"""Architecture → what is expected, and what its config needs beside SIZES.

``...`` leaves a size out. A config of several parts is given its ``text_config`` whole, and
nothing beside the parts named here.
"""

ACCEPTED: Rows = {
    "afmoe": ("half 16 × 3, none × 1", WINDOW),
    "apertus": ("half 16 × 4", {}),
    "apertus1p5_text": ("half 16 × 4", {}),
    "arcee": ("half 16 × 4", {}),
    "aria_text": ("half 16 × 4", {}),
    "biogpt": ("learned", {}),
    "bitnet": ("half 16 × 4", {}),
    "bloom": ("alibi", {}),
    "codegen": ("interleaved 8 × 4", {"rotary_dim": 8}),
    "cohere": ("interleaved 16 × 4", {}),
    "cohere2": ("interleaved 16 × 3, none × 1", WINDOW),
    "cohere2_moe": ("interleaved 16 × 3, none × 1", WINDOW),
    "cohere_compass_text": (
        "half 16 × 4",
        WINDOW | {"layer_types": IN_TURN, "rope_parameters": BY_LAYER_TYPE},
    ),
    "ctrl": ("learned", {}),
    "cwm": ("half 16 × 4", WINDOW | {"bos_token_id": 1}),
    "diffllama": ("half 16 × 4", {}),
    "doge": ("half 16 × 4", {}),
    "dots1": (
        "half 16 × 4",
        {"n_group": 1, "topk_group": 1, "n_shared_experts": 1} | WINDOW | {"layer_types": IN_TURN},
    ),
    "emu3": (
        "half 16 × 4",
        {"text_config": SIZES | {"pad_token_id": 0, "bos_token_id": 1}, "vq_config": VQ},
    ),
    "ernie4_5": ("interleaved 16 × 4", {}),
    "ernie4_5_moe": ("interleaved 16 × 4", {}),
    "exaone": ("half 16 × 4", {}),
    "exaone4": ("half 16 × 3, none × 1", WINDOW),
    "exaone_moe": ("half 16 × 3, none × 1", WINDOW),
    "falcon": ("half 16 × 4", {"head_dim": ...}),
    "flex_olmo": ("half 16 × 4", {}),
    "flint": ("none × 2, half 16 × 1, none × 1", WINDOW),
    "fuyu": ("half 8 × 4", {}),
    "gemma": ("half 16 × 4", {}),
    "gemma2": ("half 16 × 4", WINDOW),
    "gemma3": (
        "half 16 × 4",
        {"text_config": SIZES | WINDOW | {"sliding_window_pattern": 2}, "vision_config": VISION},
    ),
    "gemma3_text": ("half 16 × 4", WINDOW | {"sliding_window_pattern": 2}),
    "gemma3n_text": ("half 16 × 2", WINDOW | GEMMA3N),
    "gemma4": (
        "half 16 × 3, half 32 × 1",
        {"text_config": SIZES | WINDOW | GEMMA4 | {"pad_token_id": 0}},
    ),
    "gemma4_text": ("half 16 × 3, half 32 × 1", WINDOW | GEMMA4),
    "gemma4_unified": (
        "half 16 × 3, half 32 × 1",
        {"text_config": SIZES | WINDOW | GEMMA4 | {"pad_token_id": 0}},
    ),
    "gemma4_unified_text": ("half 16 × 3, half 512 × 1", WINDOW),
    "glm": ("interleaved 8 × 4", {}),
    "glm4": ("interleaved 8 × 4", {}),
    "glm4_moe": ("half 8 × 4", {}),
    "got_ocr2": (
        "half 16 × 4",
        {
            "text_config": SIZES,
            "vision_config": VISION
            | {"mlp_dim": 64, "output_channels": 16, "global_attn_indexes": [0]},
        },
    ),
    "gpt-sw3": ("learned", {}),
    "gpt2": ("learned", {}),
    "gpt_bigcode": ("learned", {}),
    "gpt_neo": (
        "learned",
        {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "window_size": 16},
    ),
    "gpt_neox": ("half 4 × 4", {}),
    "gpt_neox_japanese": ("half 16 × 4", {}),
    "gpt_oss": ("half 16 × 4", WINDOW),
    "gptj": ("interleaved 8 × 4", {"rotary_dim": 8}),
    "granite": ("half 16 × 4", {}),
    "granite_swa": ("half 16 × 4", WINDOW),
    "granitemoe": ("half 16 × 4", {}),
    "granitemoe_swa": ("half 16 × 4", WINDOW),
    "granitemoeshared": ("half 16 × 4", {}),
    "helium": ("interleaved 16 × 4", {}),
    # Each of its layers reads a token eight times; two of them, at random weights, blow rounding up
    # to 2e-4 (in float64: nothing).
    "hrm_text": ("half 16 × 8", {"num_hidden_layers": 1}),
    "hy_v3": ("half 16 × 4", {}),
    "hyperclovax": ("half 16 × 4", {}),
    "internlm3": ("half 16 × 4", {}),
    "iquestcoder": ("half 16 × 4", {}),
    "jais2": ("half 16 × 4", {}),
    "jetmoe": ("half 16 × 4", {}),
    "kolibri1": ("half 16 × 4", WINDOW),
    "laguna": (
        "half 16 × 1, half 8 × 1, half 16 × 1, half 8 × 1",
        WINDOW | {"layer_types": IN_TURN},
    ),
    "lfm2": ("half 16 × 4", {}),
    "llama": ("half 16 × 4", {}),
    "llama4": (
        "interleaved 16 × 3, none × 1",
        {
            "text_config": SIZES | {"attention_chunk_size": 16},
            "vision_config": VISION
            | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        },
    ),
    "llama4_text": ("interleaved 16 × 3, none × 1", {"attention_chunk_size": 16}),
    "mellum": ("half 16 × 4", WINDOW | {"layer_types": IN_TURN}),
    "minimax_m2": ("half 16 × 4", {}),
    "minimax_m3_vl_text": ("half 16 × 4", {}),
    "ministral": ("half 16 × 4", WINDOW),
    "ministral3": ("half 16 × 4", {}),
    "mistral": ("half 16 × 4", WINDOW),
    "mixtral": ("half 16 × 4", {}),
    "modernbert-decoder": ("half 16 × 4", WINDOW | {"pad_token_id": 0, "bos_token_id": 1}),
    "moshi": ("half 16 × 4", WINDOW),
    "mpt": ("alibi", {}),
    "nanochat": ("half 16 × 4", {}),
    "nemotron": ("half 8 × 4", {}),
    "olmo": ("half 16 × 4", {}),
    "olmo2": ("half 16 × 4", {}),
    "olmo3": ("half 16 × 4", WINDOW),
    "olmoe": ("half 16 × 4", {}),
    "opt": ("learned", {}),
    "persimmon": ("half 8 × 4", {}),
    "phi": ("half 8 × 4", {}),
    "phi3": ("half 16 × 4", {}),
    "phi4_multimodal": ("half 16 × 4", {"vision_config": VISION, "audio_config": AUDIO}),
    "phimoe": ("half 16 × 4", {}),
    "qwen2": ("half 16 × 4", {}),
    "qwen2_moe": ("half 16 × 4", {}),
    "qwen3": ("half 16 × 4", {}),
    "qwen3_moe": ("half 16 × 4", {}),
    "sarvam_moe": ("half 16 × 4", {}),
    "seed_oss": ("half 16 × 4", {}),
    "smollm3": ("half 16 × 3, none × 1", {}),
    "solar_open": ("half 16 × 4", {}),
    "stablelm": ("half 4 × 4", {}),
    "starcoder2": ("half 16 × 4", {}),
    "vaultgemma": ("half 16 × 4", WINDOW),
    "xglm": ("learned", {}),
}

REFUSED: Rows = {
    "axk1": ("is latent", {}),
    "axk2": ("is latent", {}),
    "bailing_hybrid": ("is linear", {}),
    "bamba": ("is linear", {}),
    "bart": ("is an encoder-decoder", {}),
    "beam": ("cannot read a token into a cache", {}),
    "bert": ("is an encoder: its tokens see those that come later", {}),
    "bert-generation": ("when another token follows it", {}),
    "big_bird": ("is an encoder: its tokens see those that come later", {}),
    "bigbird_pegasus": ("is an encoder-decoder", {}),
    "blenderbot": ("is an encoder-decoder", {}),
    "blenderbot-small": ("is an encoder-decoder", {}),
    "blt": ("does not describe a decoder's cache", {"num_hidden_layers": ...}),
    "camembert": ("is an encoder: its tokens see those that come later", {}),
    "cpmant": ("takes no position_ids", {}),
    "data2vec-text": ("is an encoder: its tokens see those that come later", {}),
    "dbrx": ("keeps keys of shape (32, 2, 1, 16)", DBRX),
    "deepseek_v2": ("is latent", {}),
    "deepseek_v3": ("is latent", {}),
    "deepseek_v32": ("is latent", {}),
    "deepseek_v4": ("is latent", {}),
    "dory": ("keeps keys of shape (32, 2, 2, 16)", {}),
    "dots3_note_text": ("is latent", {"num_key_value_heads": 4}),
    "electra": ("is an encoder: its tokens see those that come later", {}),
    "ernie": ("is an encoder: its tokens see those that come later", {}),
    "falcon_h1": ("is hybrid", {}),
    "falcon_mamba": ("is linear", {}),
    "gemma4_assistant": (
        "is shared",
        {
            "text_config": SIZES
            | GEMMA4
            | {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
        },
    ),
    "gemma4_unified_assistant": ("is shared", {}),
    "git": ("the values of layer 0", {"vision_config": VISION}),
    "glm4_moe_lite": ("is latent", {}),
    "glm_moe_dsa": ("is latent", {}),
    "granitemoehybrid": ("is linear", {}),
    "hunyuan_v1_dense": ("no rotation of pairs", {}),
    "hunyuan_v1_moe": ("no rotation of pairs", {}),
    "hy_v4": ("is latent", {}),
    "inkling2_loop_text": ("is hybrid", {}),
    "inkling2_text": ("is hybrid", {}),
    "inkling_text": ("is hybrid", {}),
    "jamba": ("is linear", {}),
    "kimi_linear": ("is linear", {}),
    "lara_mini": ("is linear", {}),
    "lfm2_moe": ("is linear", {"layer_types": ["conv", "full_attention"] * 2}),
    "lfm3": ("is linear", {}),
    "longcat_flash": ("is latent", {}),
    "mamba": ("is linear", {}),
    "mamba2": ("is linear", {"num_heads": 8, "head_dim": 16}),
    "marian": ("is an encoder-decoder", {}),
    "mbart": ("is an encoder-decoder", {}),
    "megatron-bert": ("is an encoder: its tokens see those that come later", {}),
    "mimo_v2_flash": (
        "keeps keys of shape (32, 4, 1, 16)",
        {"v_head_dim": 8, "swa_num_key_value_heads": 2, "swa_v_head_dim": 8},
    ),
    "minicpm3": ("is latent", {}),
    "minimax": ("is linear", {}),
    "mllama": (
        "layer 1 of mllama (mllama_text_model) keeps keys of shape None",
        {
            "text_config": SIZES
            | {"cross_attention_layers": [1], "bos_token_id": 1, "pad_token_id": 0},
            "vision_config": VISION,
        },
    ),
    "moss_transcribe_diarize": (
        "takes no position_ids",
        {"text_config": SIZES, "audio_config": WHISPER},
    ),
    "musicgen": ("is an encoder-decoder", {}),
    "musicgen_melody": ("is an encoder-decoder", {}),
    "mvp": ("is an encoder-decoder", {}),
    "nemotron_h": ("is linear", {}),
    "olmo_hybrid": ("is linear", {}),
    "openai-gpt": ("keeps a cache of 0 layers", {}),
    "pegasus": ("is an encoder-decoder", {}),
    "plbart": ("is an encoder-decoder", {}),
    "prophetnet": (
        "is an encoder-decoder",
        {"num_hidden_layers": ..., "num_encoder_layers": 2, "num_decoder_layers": 2},
    ),
    "qwen3_5": ("is linear", {}),
    "qwen3_5_moe": ("is linear", {}),
    "qwen3_5_moe_text": ("is linear", {}),
    "qwen3_5_text": ("is linear", {}),
    "qwen3_next": ("is linear", {}),
    "qwen4_exp": ("is linear", {}),
    "qwen4_exp_text": ("is linear", {}),
    "recurrent_gemma": ("is linear", {}),
    "reformer": ("is an encoder: its tokens see those that come later", {}),
    "rembert": ("is an encoder: its tokens see those that come later", {}),
    "roberta": ("is an encoder: its tokens see those that come later", {}),
    "roberta-prelayernorm": ("is an encoder: its tokens see those that come later", {}),
    "roc_bert": ("is an encoder: its tokens see those that come later", {}),
    "roformer": ("is an encoder: its tokens see those that come later", {}),
    "rwkv": ("is linear", {}),
    "sarvam_mla": ("is latent", {}),
    "trocr": ("takes no position_ids", {}),
    "whisper": ("is an encoder-decoder", {}),
    "xlm": ("is an encoder: its tokens see those that come later", {}),
    "xlm-roberta": ("is an encoder: its tokens see those that come later", {}),
    "xlm-roberta-xl": ("is an encoder: its tokens see those that come later", {}),
    "xlnet": (
        "takes no position_ids",
        {"max_position_embeddings": ..., "d_head": 16, "d_inner": 128},
    ),
    "xlstm": ("is linear", {}),
    "xmod": ("is an encoder: its tokens see those that come later", {}),
    "youtu": ("is latent", {}),
    "zamba": ("is linear", {}),
    "zamba2": ("is linear", {"num_hidden_layers": ...}),
    "zaya": ("is hybrid", {"num_experts_per_tok": 1}),
}
"""Architecture → a phrase of the refusal."""

MEASURED = "5.24."
"""The transformers whose architectures these are; another one may have more."""

LEFT_OUT: Mapping[str, str] = {
    "dots3_note": "its config cannot be made small: vision width and text width must agree",
    "gemma3n": "its vision tower is timm's, which is no dependency; gemma3n_text is here",
}


@dataclass(frozen=True, slots=True, eq=False)
class Tried:
    """A tiny model that was accepted, and one text read by it in one go."""

    model: LanguageModel
    expected: str
    ids: Tensor
    joint: Tensor
    """The model's own logits for all of ``ids``, without any cache."""


def config_of(architecture: str, own: Mapping[str, Any]) -> PreTrainedConfig:
    sizes = {} if "text_config" in own else SIZES
    given = {name: value for name, value in {**sizes, **own}.items() if value is not ...}
    config: PreTrainedConfig = AutoConfig.for_model(architecture, **given)
    return config


def opened(
    architecture: str, own: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> LanguageModel:
    """A random float32 model, taken through the checks that ``load`` makes, in its order."""
    config = config_of(architecture, own)
    spec = spec_of(config, name=architecture, tokenizer=tokenizer)
    require_kv(spec)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.ndim == 1:  # fresh norms and biases hide mistakes
                    parameter += 0.2 * torch.randn_like(parameter)
    return wrap(module, tokenizer, spec)


def joint_logits(model: LanguageModel, ids: Tensor) -> Tensor:
    """What a user gets from the model itself."""
    with torch.no_grad():
        logits: Tensor = model.module(ids, use_cache=False).logits
    return logits


def in_words(spec: ModelSpec) -> str:
    """The spec in the words of the table."""
    if spec.positions != "rotary":
        return spec.positions
    turns = (
        f"{layer.rotation.pairing} {layer.rotation.rotary_dim}" if layer.rotation else "none"
        for layer in spec.layers
    )
    return ", ".join(f"{turn} × {len(list(run))}" for turn, run in groupby(turns))


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.fixture(scope="module", params=ACCEPTED)
def tried(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerBase) -> Iterator[Tried]:
    architecture: str = request.param
    expected, own = ACCEPTED[architecture]
    model = opened(architecture, own, tokenizer)
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 500, (1, PREFIX + LIVE), generator=random)
    yield Tried(model, expected, ids, joint_logits(model, ids))


def test_measuring_finds_what_the_architecture_does(tried: Tried) -> None:
    assert in_words(tried.model.spec) == tried.expected


def test_a_prefix_kept_apart_is_read_as_if_read_at_once(tried: Tried) -> None:
    prefix, live = tried.ids.split([PREFIX, LIVE], dim=1)

    grafted = score(tried.model, live, prefill(tried.model, prefix))

    assert relative_error(grafted, tried.joint[:, PREFIX:]) < 1e-4


def test_without_its_prefix_the_text_reads_otherwise(tried: Tried) -> None:
    alone = score(tried.model, tried.ids[:, PREFIX:])

    assert relative_error(alone, tried.joint[:, PREFIX:]) > 1e-2


def test_a_prefix_elsewhere_is_read_as_here_or_is_not_moved(tried: Tried) -> None:
    prefix, live = tried.ids.split([PREFIX, LIVE], dim=1)
    cache = prefill(tried.model, prefix)
    kinds = {layer.kind for layer in tried.model.spec.layers}

    if tried.model.spec.positions in ("learned", "alibi") or "chunked" in kinds:
        with pytest.raises(RotationError, match="cannot be moved"):
            relocate(tried.model, cache, 40)
    else:
        elsewhere = score(tried.model, live, relocate(tried.model, cache, 40))
        assert relative_error(elsewhere, tried.joint[:, PREFIX:]) < 1e-4


def test_what_is_hidden_is_not_there_or_cannot_be_hidden(tried: Tried) -> None:
    """Whatever stood there, and for rotations, which tell no place from another, nothing at all."""
    prefix, live = tried.ids.split([PREFIX, LIVE], dim=1)
    cache = prefill(tried.model, prefix)
    removed = Ablate("removed")

    if tried.model.spec.architecture in UNSEEN:
        with pytest.raises(UnsupportedModel, match="saw what was to be hidden"):
            score(tried.model, live, removed(cache))
        return
    hidden = score(tried.model, live, removed(cache))

    other = cache.map(lambda block: block.flip(2) + 1)
    assert torch.equal(score(tried.model, live, removed(other)), hidden)
    if tried.model.spec.positions in ("rotary", "none"):
        assert relative_error(hidden, score(tried.model, live)) < 1e-4


def test_what_is_written_after_a_prefix_is_the_models_own_choice(tried: Tried) -> None:
    prefix, live = tried.ids.split([PREFIX, LIVE], dim=1)

    written = list(generate(tried.model, live[0], prefill(tried.model, prefix), max_new_tokens=3))

    text = tried.ids
    for token in written:
        assert token == int(joint_logits(tried.model, text)[0, -1].argmax())
        text = torch.cat((text, torch.tensor([[token]])), dim=1)
    if len(written) < 3:
        assert int(joint_logits(tried.model, text)[0, -1].argmax()) == 0  # the end of the sequence


@pytest.mark.parametrize("lives", [(5, 5, 5), (6, 3, 4)], ids=["of one length", "padded"])
def test_rows_of_a_batch_are_read_as_alone_or_are_refused(
    tried: Tried, lives: tuple[int, ...]
) -> None:
    """Three prefixes of their own lengths, and prompts of one length or padded at the left."""
    model, ids = tried.model, tried.ids
    prefixes = [
        prefill(model, ids[:, start : start + n]) for start, n in ((0, 20), (3, 5), (9, 12))
    ]
    prompts = [ids[:, row : row + n] for row, n in enumerate(lives)]
    live = torch.full((3, max(lives)), 7)
    mask = torch.zeros_like(live)
    for row, prompt in enumerate(prompts):
        live[row, -prompt.shape[1] :], mask[row, -prompt.shape[1] :] = prompt[0], 1
    narrow = any(layer.window is not None and layer.window < 26 for layer in model.spec.layers)

    if len(set(lives)) > 1 and (narrow or model.spec.architecture in COUNTS_COLUMNS):
        with pytest.raises(CacheLayoutError, match="counts it"):
            score(model, live, stack(prefixes), mask=mask)
        return
    together = score(model, live, stack(prefixes), mask=mask)

    for row, (prefix, prompt) in enumerate(zip(prefixes, prompts, strict=True)):
        alone = score(model, prompt, prefix)
        assert relative_error(together[row : row + 1, -prompt.shape[1] :], alone) < 1e-4


@pytest.mark.parametrize("architecture", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(
    architecture: str, tokenizer: PreTrainedTokenizerBase
) -> None:
    phrase, own = REFUSED[architecture]

    with pytest.raises(UnsupportedModel) as caught:
        opened(architecture, own, tokenizer)

    assert phrase in caught.value.message
    assert architecture in caught.value.message
    assert caught.value.hint


@pytest.mark.skipif(
    not transformers.__version__.startswith(MEASURED), reason=f"measured with {MEASURED}"
)
def test_every_causal_language_model_of_transformers_is_here() -> None:
    rows = [*ACCEPTED, *REFUSED, *LEFT_OUT]

    assert sorted(rows) == sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
