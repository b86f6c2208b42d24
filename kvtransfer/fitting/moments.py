"""Joint first and second moments of paired features: all that a closed-form fit needs.

They add: the moments of a corpus are the sum of the moments of its batches, in any order, on any
number of machines. Axes: ``n`` rows, ``p`` source features, ``q`` target features.
"""

from dataclasses import dataclass, replace

from jaxtyping import Float, Int
from torch import Tensor


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
        x, y = x.double(), y.double()
        empty = len(x) == 0
        mean_x, mean_y = (each.sum(0) if empty else each.mean(0) for each in (x, y))
        x, y = x - mean_x, y - mean_y
        return cls(len(x), mean_x, mean_y, x.mT @ x, x.mT @ y, y.square().sum(0))

    def __add__(self, other: "Moments") -> "Moments":
        """Moments of both samples together (Chan, Golub & LeVeque 1979)."""
        n = self.n + other.n
        dx, dy = other.mean_x - self.mean_x, other.mean_y - self.mean_y
        between = self.n * other.n / n
        return Moments(
            n=n,
            mean_x=self.mean_x + dx * (other.n / n),
            mean_y=self.mean_y + dy * (other.n / n),
            xx=(self.xx + other.xx).addr_(dx, dx, alpha=between),
            xy=(self.xy + other.xy).addr_(dx, dy, alpha=between),
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

    @property
    def diagonal(self) -> Float[Tensor, " p"]:
        """The scatter of each source feature."""
        return self.xx.diagonal()

    def targets(self, y: Int[Tensor, " q_"]) -> "Moments":
        """The moments of some target features only; the source's are shared, not copied."""
        return replace(self, mean_y=self.mean_y[y], xy=self.xy[:, y], yy=self.yy[y])
