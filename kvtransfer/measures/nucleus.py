"""What a sampler may draw: a distribution's nucleus, a draw from it, how far two lie apart.

Logits are compared in float32, chances in double precision, on whatever device they are.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

FIRST_LOOK = 1024
"""Tokens that are sorted at first: mostly the nucleus is among them, and sorting all is slow."""


def nucleus(logits: Float[Tensor, "b v"], top_p: float) -> Float[Tensor, "b v"]:
    """Chances of the likeliest tokens that have at least ``top_p`` of all chance, and no others.

    Top-p filtering, as Holtzman et al. (arXiv:1904.09751) define it: the token that reaches
    ``top_p`` is in.
    """
    chances = logits.float().softmax(-1).double()
    width = min(FIRST_LOOK, chances.shape[-1])
    top = chances.topk(width, dim=-1)
    if width < chances.shape[-1] and bool((top.values.sum(-1) < top_p).any()):
        top = chances.topk(chances.shape[-1], dim=-1)
    before = top.values.cumsum(-1) - top.values
    kept = top.values * (before < top_p)
    return torch.zeros_like(chances).scatter(-1, top.indices, kept / kept.sum(-1, keepdim=True))


def draw(chances: Float[Tensor, "b v"], uniform: Float[Tensor, " b"]) -> Int[Tensor, " b"]:
    """A token a row, by inverting the distribution at ``uniform`` (from 0, below 1)."""
    mass = chances.double().cumsum(-1)
    # The first token whose cumulated mass is beyond the number; one without mass never is.
    at = uniform.to(mass)[:, None] * mass[:, -1:]
    return torch.searchsorted(mass, at, right=True)[:, 0].clamp_max(chances.shape[-1] - 1)


def total_variation(p: Float[Tensor, "b v"], q: Float[Tensor, "b v"]) -> Float[Tensor, " b"]:
    """Half the sum of differences: the chance that has to move to make the one into the other."""
    return (p - q).abs().sum(-1) / 2


def top_overlap(a: Float[Tensor, "b v"], b: Float[Tensor, "b v"], width: int) -> Int[Tensor, " b"]:
    """How many of the ``width`` best tokens of the one are among those of the other."""
    width = min(width, a.shape[-1])
    ours, theirs = (each.topk(width, dim=-1).indices for each in (a, b))
    return (ours[:, :, None] == theirs[:, None]).sum((1, 2))
