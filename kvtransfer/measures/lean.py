"""Towards which of two references a set of vectors leans."""

import torch
from jaxtyping import Float
from torch import Tensor

from kvtransfer.measures.agreement import cosine


def cosine_gap(
    vectors: Float[Tensor, "b *n d"],
    target: Float[Tensor, "b *n d"],
    source: Float[Tensor, "b *n d"],
) -> Float[Tensor, " b"]:
    """Cosine to ``target`` minus cosine to ``source``, a mean over all but the first axis.

    Of vectors equal to ``target`` it is 1 minus the cosine between the references, of vectors
    equal to ``source`` the negative of that, and of vectors that have as much to do with the one as
    with the other 0. Turning all three by one rotation does not change it, so cached keys at one
    position give the same as content keys.
    """
    a, b, c = (each.float() for each in (vectors, target, source))
    gap: Tensor = cosine(a, b) - cosine(a, c)
    return torch.stack([row.mean() for row in gap])
