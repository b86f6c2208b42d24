"""Reduced-rank regression (Izenman 1975): the best map of a given rank."""

from dataclasses import dataclass
from typing import ClassVar

from kvtransfer.fitting.affine import LowRank, reduce_rank
from kvtransfer.fitting.columns import Heads
from kvtransfer.fitting.moments import Moments
from kvtransfer.fitting.solvers.damped import Damping, Scale
from kvtransfer.fitting.solvers.ridge import Ridge


@dataclass(frozen=True, slots=True)
class ReducedRank:
    """Ridge under a bound on the rank of W, which is the SVD of the whitened ridge, cut.

    Attributes:
        rank: At most this.
        strength: As :class:`~kvtransfer.fitting.solvers.ridge.Ridge`'s.
        scale: Likewise.
    """

    name: ClassVar[str] = "lowrank"

    rank: int
    strength: float = 1e-3
    scale: Scale = "relative"

    def __post_init__(self) -> None:
        Damping(self.strength, self.scale)
        if self.rank < 1:
            raise ValueError(f"rank must be positive, got {self.rank}")

    def solve(self, moments: Moments, heads: Heads | None = None) -> LowRank:
        """The fitted map, in double precision.

        Raises:
            UnderdeterminedFit: as Ridge's.
        """
        whole = Ridge(self.strength, self.scale).solve(moments)
        damping = Damping(self.strength, self.scale).on(moments)
        return reduce_rank(whole, moments, self.rank, damping=damping)
