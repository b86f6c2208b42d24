"""Causal attention in float32 under bfloat16 autocast.

The CPU kernel's backward pass takes half the time in float32 that it takes in bfloat16 at these
sizes, and it was the half of a training step.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "float32_causal"


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend from the first position on, with no mask but the causal one."""
    with torch.autocast("cpu", enabled=False):
        mixed = scaled_dot_product_attention(
            query.float(),
            key.float(),
            value.float(),
            is_causal=True,
            scale=scaling,
            enable_gqa=True,
        )
    return mixed.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)
