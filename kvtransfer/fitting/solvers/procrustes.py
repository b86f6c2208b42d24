"""Orthogonal Procrustes (Schönemann 1966): head to head, a rotation and one scale."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvtransfer.fitting.affine import PerHead
from kvtransfer.fitting.columns import Heads
from kvtransfer.fitting.moments import Moments
from kvtransfer.fitting.solvers.damped import require_rows
from kvtransfer.fitting.solvers.perhead import of_head, reads, side_by_side


@dataclass(frozen=True, slots=True)
class Procrustes:
    """W = s·UVᵀ, with XᵀY = UΣVᵀ: it turns a head's features, and stretches none more than another.

    Where a head reads more features than it writes, W has orthonormal columns.

    Attributes:
        scaled: Whether s is that of least squares, s = tr(Σ) / tr(WᵀXᵀXW); else it is one.
    """

    name: ClassVar[str] = "procrustes"

    scaled: bool = True

    def solve(self, moments: Moments, heads: Heads) -> PerHead:
        """The fitted map, in double precision.

        Raises:
            UnderdeterminedFit: there are no more rows than features.
        """
        columns, weights = reads(heads), []
        for head, each in enumerate(columns):
            mine = of_head(moments, heads, head, each)
            require_rows(mine)
            u, sigma, vh = torch.linalg.svd(mine.xy, full_matrices=False)
            turn = u @ vh
            if self.scaled:
                spread = (turn * (mine.xx @ turn)).sum()
                turn = turn * (sigma.sum() / spread.clamp_min(torch.finfo(spread.dtype).tiny))
            weights.append(turn)
        return side_by_side(columns, weights, moments)
