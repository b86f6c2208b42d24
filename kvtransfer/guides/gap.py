"""How far two caches of one prompt lie apart, and what that says of why.

At layer 0 a key depends on its token and its position, a value on its token alone, and neither on
what else was seen. A turned key keeps its length. So numbers tell a shifted position from a changed
content, and both from a mask.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Layers = tuple[tuple[Tensor, Tensor], ...]

CacheCause = Literal["contents", "positions", "mask"]
"""Those causes that caches tell of; :data:`kvtransfer.guides.rungs.Cause` has all of them."""

LENGTHS = {torch.float32: 1e-4, torch.float64: 1e-4}
"""Up to which relative difference of their lengths two keys are one key, turned differently."""

LENGTHS_ROUNDED = 2e-2
"""The same in half precision."""

TURNED = 0.05
"""Least relative difference of keys that stand a position apart: one pair of dims at least turns
by a radian there. Anything smaller is another number, not another place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGap:
    """Largest differences, relative to the largest number of each block."""

    hidden_keys: float
    """Layer 0, the guide's tokens."""
    hidden_values: float
    hidden_lengths: float
    """Of the lengths of layer 0's keys."""
    hidden_deeper: float
    """Keys and values of all other layers."""
    live_keys: float
    """The same of the prompt's tokens."""
    live_values: float
    live_deeper: float
    rounded: bool
    """Whether the caches are in half precision."""

    @classmethod
    def between(cls, one: Layers, other: Layers, hidden: int) -> "CacheGap | None":
        """Of two caches of one sequence; None where they are not of as many tokens."""
        if one[0][0].shape != other[0][0].shape:
            return None
        parts = slice(0, hidden), slice(hidden, None)
        (keys, values), (other_keys, other_values) = one[0], other[0]
        heads, lives = (
            (
                _apart(keys[:, :, part], other_keys[:, :, part]),
                _apart(values[:, :, part], other_values[:, :, part]),
                max(
                    (
                        _apart(ours[:, :, part], theirs[:, :, part])
                        for mine, yours in zip(one[1:], other[1:], strict=True)
                        for ours, theirs in zip(mine, yours, strict=True)
                    ),
                    default=0.0,
                ),
            )
            for part in parts
        )
        lengths = (each[:, :, :hidden].float().norm(dim=-1) for each in (keys, other_keys))
        return cls(
            hidden_keys=heads[0],
            hidden_values=heads[1],
            hidden_lengths=_apart(*lengths),
            hidden_deeper=heads[2],
            live_keys=lives[0],
            live_values=lives[1],
            live_deeper=lives[2],
            rounded=keys.dtype not in LENGTHS,
        )

    def cause(self, noise: float) -> CacheCause | None:
        """What a difference beyond ``noise`` (relative; 0 where the bits are owed) comes from.

        None where nothing differs after the prompt: then it arises in decoding.
        """
        if self.hidden_values > noise:
            return "contents"
        if self.hidden_keys > noise:
            lengths = LENGTHS_ROUNDED if self.rounded else LENGTHS[torch.float32]
            turned = self.hidden_keys > TURNED and self.hidden_lengths <= lengths
            return "positions" if turned else "contents"
        if self.live_values > noise:
            return "contents"
        if self.live_keys > noise:
            return "positions" if self.live_keys > TURNED else "contents"
        if self.hidden_deeper > noise:
            return "contents"
        return "mask" if self.live_deeper > noise else None


def _apart(one: Float[Tensor, "*s"], other: Float[Tensor, "*s"]) -> float:
    if not one.numel():
        return 0.0
    one, other = one.float(), other.float()
    return float((one - other).abs().max() / other.abs().max().clamp_min(1e-30))
