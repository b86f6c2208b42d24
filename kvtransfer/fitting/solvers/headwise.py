"""Head to head: target head h reads source head h of the chosen layers, and no other."""

from dataclasses import dataclass
from typing import ClassVar

from kvtransfer.fitting.affine import PerHead
from kvtransfer.fitting.columns import Heads
from kvtransfer.fitting.moments import Moments
from kvtransfer.fitting.solvers.damped import Damping, Scale
from kvtransfer.fitting.solvers.perhead import of_head, reads, side_by_side
from kvtransfer.fitting.solvers.ridge import Ridge


@dataclass(frozen=True, slots=True)
class Headwise:
    """Ridge, once a head, from the same head of the source: smaller by the number of heads.

    Attributes:
        strength: As :class:`~kvtransfer.fitting.solvers.ridge.Ridge`'s.
        scale: Likewise.
    """

    name: ClassVar[str] = "headwise"

    strength: float = 1e-3
    scale: Scale = "relative"

    def __post_init__(self) -> None:
        Damping(self.strength, self.scale)

    def solve(self, moments: Moments, heads: Heads) -> PerHead:
        """The fitted map, in double precision.

        Raises:
            UnderdeterminedFit: as Ridge's, for the features of one head.
        """
        columns = reads(heads)
        ridge = Ridge(self.strength, self.scale)
        weights = [
            ridge.solve(of_head(moments, heads, head, each)).weight
            for head, each in enumerate(columns)
        ]
        return side_by_side(columns, weights, moments)
