"""Ridge regression, the recipe of Heo et al. (arXiv:2608.03893)."""

from dataclasses import dataclass
from typing import Literal

import torch

from kvtransfer.errors import UnderdeterminedFit
from kvtransfer.fitting.affine import Affine, through_means
from kvtransfer.fitting.moments import Moments


@dataclass(frozen=True, slots=True)
class Ridge:
    """Least squares with the weights pulled towards zero: W = (XᵀX + λI)⁻¹XᵀY on centred rows.

    Attributes:
        strength: How hard they are pulled.
        scale: ``relative``: λ is ``strength`` times the mean diagonal of XᵀX, so one value means
            the same for large keys and small ones, for many rows and few. ``absolute``: λ is
            ``strength`` itself, as in the paper (0.01) and as scikit-learn's ``alpha``.
    """

    strength: float = 1e-3
    scale: Literal["relative", "absolute"] = "relative"

    def __post_init__(self) -> None:
        if not self.strength >= 0:
            raise ValueError(f"strength must be ≥ 0, got {self.strength}")

    def solve(self, moments: Moments) -> Affine:
        """The fitted map, in double precision.

        Raises:
            UnderdeterminedFit: there are no more rows than features, or the features depend on
                each other and nothing pulls the weights together.
        """
        features = moments.xx.shape[0]
        if moments.n <= features:
            raise UnderdeterminedFit(
                moments.n, features, hint="give more text (--tokens), or fewer source layers"
            )
        damping = self.strength
        if self.scale == "relative":
            damping *= float(moments.xx.diagonal().mean())
        damped = moments.xx.clone()
        damped.diagonal().add_(damping)
        factor, failed = torch.linalg.cholesky_ex(damped)
        # A dependent feature leaves a pivot of rounding errors, as often above zero as below it.
        eps = torch.finfo(damped.dtype).eps
        noise = (
            10 * features * eps * damped.diagonal() + moments.n * (4 * eps * moments.mean_x) ** 2
        )
        if bool(failed) or bool((factor.diagonal().square() <= noise).any()):
            raise UnderdeterminedFit(
                moments.n,
                features,
                hint=f"these features depend on each other; raise strength above {self.strength:g}",
            )
        return through_means(torch.cholesky_solve(moments.xy, factor), moments)
