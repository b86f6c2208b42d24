"""Ridge regression, the recipe of Heo et al. (arXiv:2608.03893)."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from kvtransfer.fitting.affine import Affine, through_means
from kvtransfer.fitting.columns import Heads
from kvtransfer.fitting.moments import Moments
from kvtransfer.fitting.solvers.damped import Damping, Scale, factor


@dataclass(frozen=True, slots=True)
class Ridge:
    """Least squares with the weights pulled towards zero: W = (XᵀX + λI)⁻¹XᵀY on centred rows.

    Attributes:
        strength: How hard they are pulled.
        scale: Whether that is relative to the mean diagonal of XᵀX; see
            :class:`kvtransfer.fitting.solvers.damped.Damping`.
    """

    name: ClassVar[str] = "ridge"

    strength: float = 1e-3
    scale: Scale = "relative"

    def __post_init__(self) -> None:
        Damping(self.strength, self.scale)

    def solve(self, moments: Moments, heads: Heads | None = None) -> Affine:
        """The fitted map, in double precision.

        Raises:
            UnderdeterminedFit: there are no more rows than features, or the features depend on
                each other and nothing pulls the weights together.
        """
        found = factor(moments, Damping(self.strength, self.scale))
        return through_means(torch.cholesky_solve(moments.xy, found), moments)
