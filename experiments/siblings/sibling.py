"""The sibling before it is healed: the full model without some of its layers."""

from collections.abc import Collection
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

DROPPED = (4, 7, 12, 16, 17, 26)
"""Layers of SmolLM2-135M whose absence costs least, each chosen after the ones before it."""


def load(folder: Path, dtype: torch.dtype, *, without: Collection[int] = ()) -> PreTrainedModel:
    """Load a model, drop layers ``without``, and renumber the others."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    kept = [layer for index, layer in enumerate(model.model.layers) if index not in without]
    for index, layer in enumerate(kept):
        layer.self_attn.layer_idx = index  # where the layer's keys and values go in a cache
    model.model.layers = nn.ModuleList(kept)
    model.config.num_hidden_layers = len(kept)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[: len(kept)]
    return model
