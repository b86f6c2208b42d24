"""Gauge twins: a model that computes the same function from another cache.

Nothing outside a KV head sees the basis in which it keeps its keys and values. Keys may become
K·B if queries become Q·B⁻ᵀ, where B commutes with all that is done to keys after their projection;
values may become V·A if the output projection undoes it. What B may be:

- before a rotation, in every rotated pair a turn and a stretch, and anything in the other dims;
- where no rotation follows (NoPE), anything;
- with a norm before the rotation, a stretch of every pair in the norm's weight, and a sign;
- with a norm after it that has no weight, the turns without the stretch.

All of these commute with the rotation, so a mapping that forgets about rotations finds them too.
Where no query reads two of the rotated pairs (:func:`silenced`), a twin keeps each in the other's
place, where it turns at another speed: only content keys are then linear in content keys.

Where the model has biases there is more freedom: attention weights sum to one, so a constant added
to all values is a constant in the output, and a constant added to the unrotated dims of all keys
adds one number to all scores. With sinks they sum to less, and neither holds.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvtransfer.geometry.spec import LayerSpec, RotationSpec
from kvtransfer.hf.model import LanguageModel, wrap


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """What makes queries, keys or values, head by head. Views: a change reaches the model."""

    weight: Tensor
    """Heads, head width, hidden size."""
    bias: Tensor | None

    @property
    def parts(self) -> list[Tensor]:
        """Weight, and bias if there is one."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def change_basis(self, head: int, basis: Tensor) -> None:
        """Make one head return y·basis where it returned y."""
        self.weight[head] = basis.mT @ self.weight[head]
        if self.bias is not None:
            self.bias[head] = self.bias[head] @ basis


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """One layer's attention, however its architecture names and fuses the parts."""

    module: Any
    queries: Heads
    keys: Heads
    values: Heads
    output: Any

    @property
    def group(self) -> int:
        """How many query heads read one KV head."""
        return len(self.queries.weight) // len(self.keys.weight)

    def readers(self, head: int) -> range:
        """The query heads that read a KV head."""
        return range(head * self.group, (head + 1) * self.group)

    def read_by(self, reader: int) -> Tensor:
        """The columns of the output projection that a query head's values meet."""
        columns: Tensor = self.output.weight.unflatten(1, (len(self.queries.weight), -1))
        return columns[:, reader]


def attentions(module: Any, layers: tuple[LayerSpec, ...]) -> list[Attention]:
    """The attention of every layer of a transformers model."""
    decoder = _named(module, module.base_model_prefix, "model")  # Llama 4's prefix names no part
    blocks = _named(decoder, "layers", "h")
    return [_attention(block, layer) for block, layer in zip(blocks, layers, strict=True)]


def _attention(block: Any, layer: LayerSpec) -> Attention:
    module = _named(block, "self_attn", "attention", "attn")
    output = _named(module, "o_proj", "dense", "out_proj")
    if hasattr(module, "query_key_value"):  # GPT-NeoX: every head's three side by side
        heads = _heads(module.query_key_value, 3 * layer.key_dim)
        weights = heads.weight.chunk(3, dim=1)
        biases = [None] * 3 if heads.bias is None else heads.bias.chunk(3, dim=1)
        queries, keys, values = (Heads(*both) for both in zip(weights, biases, strict=True))
    elif hasattr(module, "qkv_proj"):  # Phi-3: all queries, then all keys, then all values
        heads = _heads(module.qkv_proj, layer.key_dim)
        assert heads.bias is None
        sizes = [len(heads.weight) - 2 * layer.kv_heads, layer.kv_heads, layer.kv_heads]
        queries, keys, values = (Heads(part, None) for part in heads.weight.split(sizes))
    else:
        queries = _heads(module.q_proj, layer.key_dim)
        keys = _heads(module.k_proj, layer.key_dim)
        values = _heads(module.v_proj, layer.value_dim)
    return Attention(module, queries, keys, values, output)


def _heads(projection: Any, width: int) -> Heads:
    bias = projection.bias
    return Heads(
        projection.weight.unflatten(0, (-1, width)),
        None if bias is None else bias.unflatten(0, (-1, width)),
    )


