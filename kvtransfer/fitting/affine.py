"""The fitted thing: an affine map, whole or in two factors."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvtransfer.fitting.moments import Moments


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """y = x @ weight + bias. The outputs of all heads of a layer stand side by side in q."""

    weight: Float[Tensor, "p q"]
    bias: Float[Tensor, " q"]

    def __call__(self, x: Float[Tensor, "*n p"]) -> Float[Tensor, "*n q"]:
        """Map rows, in their own dtype."""
        return x @ self.weight.to(x) + self.bias.to(x)

    def float(self) -> "Affine":
        """The same map in single precision."""
        return Affine(self.weight.float(), self.bias.float())

    @property
    def parameters(self) -> int:
        """How many numbers it has."""
        return self.weight.numel() + self.bias.numel()


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """y = (x @ down) @ up + bias, with r columns between: smaller, and quicker to apply."""

    down: Float[Tensor, "p r"]
    up: Float[Tensor, "r q"]
    bias: Float[Tensor, " q"]

    def __call__(self, x: Float[Tensor, "*n p"]) -> Float[Tensor, "*n q"]:
        """Map rows, in their own dtype."""
        return x @ self.down.to(x) @ self.up.to(x) + self.bias.to(x)

    def float(self) -> "LowRank":
        """The same map in single precision."""
        return LowRank(self.down.float(), self.up.float(), self.bias.float())

    @property
    def parameters(self) -> int:
        """How many numbers it has."""
        return self.down.numel() + self.up.numel() + self.bias.numel()


Map = Affine | LowRank


def through_means(weight: Float[Tensor, "p q"], moments: Moments) -> Affine:
    """The affine map with this slope that sends mean x to mean y."""
    return Affine(weight, moments.mean_y - moments.mean_x @ weight)


def reduce_rank(affine: Affine, moments: Moments, rank: int) -> LowRank:
    """The map of rank at most ``rank`` whose outputs are nearest to ``affine``'s on these rows.

    Reduced-rank regression (Izenman 1975): outputs are projected on the leading eigenvectors of
    their own scatter, WᵀSW, with S the scatter of x.
    """
    weight = affine.weight
    scatter = weight.mT @ moments.xx @ weight
    _, directions = torch.linalg.eigh((scatter + scatter.mT) / 2)  # ascending
    kept = directions[:, -rank:]
    reduced = weight @ kept @ kept.mT
    return LowRank(weight @ kept, kept.mT.contiguous(), through_means(reduced, moments).bias)


def r2(fitted: Affine, moments: Moments, *, heads: int) -> Float[Tensor, " h"]:
    """Share of each head's variance that ``fitted`` explains on the rows of ``moments``.

    Within a head, dims weigh by their variance (scikit-learn's ``variance_weighted``). From
    moments alone: on rows that the fit never saw, this is its held-out R². A head that does not
    vary has R² 1 if it is predicted exactly, else 0.
    """
    weight, bias = fitted.weight, fitted.bias
    offset = moments.mean_y - moments.mean_x @ weight - bias
    lost = (
        moments.yy
        - 2 * (weight * moments.xy).sum(0)
        + (weight * (moments.xx @ weight)).sum(0)
        + moments.n * offset.square()
    )
    lost, total = lost.view(heads, -1).sum(1), moments.yy.view(heads, -1).sum(1)
    constant = total <= 0
    return torch.where(
        constant, (lost <= 1e-12).double(), 1 - lost / torch.where(constant, 1.0, total)
    )
