"""Mix a donor's keys and values with a cache's own."""

from dataclasses import dataclass

from kvtransfer.steering.donated import Donated
from kvtransfer.steering.edit import PARTS, Part, require_finite, require_one_of


@dataclass(frozen=True, slots=True, eq=False)
class Interpolate(Donated):
    """``1 - alpha`` of the cache and ``alpha`` of the donor (arXiv:2609.11020).

    At 0 not a bit changes, at 1 all is the donor's; beyond the two it extrapolates.
    """

    alpha: float
    part: Part = "both"

    def __post_init__(self) -> None:
        Donated.__post_init__(self)
        require_finite("alpha", self.alpha)
        require_one_of("part", self.part, PARTS)

    @property
    def weight(self) -> float:
        """As asked."""
        return self.alpha
