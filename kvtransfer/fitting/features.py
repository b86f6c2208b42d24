"""What a map reads of a source layer, and what it writes of a target layer, in numbers a token."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from kvtransfer.geometry.spec import ModelSpec

Kind = Literal["keys", "values"]

KINDS: tuple[Kind, ...] = ("keys", "values")

Features = Literal["same", "both"]
"""What a target's keys are read from, and likewise its values: the source's of the same kind (the
paper), or its keys and values together. A start adds the target's own state to either."""

GROUPS: Mapping[Features, tuple[tuple[Kind, ...], ...]] = MappingProxyType(
    {"same": (("keys",), ("values",)), "both": (("keys", "values"),)}
)
"""Kinds whose rows are gathered side by side."""


def read_by(features: Features, kind: Kind) -> tuple[Kind, ...]:
    """The kinds of a source layer that a map to ``kind`` reads."""
    return next(group for group in GROUPS[features] if kind in group)


def size(spec: ModelSpec, kind: Kind) -> int:
    """Numbers that all layers of a model keep of one token, of this kind."""
    return sum(widths(spec, kind))


def widths(spec: ModelSpec, kind: Kind) -> list[int]:
    """The same, layer by layer."""
    return [
        layer.kv_heads * (layer.key_dim if kind == "keys" else layer.value_dim)
        for layer in spec.layers
    ]


def state_rows(state: Float[Tensor, "*n e"]) -> Float[Tensor, "*n e"]:
    """The residual stream as a feature: each row at a root mean square of one, in float32.

    Every layer norms what enters it before it projects, so the direction is what keys and values
    are made of, and the size (a few tokens' is a thousandfold) would only drown the others.
    """
    wide = state.float()
    square = wide.square().mean(-1, keepdim=True)
    scaled: Tensor = wide * square.clamp_min(1e-12).rsqrt()
    return scaled
