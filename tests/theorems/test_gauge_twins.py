"""Where an exact map exists, fitting finds it, and a grafted prefix is as good as a native one.

No weights here are trained and no answer is stored: a twin computes the model's own function from
another cache, and so says what a mapped prefix must do to every logit.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pytest
from torch import Tensor

from kvtransfer.fitting.capture import Capture
from kvtransfer.fitting.fit import capture_texts
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.solve import fit_captured
from kvtransfer.fitting.texts import builtin
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill, score

from .compare import cache_error, is_still, relative_error, snapshot
from .prose import prose
from .ropes import LINEAR, LLAMA3, LONGROPE, YARN
from .twins import silenced, twin_of

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
LOCAL = {"rope_type": "default", "rope_theta": 10_000.0}
WIDE = {"rope_type": "linear", "rope_theta": 1_000_000.0, "factor": 4.0}
GEMMA_3 = {
    "sliding_window_pattern": 2,
    "rope_parameters": {"sliding_attention": LOCAL, "full_attention": WIDE},
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # heads
    "gqa": ("llama", {}),
    "mha": ("llama", {"num_key_value_heads": 4}),
    "mqa": ("llama", {"num_key_value_heads": 1}),
    "biases": ("llama", {"attention_bias": True}),
    # rope types
    "linear": ("llama", {"rope_parameters": LINEAR}),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "yarn-named-factor": ("llama", {"rope_parameters": YARN | {"attention_factor": 1.7}}),
    "longrope": ("llama", {"rope_parameters": LONGROPE}),
    "proportional": (
        "gemma4_text",
        {
            "layer_types": ALTERNATING,
            "sliding_window": 8,
            "global_head_dim": 32,
            "vocab_size_per_layer_input": 512,
            "hidden_size_per_layer_input": 8,
        },
    ),
    # parts of a key, and which dims pair
    "partial": ("phi", {}),
    "partial-gqa": ("stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "partial-fused": ("gpt_neox", {"rotary_pct": 0.5}),
    "fused": ("phi3", {}),
    "interleaved": ("cohere", {}),
    "interleaved-biases": ("cohere", {"attention_bias": True}),
    "interleaved-partial": ("glm", {}),
    "interleaved-sine-first": ("gptj", {"rotary_dim": 8}),
    # norms
    "norm-per-head": ("qwen3", {}),
    "norm-of-all-heads": ("olmo2", {}),
    # layers that differ
    "norm-and-tables-by-layer": (
        "olmo3",
        {
            "layer_types": ALTERNATING,
            "sliding_window": 8,
            "rope_parameters": {"sliding_attention": LOCAL, "full_attention": YARN},
        },
    ),
    "some-layers-without": ("smollm3", {"no_rope_layer_interval": 2}),
    "windows-with-full-without": ("cohere2", {"layer_types": ALTERNATING, "sliding_window": 8}),
    "norm-after": (
        "llama4_text",
        {
            "no_rope_layers": [1, 0, 1, 0],
            "attention_chunk_size": 512,
            "num_local_experts": 2,
            "intermediate_size_mlp": 128,
        },
    ),
    "sinks": (
        "gpt_oss",
        {
            "layer_types": ALTERNATING,
            "sliding_window": 8,
            "num_local_experts": 2,
            "num_experts_per_tok": 2,
            "rope_parameters": YARN,
        },
    ),
    # windows that a prefix of 48 fills, and such that it does not
    "windowed": ("mistral", {"sliding_window": 8}),
    "windowed-wide": ("mistral", {"sliding_window": 512}),
    "norm-windowed": ("gemma3_text", GEMMA_3 | {"sliding_window": 8}),
    "norm-windowed-wide": ("gemma3_text", GEMMA_3 | {"sliding_window": 512}),
}


@dataclass(frozen=True, slots=True, eq=False)
class Pair:
    """A model and its twin, with what both make of the same text."""

    model: LanguageModel
    twin: LanguageModel
    captured: Capture
    prefix: Tensor
    live: Tensor
    native: Tensor
    """The twin's logits of the live tokens on its own cache of the prefix."""


SETTINGS = FitSettings(tokens=2048, chunk=64, batch=16)


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tiny: Callable[..., LanguageModel]) -> Pair:
    architecture, config = MODELS[request.param]
    model = silenced(tiny(architecture, **config))
    twin = twin_of(model)
    prefix, live = prose(model, 60).split([48, 12], dim=1)
    return Pair(
        model,
        twin,
        capture_texts(model, twin, builtin("fit"), replace(SETTINGS, layers="all")),
        prefix,
        live,
        score(twin, live, prefill(twin, prefix)),
    )


def test_a_twin_computes_the_same_function_from_another_cache(pair: Pair) -> None:
    model, twin, ids = pair.model, pair.twin, pair.prefix

    assert relative_error(score(twin, ids), score(model, ids)) < 1e-4
    own, other = prefill(model, ids), prefill(twin, ids)
    for block, changed in zip((*own.keys, *own.values), (*other.keys, *other.values), strict=True):
        assert relative_error(changed, block) > 0.3


def test_a_twin_cannot_read_the_raw_cache(pair: Pair) -> None:
    raw = replace(prefill(pair.model, pair.prefix), model=pair.twin.spec.weights)

    assert relative_error(score(pair.twin, pair.live, raw), pair.native) > 0.1


@pytest.mark.parametrize("layers", [1, "all"], ids=["k=1", "k=all"])
def test_a_mapped_prefix_gives_the_native_logits(pair: Pair, layers: Literal["all"] | int) -> None:
    settings = replace(SETTINGS, layers=layers)

    found = fit_captured(pair.captured, pair.model, pair.twin, settings)

    mapped = found.mapping(prefill(pair.model, pair.prefix))
    assert relative_error(score(pair.twin, pair.live, mapped), pair.native) < 1e-4
    assert cache_error(mapped, prefill(pair.twin, pair.prefix)) < 1e-4
    for row in found.layers:
        assert min(row.r2_keys, row.r2_values) > 1 - 1e-6
        assert row.sources == ((row.target,) if layers == 1 else (0, 1, 2, 3))


def test_a_saved_mapping_gives_the_same_prefix(pair: Pair, tmp_path: Path) -> None:
    """It has no model to ask for rotations, only the target's config."""
    mapping = fit_captured(
        pair.captured, pair.model, pair.twin, replace(SETTINGS, layers=1)
    ).mapping
    mapping.save_pretrained(tmp_path / "mapping")

    loaded = KVMapping.from_pretrained(tmp_path / "mapping")

    own = prefill(pair.model, pair.prefix)
    assert is_still(loaded(own), snapshot(mapping(own)))
