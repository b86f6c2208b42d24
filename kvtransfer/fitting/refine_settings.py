"""How to refine: one value that prints, compares, and is saved with the mapping.

This module knows no model and no mapping.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RefineSettings:
    """How to refine. Prints, compares, and is saved with the mapping."""

    windows: int = 240
    """Windows to train on, each used once."""
    batch: int = 1
    """Windows in a step: small models' gradients are noise one window at a time."""
    rank: int = 16
    """Of the update of each layer's keys and values."""
    prefix: int = 256
    """Tokens of a window that are mapped."""
    continuation: int = 128
    """Tokens after it, on which the target's predictions are compared."""
    learning_rate: float = 2e-3
    """Of Adam, after a short warm-up and before a cosine decay to zero."""
    heldout: int = 8
    """Windows that judge."""
    every: int = 40
    """Steps between judgements."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("windows", "batch", "rank", "continuation", "heldout", "every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.prefix < 2:
            raise ValueError(f"prefix must be at least 2, got {self.prefix}")
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be positive, got {self.learning_rate}")