def _named(module: Any, *names: str) -> Any:
    """The part that goes by one of these names."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


def silenced(model: LanguageModel) -> LanguageModel:
    """``model`` with queries that do not read the two pairs of a key that turn fastest."""
    module = deepcopy(model.module)
    with torch.no_grad():
        for attention, layer in zip(
            attentions(module, model.spec.layers), model.spec.layers, strict=True
        ):
            if layer.rotation is not None:
                for part in attention.queries.parts:
                    part[:, _fastest(layer.rotation).flatten()] = 0
    return wrap(module, model.tokenizer)


def twin_of(model: LanguageModel, *, seed: int = 7) -> LanguageModel:
    """A twin of ``model``, in a random basis of every KV head."""
    random = torch.Generator().manual_seed(seed)
    module = deepcopy(model.module)
    with torch.no_grad():
        for attention, layer in zip(
            attentions(module, model.spec.layers), model.spec.layers, strict=True
        ):
            if hasattr(attention.module, "k_norm"):
                _stretch_norms(attention, layer, random)
            swap = _swap_of_silent(attention.queries, layer)
            for head in range(layer.kv_heads):
                b = _key_basis(attention.module, layer, random) @ swap
                attention.keys.change_basis(head, b)
                a = _value_basis(attention.module, layer, random)
                attention.values.change_basis(head, a)
                for reader in attention.readers(head):
                    attention.queries.change_basis(reader, b.inverse().mT)
                    attention.read_by(reader).copy_(attention.read_by(reader) @ a.inverse().mT)
            if not hasattr(attention.module, "sinks"):
                _add_constants(attention, layer)
    return wrap(module, model.tokenizer)


def _key_basis(module: Any, layer: LayerSpec, random: torch.Generator) -> Tensor:
    if hasattr(module, "k_norm"):
        signs = _per_pair(layer.rotation, layer.key_dim, random).sub(1.25).sign()
        return torch.diag(signs)
    if layer.rotation is None:
        return well_conditioned(layer.key_dim, random)
    return commuting(
        layer.rotation, layer.key_dim, random, stretched=not hasattr(module, "qk_norm")
    )


def _swap_of_silent(queries: Heads, layer: LayerSpec) -> Tensor:
    """The basis that exchanges the two fastest pairs, if no query reads them; else no change."""
    order = torch.arange(layer.key_dim)
    if layer.rotation is not None:
        fastest = _fastest(layer.rotation)
        if not any(part[:, fastest.flatten()].any() for part in queries.parts):
            order[fastest] = fastest.flip(1)
    return torch.eye(layer.key_dim)[:, order]


def _value_basis(module: Any, layer: LayerSpec, random: torch.Generator) -> Tensor:
    if hasattr(module, "v_norm"):  # Gemma 4: without weight, so it lets lengths be
        return orthogonal(layer.value_dim, random)
    return well_conditioned(layer.value_dim, random)


def _stretch_norms(attention: Attention, layer: LayerSpec, random: torch.Generator) -> None:
    """Stretch keys by the weight of their norm, and shrink queries by that of theirs."""
    keys, queries = (
        norm.weight.unflatten(0, (-1, layer.key_dim))  # one row for each head, or one for all
        for norm in (attention.module.k_norm, attention.module.q_norm)
    )
    sizes = torch.stack([_per_pair(layer.rotation, layer.key_dim, random) for _ in keys])
    base = 1.0 if type(attention.module.k_norm).__name__.startswith("Gemma3") else 0.0
    keys.copy_((base + keys) * sizes - base)
    each = sizes if len(queries) == 1 else sizes.repeat_interleave(attention.group, dim=0)
    queries.copy_((base + queries) / each - base)


def _add_constants(attention: Attention, layer: LayerSpec) -> None:
    rotated = 0 if layer.rotation is None else layer.rotation.rotary_dim
    if attention.keys.bias is not None:
        attention.keys.bias[:, rotated:].add_(1.0)
    if attention.values.bias is not None and attention.output.bias is not None:
        attention.values.bias.add_(1.0)
        attention.output.bias.sub_(attention.output.weight.sum(1))


def commuting(
    rotation: RotationSpec, width: int, random: torch.Generator, *, stretched: bool = True
) -> Tensor:
    """A basis that commutes with the rotation of keys: in every rotated pair a turn and a scale."""
    left, right = _pairs(rotation)
    angle = 6.28 * torch.rand(len(left), generator=random)
    size = 0.5 + 1.5 * torch.rand(len(left), generator=random)
    if not stretched:
        size = torch.ones_like(size)
    basis = torch.zeros(width, width)
    basis[left, left] = basis[right, right] = size * angle.cos()
    basis[right, left] = size * angle.sin()
    basis[left, right] = -size * angle.sin()
    rest = slice(rotation.rotary_dim, width)
    unrotated = width - rotation.rotary_dim
    basis[rest, rest] = (
        well_conditioned(unrotated, random) if stretched else orthogonal(unrotated, random)
    )
    return basis


def _pairs(rotation: RotationSpec) -> tuple[Tensor, Tensor]:
    """The dims that rotate together."""
    pairs = torch.arange(rotation.rotary_dim // 2)
    if rotation.pairing == "half":
        return pairs, pairs + len(pairs)
    return 2 * pairs, 2 * pairs + 1


def _fastest(rotation: RotationSpec) -> Tensor:
    """The dims of the two pairs that turn fastest, a column each."""
    dims: Tensor = torch.stack(_pairs(rotation))[:, :2]
    return dims


def _per_pair(rotation: RotationSpec | None, width: int, random: torch.Generator) -> Tensor:
    """A random number from 1/2 to 2 for each dim, and the same for both dims of a rotated pair."""
    numbers: Tensor = 0.5 + 1.5 * torch.rand(width, generator=random)
    if rotation is not None:
        left, right = _pairs(rotation)
        numbers[right] = numbers[left]
    return numbers


def orthogonal(width: int, random: torch.Generator) -> Tensor:
    """A random rotation or reflection."""
    basis: Tensor = torch.linalg.qr(torch.randn(width, width, generator=random)).Q
    return basis


def well_conditioned(width: int, random: torch.Generator) -> Tensor:
    """A random matrix with singular values between 1/2 and 2."""
    left, right = orthogonal(width, random), orthogonal(width, random)
    stretch: Tensor = 0.5 + 1.5 * torch.rand(width, generator=random)
    basis: Tensor = left @ torch.diag(stretch) @ right
    return basis
