"""What is known of architectures by name, where their configs do not say it.

Only what a checker may say before any weight is seen. When a model is loaded, its rotation is
measured (:mod:`kvtransfer.hf.probe`): that fills the gaps here, and finds the mistakes.
"""

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from kvtransfer.geometry.spec import Pairing

STATE_ONLY = frozenset({"falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"})
"""Architectures without any attention layer."""

LEARNED = frozenset(
    {"biogpt", "ctrl", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neo", "openai-gpt", "opt", "xglm"}
)
"""Architectures whose positions are added to the embedding, and so sit inside K and V."""

ALIBI = frozenset({"bloom", "mpt"})
"""Architectures that add positions to the attention scores; their keys carry none."""

COUNTS_COLUMNS = frozenset({"gpt_neo", "mpt"})
"""Architectures whose attention counts columns of the cache, also those that a mask hides, without
their config's windows saying so: ALiBi by column, and a window inside the attention."""

NOPE = frozenset({"jamba", "nemotron_h", "zamba"})
"""Architectures whose attention knows no positions: their recurrent layers do."""

# fmt: off
INTERLEAVED = frozenset({
    "codegen", "cohere", "cohere2", "deepseek_v2", "ernie4_5", "ernie4_5_moe", "glm", "glm4",
    "gptj", "helium", "llama4_text",
})
"""Architectures that rotate dims 2i and 2i + 1 together."""

HALF = frozenset({
    "apertus", "arcee", "aria_text", "bitnet", "deepseek_v3", "diffllama", "doge", "exaone",
    "falcon", "flex_olmo", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text",
    "glm4_moe", "gpt_neox", "gpt_neox_japanese", "gpt_oss", "granite", "granite_swa", "granitemoe",
    "granitemoehybrid", "granitemoeshared", "hy_v3", "hyperclovax", "internlm3", "jais2", "jetmoe",
    "llama", "mellum", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "moshi",
    "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "persimmon", "phi", "phi3",
    "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3",
    "solar_open", "stablelm", "starcoder2", "vaultgemma",
})
"""Architectures that rotate dims i and i + r/2 together. One in neither set is ``unknown``."""
# fmt: on

BACKWARDS = frozenset({"nanochat"})
"""Architectures that turn their keys the other way round."""


def pairing_of(architecture: str) -> Pairing:
    """Which dims an architecture rotates together, where we know."""
    if architecture in INTERLEAVED:
        return "interleaved"
    return "half" if architecture in HALF else "unknown"


def is_encoder(architecture: str) -> bool:
    """Whether its tokens see those that come later, so that a prefix has no cache of its own."""
    return architecture in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def is_language_model(config: PreTrainedConfig) -> bool:
    """Whether transformers can run it as a causal language model, alone or under images; so it can
    with a model of yours that ``AutoModelForCausalLM.register`` has named."""
    return (
        config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        or config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
        or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    )
