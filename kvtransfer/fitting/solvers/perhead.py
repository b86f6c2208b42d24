"""What solvers share that let target head h read some of the source's heads only."""

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.fitting.affine import PerHead
from kvtransfer.fitting.columns import EVERY_HEAD, Heads
from kvtransfer.fitting.moments import Moments


def reads(heads: Heads) -> list[Int[Tensor, " p_"]]:
    """Per target head, the columns of the source head that stands where it stands.

    Where the counts differ, heads are paired by place, layer by layer: of 2 source and 8 target
    heads, the first four read the first. What is no head's own is read by all.
    """
    return [
        torch.nonzero(
            (heads.source == head * heads.count // heads.target) | (heads.source == EVERY_HEAD)
        ).flatten()
        for head in range(heads.target)
    ]


def of_head(moments: Moments, heads: Heads, head: int, columns: Int[Tensor, " p_"]) -> Moments:
    """The moments of one target head and what it reads."""
    width = len(moments.mean_y) // heads.target
    return moments.select(columns, torch.arange(head * width, (head + 1) * width))


def side_by_side(
    columns: list[Int[Tensor, " p_"]], weights: list[Tensor], moments: Moments
) -> PerHead:
    """One map of all heads, through the means."""
    bias = [
        moments.mean_y.view(len(columns), -1)[head] - moments.mean_x[reads] @ weight
        for head, (reads, weight) in enumerate(zip(columns, weights, strict=True))
    ]
    return PerHead(torch.stack(columns), torch.stack(weights), torch.cat(bias))
