"""The damped normal equations that every closed-form solver begins with."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvtransfer.errors import UnderdeterminedFit
from kvtransfer.fitting.moments import Moments

Scale = Literal["relative", "absolute"]


@dataclass(frozen=True, slots=True)
class Damping:
    """How hard weights are pulled towards zero.

    Attributes:
        strength: How hard.
        scale: ``relative``: λ is ``strength`` times the mean diagonal of XᵀX, so one value means
            the same for large keys and small ones, for many rows and few. ``absolute``: λ is
            ``strength`` itself, as in Heo et al. (0.01) and as scikit-learn's ``alpha``.
    """

    strength: float = 1e-3
    scale: Scale = "relative"

    def __post_init__(self) -> None:
        if not self.strength >= 0:
            raise ValueError(f"strength must be ≥ 0, got {self.strength}")

    def on(self, moments: Moments) -> float:
        """λ, on the scale of XᵀX."""
        if self.scale == "absolute":
            return self.strength
        return self.strength * float(moments.xx.diagonal().mean())


def require_rows(moments: Moments) -> None:
    """Raise UnderdeterminedFit unless there are more rows than features."""
    features = moments.xx.shape[0]
    if moments.n <= features:
        raise UnderdeterminedFit(
            moments.n, features, hint="give more text (--tokens), or fewer source layers"
        )


def factor(moments: Moments, damping: Damping) -> Float[Tensor, "p p"]:
    """The Cholesky factor of XᵀX + λI.

    Raises:
        UnderdeterminedFit: there are no more rows than features, or the features depend on
            each other and nothing pulls the weights together.
    """
    require_rows(moments)
    features = moments.xx.shape[0]
    damped = moments.xx.clone()
    damped.diagonal().add_(damping.on(moments))
    found, failed = torch.linalg.cholesky_ex(damped)
    # A dependent feature leaves a pivot of rounding errors, as often above zero as below it.
    eps = torch.finfo(damped.dtype).eps
    noise = 10 * features * eps * damped.diagonal() + moments.n * (4 * eps * moments.mean_x) ** 2
    if bool(failed) or bool((found.diagonal().square() <= noise).any()):
        raise UnderdeterminedFit(
            moments.n,
            features,
            hint=f"these features depend on each other; raise strength above {damping.strength:g}",
        )
    factored: Tensor = found
    return factored
