"""Mutated configs and caches end in a report or in a named error, and never in a wrong answer."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedConfig

from kvtransfer.errors import KVTransferError
from kvtransfer.geometry.compat import CompatReport, compare
from kvtransfer.geometry.spec import ModelSpec
from kvtransfer.hf.adopt import adopt
from kvtransfer.hf.model import LanguageModel, wrap
from kvtransfer.hf.run import prefill, score
from kvtransfer.hf.spec import spec_of
from tests.conftest import SIZES

IDS = torch.arange(5, 45, 3)[None]

# fmt: off
ARCHITECTURES = (
    "bert", "bloom", "cohere2", "deepseek_v3", "falcon", "gemma2", "gemma3_text", "glm4", "gpt2",
    "gpt_neox", "gpt_oss", "gptj", "granitemoehybrid", "llama", "llama4_text", "mamba", "mistral",
    "nemotron_h", "olmo3", "opt", "phi", "phi3", "qwen2", "qwen3", "qwen3_next", "smollm3", "t5",
)
# fmt: on
ROPES: tuple[Any, ...] = (
    {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
    {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0},
    {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    {"rope_type": "unheard-of", "rope_theta": 1e4},
    {"rope_type": None},
    {"rope_theta": -1.0},
    {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    {"sliding_attention": None},
)
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 16, 512, 10**12, 0.0, 0.5, -0.25, 1e-5, float("nan"),
    float("inf"), "", "three", "full_attention", [], [0], ["full_attention"], {}, {"a": 1},
    ["sliding_attention", "full_attention"] * 2, ["linear_attention"] * 4, [1, 0, 1, 0],
)  # fmt: skip
NAMES = (
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size",
    "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "layer_types",
    "sliding_window", "use_sliding_window", "attention_chunk_size", "no_rope_layers", "alibi",
    "multi_query", "new_decoder_architecture", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim",
    "max_position_embeddings", "model_type", "is_encoder_decoder", "dtype", "rms_norm_eps",
    "hidden_act", "layers_block_type", "per_layer_config", "kv_sharing_modes", "rotary_dim",
    "query_pre_attn_scalar", "attn_logit_softcapping", "use_bidirectional_attention", "use_cache",
    "attention_bias", "initializer_range", "eos_token_id", "tie_word_embeddings", "vocab_size",
)  # fmt: skip

CHANGES = st.lists(
    st.tuples(st.sampled_from(NAMES), st.sampled_from((*ODD, *ROPES))), min_size=1, max_size=3
)


@cache
def plain(architecture: str) -> PreTrainedConfig:
    more: dict[str, Any] = {"vocab_size": 64}
    if architecture == "falcon":  # its head width is computed, and cannot be given
        sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
        return AutoConfig.for_model(architecture, **sizes | more | {"alibi": False})
    return AutoConfig.for_model(architecture, **SIZES | more)


def mutated(architecture: str, changes: list[tuple[str, Any]]) -> PreTrainedConfig | None:
    """The config with values changed, in JSON or behind its back; None where it objects."""
    if ("num_hidden_layers", 10**12) in changes:
        return None  # some configs would write a word for each of them
    described = plain(architecture).to_dict() | dict(changes)
    try:
        return AutoConfig.for_model(**described)
    except Exception:  # transformers' own checks, which load_config turns into a named error
        config = deepcopy(plain(architecture))
        for name, value in changes:
            try:
                setattr(config, name, value)
            except Exception:
                return None
        return config


def known(architecture: str) -> ModelSpec:
    """The plain model's spec, with tokenizer and weights as if they had been seen."""
    spec = spec_of(plain(architecture), name="plain")
    return replace(spec, tokenizer="t", weights="w", dtype="float32")


def judged(config: PreTrainedConfig, beside: ModelSpec) -> CompatReport | None:
    """The report on both, or None where the config was refused by name."""
    try:
        spec = spec_of(config, name="mutated")
    except KVTransferError as error:
        assert error.message
        assert error.hint
        return None
    spec = replace(spec, tokenizer=beside.tokenizer, weights=beside.weights, dtype=beside.dtype)
    report = compare(spec, beside)
    report.to_json()
    return report


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=2000)
@given(architecture=st.sampled_from(ARCHITECTURES), changes=CHANGES)
def test_a_mutated_config_is_judged_or_refused_by_name(
    architecture: str, changes: list[tuple[str, Any]]
) -> None:
    config = mutated(architecture, changes)
    assume(config is not None)
    assert config is not None
    beside = known("llama")

    judged(config, beside)


def small(architecture: str, changes: list[tuple[str, Any]]) -> PreTrainedConfig:
    """A mutated config of a model that is built in a moment; where it is not, another is drawn."""
    config = mutated(architecture, changes)
    assume(config is not None)
    assert config is not None
    sizes = [getattr(config, name, 0) for name in NAMES]
    layers = getattr(config, "num_hidden_layers", 0)
    assume(10**12 not in sizes and isinstance(layers, int) and layers <= 16)
    return config


