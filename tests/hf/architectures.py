"""Tiny models of many kinds, for what must hold of any decoder."""

from typing import Any

from tests.hf.test_start import MODELS as STARTS
from tests.theorems.ropes import YARN

MODELS: dict[str, tuple[str, dict[str, Any]]] = STARTS | {
    "yarn": ("llama", {"rope_parameters": YARN}),
    "sinks and windows": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    ),
    "capped scores": ("gemma2", {"sliding_window": 8}),
    "parallel blocks, some layers without": ("cohere2", {"sliding_window": 8}),
    "chunks": ("llama4_text", {"attention_chunk_size": 8, "num_local_experts": 4}),
    "norms after": ("olmo2", {}),
    "interleaved": ("glm4", {}),
    "answers in tuples": ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 4}),
}
"""Architecture and settings; each has four layers."""
