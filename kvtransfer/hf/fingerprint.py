"""Tell a model from its fine-tuned sibling by a small sample of every parameter."""

import hashlib
from math import gcd

import torch
from torch import nn

SAMPLE = 64
"""Numbers taken from each parameter, evenly spaced."""


def fingerprint(model: nn.Module) -> str:
    """A digest of a strided sample of every parameter, by name.

    Samples are rounded to bfloat16, so that a model has one fingerprint whether it was loaded in
    bfloat16 or float32. Costs milliseconds; a change that leaves every sampled number alone is
    not seen.
    """
    digest = hashlib.sha256()
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            flat = parameter.detach().reshape(-1)
            stride = _stride(flat.numel(), parameter.shape[-1] if parameter.ndim else 1)
            sample = flat[::stride][:SAMPLE].to(torch.bfloat16)
            digest.update(f"{name}{tuple(parameter.shape)}".encode())
            digest.update(sample.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _stride(count: int, width: int) -> int:
    """The spacing of the sample: one that visits other columns in every row."""
    # A stride that shares a factor with the width would come back to the same few columns.
    stride = max(1, count // SAMPLE)
    while gcd(stride, width) != 1:
        stride -= 1
    return stride
