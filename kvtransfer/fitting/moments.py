"""Joint first and second moments of paired features: all that a closed-form fit needs.

They add: the moments of a corpus are the sum of the moments of its batches, in any order, on any
number of machines. Axes: ``n`` rows, ``p`` source features, ``q`` target features.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

STRIPS = 4
"""The scatter is symmetric: by strips from the diagonal on, it is (1 + 1/STRIPS)/2 of the work."""


@dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Count, means and centred scatter of rows x and y, in double precision.

    Scatter is centred as it is gathered. The textbook shortcut, Σxxᵀ − n·x̄x̄ᵀ, subtracts two large
    numbers and loses the small one between them.
    """

    n: int
    mean_x: Float[Tensor, " p"]
    mean_y: Float[Tensor, " q"]
    xx: Float[Tensor, "p p"]
    xy: Float[Tensor, "p q"]
    yy: Float[Tensor, " q"]
    """The diagonal only: no fit here needs how targets vary together."""

    @classmethod
    def of(cls, x: Float[Tensor, "n p"], y: Float[Tensor, "n q"]) -> "Moments":
        """Moments of one batch."""
        accumulator = Accumulator(x.shape[1], y.shape[1])
        accumulator.add(x, y)
        return accumulator.moments()

    def __add__(self, other: "Moments") -> "Moments":
        """Moments of both samples together (Chan, Golub & LeVeque 1979)."""
        n = self.n + other.n
        dx, dy = other.mean_x - self.mean_x, other.mean_y - self.mean_y
        between = self.n * other.n / n
        return Moments(
            n=n,
            mean_x=self.mean_x + dx * (other.n / n),
            mean_y=self.mean_y + dy * (other.n / n),
            xx=self.xx + other.xx + between * torch.outer(dx, dx),
            xy=self.xy + other.xy + between * torch.outer(dx, dy),
            yy=self.yy + other.yy + between * dy.square(),
        )

    def counted_as(self, n: int) -> "Moments":
        """The same, of rows that count for ``n`` rows together; for none, what adds nothing."""
        share = n / self.n
        return replace(self, n=n, xx=self.xx * share, xy=self.xy * share, yy=self.yy * share)

    def more_varied_than(self, other: "Moments") -> int:
        """How many times the variance of these targets is that of ``other``'s; 1 at least."""
        ours, theirs = (float(each.yy.sum()) / max(1, each.n - 1) for each in (self, other))
        return max(1, int(min(ours / max(theirs, 1e-30), 2**31))) if other.n > 1 else 1

    def select(self, x: Int[Tensor, " p_"], y: Int[Tensor, " q_"]) -> "Moments":
        """The moments of some features only, in the order given."""
        return replace(
            self,
            mean_x=self.mean_x[x],
            mean_y=self.mean_y[y],
            xx=self.xx[x[:, None], x],
            xy=self.xy[x[:, None], y],
            yy=self.yy[y],
        )

    def targets(self, y: Int[Tensor, " q_"]) -> "Moments":
        """The moments of some target features only; the source's are shared, not copied."""
        return replace(self, mean_y=self.mean_y[y], xy=self.xy[:, y], yy=self.yy[y])

    def with_targets_of(
        self, whole: "Moments", x: Int[Tensor, " p"], y: Int[Tensor, " q_"]
    ) -> "Moments":
        """Other target features from the moments that these source features were selected from."""
        return replace(self, mean_y=whole.mean_y[y], xy=whole.xy[x[:, None], y], yy=whole.yy[y])


class Accumulator:
    """Gathers moments batch by batch in place: mutable, and thrown away after the capture.

    Args:
        p: Source features.
        q: Target features.
        products: The dtype in which one batch's centred rows are multiplied. Sums over batches are
            in double precision either way; float32 products halve the time, and lose about seven
            digits of each batch's scatter.
        device: Where the sums are kept.
    """

    def __init__(
        self,
        p: int,
        q: int,
        *,
        products: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> None:
        self._n = 0
        self._products = products
        self._mean_x, self._mean_y, self._yy = (
            torch.zeros(width, dtype=torch.float64, device=device) for width in (p, q, q)
        )
        self._xx = torch.zeros(p, p, dtype=torch.float64, device=device)  # upper strips only
        self._xy = torch.zeros(p, q, dtype=torch.float64, device=device)
        step = -(-p // STRIPS)
        self._strips = [slice(start, min(start + step, p)) for start in range(0, p, step)]

    def add(
        self,
        x: Float[Tensor, "n p"],
        y: Float[Tensor, "n _q"],
        *,
        weight: Float[Tensor, " n"] | None = None,
    ) -> None:
        """Take one batch of rows in.

        A batch may leave out the last target features. They are taken to stand at their mean there:
        they add nothing to their sums, and cost nothing.

        Args:
            x: Source features.
            y: Target features.
            weight: How much each row counts, positive; their mean is taken to be one, so that a
                batch counts as many rows as it has.
        """
        if len(x) == 0:
            return
        x, y = x.to(self._products), y.to(self._products)
        if weight is None:
            mean_x, mean_y = (each.mean(0, dtype=torch.float64) for each in (x, y))
            x, y = x - mean_x.to(x), y - mean_y.to(y)
        else:
            share = weight.double() / weight.double().sum()
            mean_x, mean_y = ((share @ each.double()) for each in (x, y))
            root = (share * len(x)).sqrt()[:, None].to(x)
            x, y = (x - mean_x.to(x)) * root, (y - mean_y.to(y)) * root
        n = self._n + len(x)
        between = self._n * len(x) / n
        given = y.shape[1]
        dx, dy = mean_x - self._mean_x, mean_y - self._mean_y[:given]
        for strip in self._strips:
            corner = self._xx[strip, strip.start :]
            corner += x[:, strip].mT @ x[:, strip.start :]
            corner.addr_(dx[strip], dx[strip.start :], alpha=between)
        self._xy[:, :given] += x.mT @ y
        self._xy[:, :given].addr_(dx, dy, alpha=between)
        self._yy[:given] += y.square().sum(0, dtype=torch.float64) + between * dy.square()
        self._mean_x += dx * (len(x) / n)
        self._mean_y[:given] += dy * (len(x) / n)
        self._n = n

    def moments(self) -> Moments:
        """What was gathered; the accumulator is spent."""
        for strip in self._strips:
            self._xx[strip.stop :, strip] = self._xx[strip, strip.stop :].mT
        return Moments(self._n, self._mean_x, self._mean_y, self._xx, self._xy, self._yy)
