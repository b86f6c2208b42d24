"""Forty-odd public checkpoints: what each config.json says, and what its cache is.

This file knows model cards, and nothing of how our code reads them. The settings are those of each
checkpoint's own config.json that its cache depends on, in the config's own words (``rope_theta``,
``rotary_pct``, ``hybrid_override_pattern``). The expected facts were written by hand.

How to read a fact:

``layers``     kinds in order of first appearance: ``sliding 512 × 15, full × 3``
``heads``      KV heads × head width of every layer that keeps keys: ``8 × 128``;
               of a latent layer, 1 × its latent + its rotated keys: ``1 × 512 + 64``
``positions``  rotary, learned, alibi or none
``rope``       ``llama3 ×8 θ=500000 half 128d × 32``: type, stretch, base, which dims of a cached
               key turn together, how many turn, and in how many of the layers that keep keys;
               ``none`` where none turns
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtransfer.geometry.spec import PositionScheme


@dataclass(frozen=True, slots=True)
class Known:
    """One checkpoint."""

    name: str
    tokenizer: str
    """A family: two models share it where they cut ordinary text into the same ids."""
    architecture: str
    """The ``model_type`` of its config."""
    config: Mapping[str, Any]
    layers: str
    heads: str
    positions: PositionScheme
    rope: str


def sized(
    layers: int, width: int, heads: int, kv: int | None = None, **rest: Any
) -> dict[str, Any]:
    """The settings that nearly every config has, by the names that most give them."""
    sizes = {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    return sizes | ({} if kv is None else {"num_key_value_heads": kv}) | rest


def llama3(factor: float, low: float = 1.0, high: float = 4.0) -> dict[str, Any]:
    """Llama 3's stretch of RoPE."""
    return {
        "rope_type": "llama3",
        "factor": factor,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": low,
        "high_freq_factor": high,
    }


def yarn(factor: float, original: int, **rest: Any) -> dict[str, Any]:
    """A stretch by YaRN, with the betas that every checkpoint here has."""
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        **rest,
    }


LONGROPE: Mapping[str, Any] = {
    # Stand-ins: the checkpoints list 48 numbers a side, which no fact below reads.
    "type": "longrope",
    "short_factor": [1.0] * 48,
    "long_factor": [1.0] * 48,
}

NEMOTRON = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
"""M for mamba, - for MLP, * for attention."""

GRANITE = ["attention" if index in (10, 13, 17, 27) else "mamba" for index in range(32)]

# Families of tokenizers, where it is not plain:
#   llama-3   3, 3.1 and 3.2 are one. SmolLM3 took it over: no BOS, other specials.
#   qwen      Qwen2 to Qwen3: the added specials differ, ordinary text does not.
#   llama-2   Phi-3 took it over, and added specials behind it.
#   cl100k    OpenAI's, with other specials: Phi-4, OLMo 2 and OLMo 3.
#   o200k     OpenAI's, with other specials: GPT-OSS and Phi-4-mini.
#   mistral   v0.1 and Mixtral. v0.3 cuts alike, but its control tokens push all ids up: a family
#             of its own. So is OPT, which has GPT-2's merges and other ids.
#   gpt-neox  Pythia and Mamba.

