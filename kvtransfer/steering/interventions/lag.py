"""Let a cache run behind itself."""

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import SteeringError
from kvtransfer.steering.layers import is_whole
from kvtransfer.steering.moved import Moved


@dataclass(frozen=True, slots=True)
class Lag(Moved):
    """Each chosen token holds what stood ``n`` chosen tokens before it, and the first ``n`` of them
    what the very first holds (arXiv:2609.11020)."""

    n: int

    def __post_init__(self) -> None:
        Moved.__post_init__(self)
        if not is_whole(self.n) or self.n < 0:
            raise SteeringError(f"a lag of {self.n!r} tokens", hint="a whole number from 0 on")

    @property
    def idle(self) -> bool:
        """Not behind at all."""
        return self.n == 0

    def sources(self, count: int) -> Int[Tensor, " n"]:
        """So many before."""
        return (torch.arange(count) - self.n).clamp_min(0)
