"""Errors weighed by what the target's queries can see of them."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvtransfer.fitting.affine import Affine, LowRank, reduce_rank, through_means
from kvtransfer.fitting.columns import Heads
from kvtransfer.fitting.moments import Moments
from kvtransfer.fitting.solvers.damped import Damping, Scale, factor


@dataclass(frozen=True, slots=True)
class Attention:
    """Ridge under a metric: minimise tr (Y − XW) M (Y − XW)ᵀ + λ‖W‖², with M a matrix a head.

    M is the second moment of the target's queries, as they meet content keys; an error along a
    direction that no query looks along changes no score. In the eigenbasis of M, with eigenvalues
    m of mean one, it is one ridge a direction, of strength λ/m. The metric is felt where W is
    bound: by λ, and by a rank. Values have no such metric, and are fitted as ridge fits them.

    Attributes:
        strength: As :class:`~kvtransfer.fitting.solvers.ridge.Ridge`'s.
        scale: Likewise.
        rank: At most this; None for any.
    """

    name: ClassVar[str] = "attention"
    weighs: ClassVar[bool] = True

    strength: float = 1e-3
    scale: Scale = "relative"
    rank: int | None = None

    def __post_init__(self) -> None:
        Damping(self.strength, self.scale)
        if self.rank is not None and self.rank < 1:
            raise ValueError(f"rank must be positive, got {self.rank}")

    def solve(self, moments: Moments, heads: Heads) -> Affine | LowRank:
        """The fitted map, in double precision.

        Raises:
            UnderdeterminedFit: as Ridge's.
        """
        pull = Damping(self.strength, self.scale)
        factor(moments, pull)  # which refuses what cannot be determined
        width = len(moments.mean_y) // heads.target
        alike = torch.eye(width).to(moments.xx).expand(heads.target, -1, -1)
        metric = alike if heads.sees is None else heads.sees.to(moments.xx)
        # Of mean one, so that a strength means what it means for ridge.
        size = metric.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
        metric = torch.where(size > 0, metric / size, alike)  # a head may have no reader
        damping = pull.on(moments)
        seen, directions = torch.linalg.eigh(metric)
        seen = seen.clamp_min(1e-6)  # what nobody sees is damped a millionfold, and no more
        spread, axes = torch.linalg.eigh(moments.xx)
        spread = spread.clamp_min(0)
        turned = (axes.mT @ moments.xy).view(-1, heads.target, width)
        turned = torch.einsum("phd,hde->phe", turned, directions)
        shrunk = turned / (spread[:, None, None] + damping / seen).clamp_min(
            torch.finfo(spread.dtype).tiny
        )
        weight = axes @ torch.einsum("phe,hde->phd", shrunk, directions).flatten(1)
        fitted = through_means(weight, moments)
        if self.rank is None:
            return fitted
        return reduce_rank(fitted, moments, self.rank, damping=damping, metric=metric)
