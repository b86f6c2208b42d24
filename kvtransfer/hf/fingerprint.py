"""Tell a model from its fine-tuned sibling by a small sample of every parameter."""

import hashlib
from collections.abc import Iterable, Iterator
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

SAMPLE = 64
"""Numbers taken from each parameter, evenly spaced."""


def fingerprint(model: nn.Module) -> str:
    """A digest of a strided sample of everything that a model computes with, by name.

    That is its parameters, its saved buffers (where quantised modules keep their numbers), and
    the adapters that are active: one that is switched off, or merged, has no part in it.

    Samples are rounded to bfloat16, so that a model has one fingerprint whether it was loaded in
    bfloat16 or float32. Costs milliseconds; a change that leaves every sampled number alone is
    not seen.
    """
    return fingerprint_of(counted(model))


def fingerprint_of(named: Iterable[tuple[str, Tensor]]) -> str:
    """The fingerprint of the model that has these parameters and saved buffers."""
    digest = hashlib.sha256()
    with torch.no_grad():
        for name, numbers in sorted(named, key=lambda pair: pair[0]):
            name = name.replace("_orig_mod.", "")  # torch.compile's
            flat = numbers.detach().reshape(-1)
            stride = _stride(flat.numel(), numbers.shape[-1] if numbers.ndim else 1)
            sample = flat[::stride][:SAMPLE].to(torch.bfloat16)
            digest.update(f"{name}{tuple(numbers.shape)}".encode())
            digest.update(sample.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def adapters(model: nn.Module) -> tuple[tuple[str, tuple[str, ...], bool, bool], ...]:
    """What of each adapted layer acts now: its adapters, whether switched off, whether merged."""
    return tuple(
        (name, tuple(part.active_adapters), bool(part.disable_adapters), bool(part.merged))
        for name, part in _adapted(model)
    )


def _adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The layers that peft has put adapters around."""
    for name, part in model.named_modules():
        if hasattr(part, "base_layer") and hasattr(part, "active_adapters"):
            yield name, part


def counted(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names, free of what peft adds to them, and the numbers that take part."""
    adapted = {f"{name}.": part for name, part in _adapted(model)}
    for name, numbers in (*model.named_parameters(), *_saved_buffers(model)):
        layer = next((prefix for prefix in adapted if name.startswith(prefix)), None)
        if layer is None:
            yield name, numbers
            continue
        inside = name.removeprefix(layer)
        if inside.startswith("base_layer."):
            yield layer + inside.removeprefix("base_layer."), numbers
            continue
        adapter = adapted[layer]
        acting = set(adapter.active_adapters) & set(inside.split("."))
        if acting and not adapter.disable_adapters and not adapter.merged:
            strength = [getattr(adapter, "scaling", {}).get(each) for each in sorted(acting)]
            yield f"{name} × {strength}", numbers


def _saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, part in model.named_modules():
        for name, buffer in part.named_buffers(recurse=False):
            if name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}".lstrip("."), buffer


def _stride(count: int, width: int) -> int:
    """The spacing of the sample: one that visits other columns in every row."""
    # A stride that shares a factor with the width would come back to the same few columns.
    stride = max(1, count // SAMPLE)
    while gcd(stride, width) != 1:
        stride -= 1
    return stride