# fmt: off
MODELS: tuple[Known, ...] = (
    # Llama and its tokenizers
    Known("Llama-2-7B", "llama-2", "llama", sized(32, 4096, 32, 32, rope_theta=10_000.0),
          "full × 32", "32 × 128", "rotary", "default θ=10000 half 128d × 32"),
    Known("Llama-3-8B", "llama-3", "llama", sized(32, 4096, 32, 8, rope_theta=500_000.0),
          "full × 32", "8 × 128", "rotary", "default θ=500000 half 128d × 32"),
    Known("Llama-3.1-8B", "llama-3", "llama",
          sized(32, 4096, 32, 8, rope_theta=500_000.0, rope_scaling=llama3(8.0),
                max_position_embeddings=131_072),
          "full × 32", "8 × 128", "rotary", "llama3 ×8 θ=500000 half 128d × 32"),
    Known("Llama-3.2-1B", "llama-3", "llama",
          sized(16, 2048, 32, 8, head_dim=64, rope_theta=500_000.0, rope_scaling=llama3(32.0),
                max_position_embeddings=131_072),
          "full × 16", "8 × 64", "rotary", "llama3 ×32 θ=500000 half 64d × 16"),
    Known("Llama-3.2-3B", "llama-3", "llama",
          sized(28, 3072, 24, 8, head_dim=128, rope_theta=500_000.0, rope_scaling=llama3(32.0),
                max_position_embeddings=131_072),
          "full × 28", "8 × 128", "rotary", "llama3 ×32 θ=500000 half 128d × 28"),
    Known("Llama-4-Scout-17B-16E-Instruct", "llama-4", "llama4_text",
          sized(48, 5120, 40, 8, head_dim=128, attention_chunk_size=8192, no_rope_layers=[],
                max_position_embeddings=10_485_760, rope_theta=500_000.0,
                rope_scaling=llama3(16.0, low=1.0, high=1.0)),
          "chunked 8192 × 36, full × 12", "8 × 128", "rotary",
          "llama3 ×16 θ=500000 interleaved 128d × 36, none × 12"),
    Known("SmolLM3-3B", "llama-3", "smollm3",
          sized(36, 2048, 16, 4, rope_theta=5_000_000.0, no_rope_layer_interval=4),
          "full × 36", "4 × 128", "rotary", "default θ=5000000 half 128d × 27, none × 9"),
    Known("SmolLM2-135M", "smollm2", "llama", sized(30, 576, 9, 3, rope_theta=100_000.0),
          "full × 30", "3 × 64", "rotary", "default θ=100000 half 64d × 30"),
    Known("SmolLM2-1.7B", "smollm2", "llama", sized(24, 2048, 32, 32, rope_theta=130_000.0),
          "full × 24", "32 × 64", "rotary", "default θ=130000 half 64d × 24"),

    # Qwen: a window in the config, and a switch that leaves it unused
    Known("Qwen2-0.5B", "qwen", "qwen2",
          sized(24, 896, 14, 2, rope_theta=1_000_000.0, sliding_window=131_072,
                max_window_layers=24, use_sliding_window=False),
          "full × 24", "2 × 64", "rotary", "default θ=1000000 half 64d × 24"),
    Known("Qwen2.5-1.5B", "qwen", "qwen2",
          sized(28, 1536, 12, 2, rope_theta=1_000_000.0, sliding_window=131_072,
                max_window_layers=28, use_sliding_window=False),
          "full × 28", "2 × 128", "rotary", "default θ=1000000 half 128d × 28"),
    Known("Qwen2.5-7B", "qwen", "qwen2",
          sized(28, 3584, 28, 4, rope_theta=1_000_000.0, sliding_window=131_072,
                max_window_layers=28, use_sliding_window=False),
          "full × 28", "4 × 128", "rotary", "default θ=1000000 half 128d × 28"),
    Known("Qwen3-0.6B", "qwen", "qwen3",
          sized(28, 1024, 16, 8, head_dim=128, rope_theta=1_000_000.0),
          "full × 28", "8 × 128", "rotary", "default θ=1000000 half 128d × 28"),
    Known("Qwen3-8B", "qwen", "qwen3",
          sized(36, 4096, 32, 8, head_dim=128, rope_theta=1_000_000.0),
          "full × 36", "8 × 128", "rotary", "default θ=1000000 half 128d × 36"),
    Known("Qwen3-30B-A3B", "qwen", "qwen3_moe",
          sized(48, 2048, 32, 4, head_dim=128, rope_theta=1_000_000.0),
          "full × 48", "4 × 128", "rotary", "default θ=1000000 half 128d × 48"),
    Known("Qwen3-Next-80B-A3B-Instruct", "qwen", "qwen3_next",
          sized(48, 2048, 16, 2, head_dim=256, rope_theta=10_000_000.0,
                partial_rotary_factor=0.25, full_attention_interval=4),
          "linear × 36, full × 12", "2 × 256", "rotary", "default θ=10000000 half 64d × 12"),

    # Mistral
    Known("Mistral-7B-v0.1", "mistral", "mistral",
          sized(32, 4096, 32, 8, rope_theta=10_000.0, sliding_window=4096),
          "sliding 4096 × 32", "8 × 128", "rotary", "default θ=10000 half 128d × 32"),
    Known("Mistral-7B-v0.3", "mistral-v0.3", "mistral",
          sized(32, 4096, 32, 8, rope_theta=1_000_000.0, sliding_window=None),
          "full × 32", "8 × 128", "rotary", "default θ=1000000 half 128d × 32"),
    Known("Mixtral-8x7B-v0.1", "mistral", "mixtral",
          sized(32, 4096, 32, 8, rope_theta=1_000_000.0, sliding_window=None),
          "full × 32", "8 × 128", "rotary", "default θ=1000000 half 128d × 32"),
    Known("Ministral-3-3B", "tekken", "ministral3",
          sized(26, 3072, 32, 8, head_dim=128, sliding_window=None,
                rope_parameters=yarn(16.0, 16_384, rope_theta=1_000_000.0, mscale=1.0,
                                     mscale_all_dim=1.0, llama_4_scaling_beta=0.1)),
          "full × 26", "8 × 128", "rotary", "yarn ×16 θ=1000000 half 128d × 26"),

    # Gemma: windows in turn with full layers, and from 3 on a θ for each
    Known("Gemma-2-2B", "gemma-2", "gemma2",
          sized(26, 2304, 8, 4, head_dim=256, rope_theta=10_000.0, sliding_window=4096),
          "sliding 4096 × 13, full × 13", "4 × 256", "rotary", "default θ=10000 half 256d × 26"),
    Known("Gemma-3-270m", "gemma-3", "gemma3_text",
          sized(18, 640, 4, 1, head_dim=256, sliding_window=512, sliding_window_pattern=6,
                rope_theta=1_000_000.0, rope_local_base_freq=10_000.0),
          "sliding 512 × 15, full × 3", "1 × 256", "rotary",
          "default θ=10000 half 256d × 15, default θ=1000000 half 256d × 3"),
    Known("Gemma-3-4B", "gemma-3", "gemma3_text",
          sized(34, 2560, 8, 4, head_dim=256, sliding_window=1024, sliding_window_pattern=6,
                rope_theta=1_000_000.0, rope_local_base_freq=10_000.0,
                rope_scaling={"rope_type": "linear", "factor": 8.0}),
          "sliding 1024 × 29, full × 5", "4 × 256", "rotary",
          "default θ=10000 half 256d × 29, linear ×8 θ=1000000 half 256d × 5"),

    # Phi: the longer ones have windows that no prompt reaches
    Known("Phi-3-mini-4k-instruct", "llama-2", "phi3",
          sized(32, 3072, 32, 32, rope_theta=10_000.0, sliding_window=2047),
          "sliding 2047 × 32", "32 × 96", "rotary", "default θ=10000 half 96d × 32"),
    Known("Phi-3-mini-128k-instruct", "llama-2", "phi3",
          sized(32, 3072, 32, 32, rope_theta=10_000.0, sliding_window=262_144,
                max_position_embeddings=131_072, original_max_position_embeddings=4096,
                rope_scaling=dict(LONGROPE)),
          "sliding 262144 × 32", "32 × 96", "rotary", "longrope θ=10000 half 96d × 32"),
    Known("Phi-4", "cl100k", "phi3",
          sized(40, 5120, 40, 10, rope_theta=250_000.0, sliding_window=None,
                max_position_embeddings=16_384, original_max_position_embeddings=16_384),
          "full × 40", "10 × 128", "rotary", "default θ=250000 half 128d × 40"),
    Known("Phi-4-mini-instruct", "o200k", "phi3",
          sized(32, 3072, 24, 8, rope_theta=10_000.0, sliding_window=262_144,
                max_position_embeddings=131_072, original_max_position_embeddings=4096,
                partial_rotary_factor=0.75, rope_scaling=dict(LONGROPE)),
          "sliding 262144 × 32", "8 × 128", "rotary", "longrope θ=10000 half 96d × 32"),

    # OLMo: YaRN in the full layers only
    Known("OLMo-2-0425-1B", "cl100k", "olmo2", sized(16, 2048, 16, 16, rope_theta=500_000.0),
          "full × 16", "16 × 128", "rotary", "default θ=500000 half 128d × 16"),
    Known("Olmo-3-1025-7B", "cl100k", "olmo3",
          sized(32, 4096, 32, 32, rope_theta=500_000.0, sliding_window=4096,
                max_position_embeddings=65_536,
                rope_scaling=yarn(8.0, 8192, attention_factor=1.2079441541679836)),
          "sliding 4096 × 24, full × 8", "32 × 128", "rotary",
          "default θ=500000 half 128d × 24, yarn ×8 θ=500000 half 128d × 8"),

    # Others that rotate all of a key, or a part
    Known("GPT-OSS-20B", "o200k", "gpt_oss",
          sized(24, 2880, 64, 8, head_dim=64, sliding_window=128, rope_theta=150_000.0,
                max_position_embeddings=131_072, rope_scaling=yarn(32.0, 4096, truncate=False)),
          "sliding 128 × 12, full × 12", "8 × 64", "rotary", "yarn ×32 θ=150000 half 64d × 24"),
    Known("Granite-3.1-2B", "granite-3", "granite", sized(40, 2048, 32, 8, rope_theta=5_000_000.0),
          "full × 40", "8 × 64", "rotary", "default θ=5000000 half 64d × 40"),
    Known("Command-R7B", "cohere", "cohere2",
          sized(32, 4096, 32, 8, rope_theta=50_000.0, sliding_window=4096,
                sliding_window_pattern=4),
          "sliding 4096 × 24, full × 8", "8 × 128", "rotary",
          "default θ=50000 interleaved 128d × 24, none × 8"),
    Known("GLM-4-9B", "glm-4", "glm",
          sized(40, 4096, 32, 2, head_dim=128, rope_theta=10_000.0, partial_rotary_factor=0.5),
          "full × 40", "2 × 128", "rotary", "default θ=10000 interleaved 64d × 40"),
    Known("StableLM-2-1.6B", "stablelm-2", "stablelm",
          sized(24, 2048, 32, 32, rope_theta=10_000.0, partial_rotary_factor=0.25),
          "full × 24", "32 × 64", "rotary", "default θ=10000 half 16d × 24"),
    Known("Pythia-160M", "gpt-neox", "gpt_neox",
          sized(12, 768, 12, rotary_pct=0.25, rotary_emb_base=10_000),
          "full × 12", "12 × 64", "rotary", "default θ=10000 half 16d × 12"),
    Known("Pythia-1B", "gpt-neox", "gpt_neox",
          sized(16, 2048, 8, rotary_pct=0.25, rotary_emb_base=10_000),
          "full × 16", "8 × 256", "rotary", "default θ=10000 half 64d × 16"),
    Known("Falcon-7B", "falcon", "falcon",
          sized(32, 4544, 71, num_kv_heads=71, multi_query=True, alibi=False,
                new_decoder_architecture=False),
          "full × 32", "1 × 64", "rotary", "default θ=10000 half 64d × 32"),

    # No rotation: positions in the scores, or in the embedding
    Known("Bloom-560m", "bloom", "bloom", {"n_layer": 24, "hidden_size": 1024, "n_head": 16},
          "full × 24", "16 × 64", "alibi", "none × 24"),
    Known("GPT-2", "gpt-2", "gpt2", {"n_layer": 12, "n_embd": 768, "n_head": 12},
          "full × 12", "12 × 64", "learned", "none × 12"),
    Known("OPT-125m", "opt", "opt", sized(12, 768, 12),
          "full × 12", "12 × 64", "learned", "none × 12"),

    # No keys and values for each token, in some layers or in all
    Known("DeepSeek-V2-Lite", "deepseek-v2", "deepseek_v2",
          sized(27, 2048, 16, 16, kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64,
                qk_nope_head_dim=128, v_head_dim=128, rope_theta=10_000.0,
                max_position_embeddings=163_840,
                rope_scaling=yarn(40.0, 4096, mscale=0.707, mscale_all_dim=0.707)),
          "latent × 27", "1 × 512 + 64", "rotary", "yarn ×40 θ=10000 interleaved 64d × 27"),
    Known("DeepSeek-V3", "deepseek-v3", "deepseek_v3",
          sized(61, 7168, 128, 128, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64,
                qk_nope_head_dim=128, v_head_dim=128, rope_theta=10_000.0,
                max_position_embeddings=163_840,
                rope_scaling=yarn(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)),
          # V3 takes dims 2i and 2i + 1, and writes them i and i + 32: cached keys turn by halves.
          "latent × 61", "1 × 512 + 64", "rotary", "yarn ×40 θ=10000 half 64d × 61"),
    Known("Nemotron-H-8B-Base-8K", "nemotron-h", "nemotron_h",
          sized(52, 4096, 32, 8, head_dim=128, hybrid_override_pattern=NEMOTRON),
          "linear × 24, none × 24, full × 4", "8 × 128", "none", "none × 4"),
    Known("Granite-4.0-H-350M", "granite-4", "granitemoehybrid",
          sized(32, 768, 12, 4, layer_types=GRANITE, position_embedding_type="nope",
                rope_theta=10_000.0, mamba_n_heads=48, mamba_d_head=32, num_local_experts=0,
                num_experts_per_tok=0),
          "linear × 28, full × 4", "4 × 64", "none", "none × 4"),
    Known("Mamba-2.8B", "gpt-neox", "mamba", {"num_hidden_layers": 64, "hidden_size": 2560},
          "linear × 64", "", "none", ""),
)
# fmt: on
