"""Put tokens in each other's places."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import SteeringError
from kvtransfer.steering.edit import whole
from kvtransfer.steering.layers import is_whole
from kvtransfer.steering.moved import Moved


@dataclass(frozen=True, slots=True)
class Shuffle(Moved):
    """The chosen tokens in another order, the same one in all layers (arXiv:2609.11020).

    What each layer holds is then the right tokens' in the wrong places: if an effect survives it,
    order had no part in it.
    """

    seed: int = 0
    order: tuple[int, ...] | None = field(default=None, kw_only=True)
    """For each chosen token, counted from 0, the one that it takes from; drawn if not given."""

    def __post_init__(self) -> None:
        Moved.__post_init__(self)
        if not is_whole(self.seed) or not -(2**63) <= self.seed < 2**63:
            raise SteeringError(f"a seed of {self.seed!r}", hint="a whole number of 64 bits")
        if self.order is not None:
            object.__setattr__(self, "order", whole("order", self.order, "order=(2, 0, 1)"))

    def sources(self, count: int) -> Int[Tensor, " n"]:
        """The order as given, or as drawn.

        Raises:
            SteeringError: a given one is no order of so many tokens.
        """
        if self.order is None:
            return torch.randperm(count, generator=torch.Generator().manual_seed(self.seed))
        if sorted(self.order) != list(range(count)):
            raise SteeringError(
                f"the order {self.order} is none of {count} tokens",
                hint="name every one of them once, from 0 on",
            )
        return torch.tensor(self.order).long()
