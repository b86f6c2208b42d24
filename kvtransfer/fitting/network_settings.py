"""How to train networks: one value that prints, compares, and is saved with the mapping.

This module knows no model and no mapping.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSettings:
    """How to train the networks. Prints, compares, and is saved with the mapping."""

    hidden: int = 1024
    """Width of both hidden layers."""
    epochs: int = 8
    """Times that every row is seen; the best epoch on held-out rows is kept."""
    batch: int = 256
    """Rows in a step."""
    learning_rate: float = 2e-3
    """Of Adam at first; it decays to zero along a cosine."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("hidden", "epochs", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")
