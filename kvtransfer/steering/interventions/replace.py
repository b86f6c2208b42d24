"""Put a donor's keys and values in place of a cache's own."""

from dataclasses import dataclass

from kvtransfer.steering.donated import Donated
from kvtransfer.steering.edit import PARTS, Part, require_one_of


@dataclass(frozen=True, slots=True, eq=False)
class Replace(Donated):
    """The donor's, wherever it is chosen (persona transplantation: arXiv:2609.11020)."""

    part: Part = "both"

    def __post_init__(self) -> None:
        Donated.__post_init__(self)
        require_one_of("part", self.part, PARTS)

    @property
    def weight(self) -> float:
        """All of it."""
        return 1.0
