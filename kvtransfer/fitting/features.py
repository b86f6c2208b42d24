"""What a map reads of a source layer, and what it writes of a target layer, in numbers a token."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from kvtransfer.geometry.cache import Block, KVCache
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


def late(block: Block) -> Block:
    """Each token's features where the next token's stand; the first token has none, but zeros.

    An induction head finds what followed a token the last time: its keys tell of the token before
    their own, whose features an earlier head has brought there. Where source and target bring them
    in other ways no line goes from one to the other, but the source has the token's features still.
    """
    return torch.cat((torch.zeros_like(block[:, :, :1]), block[:, :, :-1]), dim=2)


def spaced(depth: int, count: int) -> tuple[int, ...]:
    """At most ``count`` of ``depth`` layers, as evenly spaced as they can be."""
    count = min(count, depth)
    return tuple((2 * i + 1) * depth // (2 * count) for i in range(count))


def gathered_size(
    spec: ModelSpec, group: Sequence[Kind], before: Sequence[int], states: int
) -> int:
    """Numbers in a row of what :func:`gathered` returns; ``states`` of them are the target's."""
    return states + sum(size(spec, kind) + before_size(spec, kind, before) for kind in group)


def before_size(spec: ModelSpec, kind: Kind, before: Sequence[int]) -> int:
    """Numbers that the layers of ``before`` keep of one token, of this kind."""
    by_layer = widths(spec, kind)
    return sum(by_layer[layer] for layer in before)


def gathered(
    content: KVCache,
    group: Sequence[Kind],
    before: Sequence[int],
    states: Sequence[Float[Tensor, "n _e"]],
) -> Float[Tensor, "n p"]:
    """All that maps may read of each token: source features, those of the token before, states.

    Args:
        content: The source's cache, keys content.
        group: Kinds whose rows stand side by side.
        before: Source layers whose features of the token before are offered too.
        states: Of the target, as :func:`state_rows` makes them, flattened.
    """
    blocks = {"keys": content.keys, "values": content.values}
    own = [block for kind in group for block in blocks[kind]]
    earlier = [late(blocks[kind][layer]) for kind in group for layer in before]
    return _side_by_side([*own, *earlier], states)


def rows_of(cache: KVCache, *kinds: Kind) -> Float[Tensor, "n p"]:
    """One row a token, the layers side by side, within a layer the heads side by side; of two
    kinds, the second's after all of the first's."""
    blocks = {"keys": cache.keys, "values": cache.values}
    return _side_by_side([block for kind in kinds for block in blocks[kind]], ())


def _side_by_side(
    blocks: Sequence[Block],
    more: Sequence[Float[Tensor, "n _e"]],
) -> Float[Tensor, "n p"]:
    """Rows of blocks, and more rows beside them; each number is copied once."""
    b, _, t, _ = blocks[0].shape
    width = sum(block.shape[1] * block.shape[3] for block in blocks)
    out = blocks[0].new_empty(b * t, width + sum(each.shape[1] for each in more))
    at = 0
    for block in blocks:
        h, d = block.shape[1], block.shape[3]
        room = out[:, at : at + h * d].unflatten(1, (h, d)).unflatten(0, (b, t))
        room.copy_(rearrange(block, "b h t d -> b t h d"))
        at += h * d
    for each in more:
        out[:, at : at + each.shape[1]] = each
        at += each.shape[1]
    return out


def flat(block: Block) -> Float[Tensor, "n p"]:
    """One layer's rows."""
    return rearrange(block, "b h t d -> (b t) (h d)")


def state_rows(state: Float[Tensor, "*n e"]) -> Float[Tensor, "*n e"]:
    """The residual stream as a feature: each row at a root mean square of one, in float32.

    Every layer norms what enters it before it projects, so the direction is what keys and values
    are made of, and the size (a few tokens' is a thousandfold) would only drown the others.
    """
    wide = state.float()
    square = wide.square().mean(-1, keepdim=True)
    scaled: Tensor = wide * square.clamp_min(1e-12).rsqrt()
    return scaled