RUNNING = ("cohere2", "gemma2", "glm4", "gpt2", "gpt_neox", "llama", "mistral", "phi", "qwen3")
"""Architectures to be run as well; their mutations stay small."""


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=400)
@given(architecture=st.sampled_from(RUNNING), changes=CHANGES)
def test_reuse_is_said_only_of_a_model_that_makes_the_same_cache(
    tokenizer: Any, architecture: str, changes: list[tuple[str, Any]]
) -> None:
    """The oracle is a run: the same weights, under the one config and under the other."""
    config = small(architecture, changes)
    report = judged(config, known(architecture))
    if report is None or report.verdict != "reuse":
        return
    original = built(plain(architecture), tokenizer)
    other = built(config, tokenizer, original.module.state_dict())

    own, theirs = prefill(other, IDS), prefill(original, IDS)

    for mine, given_ in zip((*own.keys, *own.values), (*theirs.keys, *theirs.values), strict=True):
        torch.testing.assert_close(mine, given_, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(score(other, IDS), score(original, IDS), atol=1e-4, rtol=1e-4)


def built(
    config: PreTrainedConfig, tokenizer: Any, weights: dict[str, Any] | None = None
) -> LanguageModel:
    torch.manual_seed(0)
    try:
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    except Exception:  # some settings, such as of the random start, transformers cannot follow
        assume(False)
    if weights is not None:
        module.load_state_dict(weights)
    return wrap(module, tokenizer)


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=150)
@given(architecture=st.sampled_from(RUNNING), changes=CHANGES)
def test_a_model_that_runs_is_opened_or_refused_by_name(
    tokenizer: Any, architecture: str, changes: list[tuple[str, Any]]
) -> None:
    """Whatever the config says: what is opened gives the logits that the model gives alone."""
    config = small(architecture, changes)
    torch.manual_seed(0)
    try:
        module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        joint = module(IDS).logits.detach()
    except Exception:
        assume(False)
    assume(bool(joint.isfinite().all()) and module.num_parameters() < 10**6)
    try:
        model = wrap(module, tokenizer)
        prefix = prefill(model, IDS[:, :8])
        split = score(model, IDS[:, 8:], prefix)
    except KVTransferError as error:
        assert error.hint
        return

    torch.testing.assert_close(split, joint[:, 8:], atol=1e-3, rtol=1e-3)


Blocks = list[list[Any]]


def at(layer: int, part: int, change: Callable[[Tensor], Any]) -> Callable[[Blocks], Any]:
    def edit(blocks: Blocks) -> Blocks:
        if isinstance(blocks[layer][part], Tensor):
            blocks[layer][part] = change(blocks[layer][part])
        return blocks

    return edit


BLOCK_EDITS: dict[str, Callable[[Tensor], Any]] = {
    "as it is": lambda b: b,
    "cloned": lambda b: b.clone(),
    "none": lambda b: None,
    "a list": lambda b: b.tolist(),
    "transposed": lambda b: b.transpose(1, 2),
    "heads last": lambda b: b.movedim(1, -1),
    "flattened": lambda b: b.flatten(1),
    "a dim more": lambda b: b[None],
    "cut": lambda b: b[:, :, :-1],
    "doubled": lambda b: torch.cat((b, b), 2),
    "empty": lambda b: b[:, :, :0],
    "half": lambda b: b.half(),
    "wide": lambda b: b.double(),
    "bits": lambda b: b.bfloat16().view(torch.float16).float(),
    "whole numbers": lambda b: b.long(),
    "complex": lambda b: b.to(torch.complex64),
    "rolled": lambda b: b.roll(1, 2),
    "heads swapped": lambda b: b.flip(1),
    "dims swapped": lambda b: b.flip(-1),
    "negated": lambda b: -b,
    "scaled": lambda b: 1.5 * b,
    "zero": torch.zeros_like,
    "nan": lambda b: b.log(),
    "noise": lambda b: b + torch.randn(b.shape, generator=torch.Generator().manual_seed(1)),
}


def apply(edits: list[Callable[[Blocks], Any]], blocks: Blocks) -> Blocks:
    for edit in edits:
        blocks = edit(blocks)
    return blocks


EDITS = [
    st.builds(at, st.integers(0, 1), st.integers(0, 1), st.just(change))
    for change in BLOCK_EDITS.values()
]
CONTAINERS: dict[str, Callable[[Blocks], Any]] = {
    "lists": lambda blocks: blocks,
    "tuples": lambda blocks: tuple(map(tuple, blocks)),
    "output": lambda blocks: {"past_key_values": blocks},
    "side by side": lambda blocks: {
        "key_cache": [b[0] for b in blocks], "value_cache": [b[1] for b in blocks]
    },
    "dynamic": lambda blocks: DynamicCache([tuple(b) for b in blocks]),
    "swapped layers": lambda blocks: blocks[::-1],
    "swapped parts": lambda blocks: [b[::-1] for b in blocks],
    "one layer": lambda blocks: blocks[:1],
    "three layers": lambda blocks: [*blocks, blocks[0]],
    "nested": lambda blocks: [blocks],
    "unordered": lambda blocks: dict(enumerate(blocks)),
}  # fmt: skip


@settings(max_examples=600)
@given(
    edits=st.lists(st.one_of(EDITS), max_size=3),
    container=st.sampled_from(sorted(CONTAINERS)),
    start=st.sampled_from([0, 0, 0, 1, 50]),
)
def test_a_mutated_cache_is_the_models_own_or_refused_by_name(
    model: LanguageModel,
    edits: list[Callable[[Blocks], Any]],
    container: str,
    start: int,
) -> None:
    own = prefill(model, IDS)
    blocks: Blocks = [list(pair) for pair in own]
    try:
        blocks = apply(edits, blocks)
        outside = CONTAINERS[container](blocks)
    except Exception:
        assume(False)  # the edits do not go together, or no container would have it

    try:
        found = adopt(model, outside, IDS, start=start)
    except KVTransferError as error:
        assert error.hint
        return

    assert start == 0
    for mine, given_ in zip((*found.keys, *found.values), (*own.keys, *own.values), strict=True):
        assert (mine - given_).norm() <= 0.02 * given_.norm()
