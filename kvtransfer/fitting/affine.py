"""The fitted things: what takes rows of source features to rows of one target layer.

The outputs of all heads of a layer stand side by side in q. Affine maps come in several forms,
each as small as what it knows.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvtransfer.fitting.moments import Moments
from kvtransfer.fitting.network import Mlp


@dataclass(frozen=True, slots=True, eq=False)
class Affine:
    """y = x @ weight + bias."""

    weight: Float[Tensor, "p q"]
    bias: Float[Tensor, " q"]

    def __call__(self, x: Float[Tensor, "*n p"]) -> Float[Tensor, "*n q"]:
        """Map rows, in their own dtype."""
        return x @ self.weight.to(x) + self.bias.to(x)

    def float(self) -> "Affine":
        """The same map in single precision."""
        return Affine(self.weight.float(), self.bias.float())

    def whole(self, p: int) -> "Affine":
        """As one matrix over all p features."""
        assert len(self.weight) == p
        return self

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

    def whole(self, p: int) -> Affine:
        """As one matrix over all p features."""
        assert len(self.down) == p
        return Affine(self.down @ self.up, self.bias)

    @property
    def parameters(self) -> int:
        """How many numbers it has."""
        return self.down.numel() + self.up.numel() + self.bias.numel()


@dataclass(frozen=True, slots=True, eq=False)
class PerHead:
    """Target head h reads some of the features only: y_h = x[reads_h] @ weight_h + bias_h."""

    reads: Int[Tensor, "h p_"]
    weight: Float[Tensor, "h p_ d"]
    bias: Float[Tensor, " q"]

    def __call__(self, x: Float[Tensor, "*n p"]) -> Float[Tensor, "*n q"]:
        """Map rows, in their own dtype."""
        heads = torch.einsum("...hp,hpd->...hd", x[..., self.reads], self.weight.to(x))
        return heads.flatten(-2) + self.bias.to(x)

    def float(self) -> "PerHead":
        """The same map in single precision."""
        return PerHead(self.reads, self.weight.float(), self.bias.float())

    def whole(self, p: int) -> Affine:
        """As one matrix over all p features, zero where a head does not read."""
        heads, _, width = self.weight.shape
        weight = torch.zeros(p, heads, width, dtype=self.weight.dtype, device=self.weight.device)
        for head, reads in enumerate(self.reads):
            weight[reads, head] = self.weight[head]
        return Affine(weight.flatten(1), self.bias)

    @property
    def parameters(self) -> int:
        """How many numbers it has; which features a head reads is not among them."""
        return self.weight.numel() + self.bias.numel()


Linear = Affine | LowRank | PerHead
"""Maps whose held-out error is known from moments alone."""


@dataclass(frozen=True, slots=True, eq=False)
class Corrected:
    """A map and a low-rank correction of it, side by side: y = base(x) + correction(x)."""

    base: Linear | Mlp
    correction: LowRank
    """Its bias is the correction of the base's."""

    def __call__(self, x: Float[Tensor, "*n p"]) -> Float[Tensor, "*n q"]:
        """Map rows, in their own dtype."""
        return self.base(x) + self.correction(x)

    def float(self) -> "Corrected":
        """The same map in single precision."""
        return Corrected(self.base.float(), self.correction.float())

    @property
    def bias(self) -> Float[Tensor, " q"]:
        """Of both together."""
        return self.base.bias + self.correction.bias

    @property
    def parameters(self) -> int:
        """How many numbers it has."""
        return self.base.parameters + self.correction.parameters


Map = Linear | Mlp | Corrected


def through_means(weight: Float[Tensor, "p q"], moments: Moments) -> Affine:
    """The affine map with this slope that sends mean x to mean y."""
    return Affine(weight, moments.mean_y - moments.mean_x @ weight)


def widen(fitted: Linear, gain: float, moments: Moments) -> Linear:
    """The same map with its outputs ``gain`` times as far from their mean.

    What is predicted from noisy features varies less than what it predicts, in keys and so in
    scores: attention to a mapped prefix is flatter than it should be. A gain above one gives some
    of that back, at a loss in R².
    """
    if gain == 1.0:
        return fitted
    bias = gain * fitted.bias + (1 - gain) * moments.mean_y
    if isinstance(fitted, LowRank):
        return LowRank(fitted.down, gain * fitted.up, bias)
    return replace(fitted, weight=gain * fitted.weight, bias=bias)


def reduce_rank(
    affine: Affine,
    moments: Moments,
    rank: int,
    *,
    damping: float = 0.0,
    metric: Float[Tensor, "h d d"] | None = None,
) -> LowRank:
    """The best map of rank at most ``rank``, out of the best of any rank.

    Reduced-rank regression (Izenman 1975; with a ridge, Mukherjee & Zhu 2011): outputs are
    projected on the leading eigenvectors of their own scatter, Wᵀ(S + λI)W, with S the scatter of
    x. Under a metric M of output errors, the eigenvectors are those of M^½ Wᵀ(S + λI)W M^½.

    Args:
        affine: The ridge solution.
        moments: Of the rows that it was fitted to.
        rank: Columns to keep.
        damping: λ, on the scale of S.
        metric: How much an error along each direction of each head matters; None for alike.
    """
    weight = affine.weight
    scatter = weight.mT @ moments.xx @ weight + damping * (weight.mT @ weight)
    root = inverse = None
    if metric is not None:
        values, vectors = torch.linalg.eigh(metric)
        # A direction that no query looks along still has to be written.
        values = values.clamp_min(values.amax(-1, keepdim=True) * 1e-8)
        half = vectors * values.sqrt()[:, None, :]
        root = torch.block_diag(*(half @ vectors.mT))
        inverse = torch.block_diag(*((vectors / values.sqrt()[:, None, :]) @ vectors.mT))
        scatter = root @ scatter @ root
    _, directions = torch.linalg.eigh((scatter + scatter.mT) / 2)  # ascending
    kept = directions[:, -rank:]
    into, out = kept, kept.mT
    if root is not None and inverse is not None:
        into, out = root @ kept, kept.mT @ inverse
    down, up = weight @ into, out.contiguous()
    return LowRank(down, up, through_means(down @ up, moments).bias)


def r2(fitted: Linear, moments: Moments, *, heads: int) -> Float[Tensor, " h"]:
    """Share of each head's variance that ``fitted`` explains on the rows of ``moments``.

    Within a head, dims weigh by their variance (scikit-learn's ``variance_weighted``). From
    moments alone: on rows that the fit never saw, this is its held-out R². A head that does not
    vary has R² 1 if it is predicted exactly, else 0.
    """
    whole = fitted.whole(len(moments.mean_x))
    weight, bias = whole.weight, whole.bias
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
