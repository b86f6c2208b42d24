"""Rope types, each so set that it differs from the default within a few dozen tokens."""

from typing import Any

RopeParameters = dict[str, Any]

LINEAR: RopeParameters = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
LLAMA3: RopeParameters = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN: RopeParameters = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
LONGROPE: RopeParameters = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.2, 1.4, 1.8, 2.5, 4.0, 8.0],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0],
    "original_max_position_embeddings": 128,
}
