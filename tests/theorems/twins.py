"""Gauge twins: a model that computes the same function from another cache.

Nothing outside a KV head sees the basis in which it keeps its keys and values. Keys may become
K·B if queries become Q·B⁻ᵀ, where B commutes with the rotation; values may become V·A if the
output projection undoes it. Where the model has biases there is more freedom: attention weights
sum to one, so a constant added to all values is a constant in the output, and a constant added to
the unrotated dims of all keys adds one number to all scores.
"""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from kvtransfer.geometry.spec import RotationSpec
from kvtransfer.hf.model import LanguageModel, wrap


def twin_of(model: LanguageModel, *, seed: int = 7) -> LanguageModel:
    """A twin of ``model``, in a random basis of every KV head."""
    random = torch.Generator().manual_seed(seed)
    module = deepcopy(model.module)
    layers: Any = module.base_model.layers
    with torch.no_grad():
        for layer, spec in zip(layers, model.spec.layers, strict=True):
            assert spec.rotation is not None
            attention = layer.self_attn
            output = attention.o_proj if hasattr(attention, "o_proj") else attention.dense
            width, group = spec.key_dim, attention.num_key_value_groups
            for head in range(spec.kv_heads):
                own = slice(head * width, (head + 1) * width)
                readers = [
                    slice(reader * width, (reader + 1) * width)
                    for reader in range(head * group, (head + 1) * group)
                ]
                b = commuting(spec.rotation, width, random)
                _change_basis(attention.k_proj, own, b)
                for reader in readers:
                    _change_basis(attention.q_proj, reader, b.inverse().mT)
                a = well_conditioned(width, random)
                _change_basis(attention.v_proj, own, a)
                for reader in readers:
                    output.weight[:, reader] @= a.inverse().mT
                if attention.k_proj.bias is not None:
                    unrotated = slice(own.start + spec.rotation.rotary_dim, own.stop)
                    attention.k_proj.bias[unrotated] += 1.0
                if output.bias is not None:
                    attention.v_proj.bias[own] += 1.0
                    output.bias -= sum(output.weight[:, reader].sum(1) for reader in readers)
    return wrap(module, model.tokenizer)


def commuting(rotation: RotationSpec, width: int, random: torch.Generator) -> Tensor:
    """A basis that commutes with the rotation of keys: in every rotated pair a turn and a scale."""
    pairs = rotation.rotary_dim // 2
    if rotation.pairing == "half":
        left, right = torch.arange(pairs), torch.arange(pairs) + pairs
    else:
        left, right = 2 * torch.arange(pairs), 2 * torch.arange(pairs) + 1
    angle = 6.28 * torch.rand(pairs, generator=random)
    size = 0.5 + 1.5 * torch.rand(pairs, generator=random)
    basis = torch.zeros(width, width)
    basis[left, left] = basis[right, right] = size * angle.cos()
    basis[right, left] = size * angle.sin()
    basis[left, right] = -size * angle.sin()
    rest = slice(rotation.rotary_dim, width)
    basis[rest, rest] = well_conditioned(width - rotation.rotary_dim, random)
    return basis


def well_conditioned(width: int, random: torch.Generator) -> Tensor:
    """A random matrix with singular values between 1/2 and 2."""
    left, _ = torch.linalg.qr(torch.randn(width, width, generator=random))
    right, _ = torch.linalg.qr(torch.randn(width, width, generator=random))
    stretch: Tensor = 0.5 + 1.5 * torch.rand(width, generator=random)
    basis: Tensor = left @ torch.diag(stretch) @ right
    return basis


def _change_basis(projection: Any, head: slice, basis: Tensor) -> None:
    """Make one head of a projection return y·basis where it returned y."""
    projection.weight[head] = basis.mT @ projection.weight[head]
    if projection.bias is not None:
        projection.bias[head] = projection.bias[head] @ basis
