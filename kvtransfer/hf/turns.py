"""What one layer's keys do between two positions: the rotation of pairs that explains it."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kvtransfer.geometry.spec import Pairing, RotationSpec

TOLERANCE = {
    torch.float64: 1e-4,  # the tables are float32
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
"""Largest error that rounding explains: in single precision relative to the layer's largest
number, and in half precision, where noise grows through the layers, of norms."""

HALF_PRECISION = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one layer's keys were seen to do between position 0 and position p."""

    pairing: Pairing | None
    """None: they stay as they are. ``unknown``: no rotation of pairs explains what they do."""
    rotary_dim: int
    error: float
    """The largest difference that this leaves unexplained, over the largest key."""

    def __str__(self) -> str:
        if self.pairing is None:
            return "no rotation"
        if self.pairing == "unknown":
            return "something that no rotation of pairs explains"
        return f"{self.pairing} {self.rotary_dim}d"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerReading:
    """One layer's keys and values of the same tokens, at position 0 and at p."""

    keys: Float[Tensor, "n h 1 d"]
    keys_there: Float[Tensor, "n h 1 d"]
    values: Float[Tensor, "n h 1 e"]
    values_there: Float[Tensor, "n h 1 e"]

    def turn(self, believed: RotationSpec | None, tolerance: float) -> Turn:
        """The simplest explanation of what the keys did; what the config says is tried first."""
        start, end = (rows.flatten(0, 2).double() for rows in (self.keys, self.keys_there))
        by_norm = self.keys.dtype in HALF_PRECISION
        if (still := error_of(start, end, by_norm=by_norm)) <= tolerance:
            return Turn(pairing=None, rotary_dim=0, error=still)
        best = still
        for pairing, rotary_dim in _candidates(believed, start.shape[1]):
            error = _unexplained(start, end, pairing, rotary_dim, by_norm=by_norm)
            if error <= tolerance:
                return Turn(pairing=pairing, rotary_dim=rotary_dim, error=error)
            best = min(best, error)
        return Turn(pairing="unknown", rotary_dim=0, error=best)


def _candidates(believed: RotationSpec | None, width: int) -> Iterator[tuple[Pairing, int]]:
    """Rotations to try: what the config says, then every other one, the narrower first."""
    dims = [*range(2, width + 1, 2)]
    pairings: list[Pairing] = ["half", "interleaved"]
    if believed is not None:
        dims.insert(0, believed.rotary_dim)
        if believed.pairing == "interleaved":
            pairings.reverse()
    for rotary_dim in dims:
        for pairing in pairings:
            yield pairing, rotary_dim


def _unexplained(
    start: Tensor, end: Tensor, pairing: Pairing, rotary_dim: int, *, by_norm: bool
) -> float:
    """What the best turn and stretch of each pair (least squares) leaves of ``end``."""
    half = rotary_dim // 2
    if pairing == "half":
        left, right = slice(0, half), slice(half, rotary_dim)
    else:
        left, right = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
    x, y, u, v = start[:, left], start[:, right], end[:, left], end[:, right]
    # A pair without energy (a dead dim of a norm before it) may turn as it likes.
    energy = (x.square() + y.square()).sum(0).clamp_min(torch.finfo(x.dtype).tiny)
    cos, sin = (x * u + y * v).sum(0) / energy, (x * v - y * u).sum(0) / energy
    turned = torch.cat((x * cos - y * sin, y * cos + x * sin, start[:, rotary_dim:]), dim=1)
    return error_of(turned, torch.cat((u, v, end[:, rotary_dim:]), dim=1), by_norm=by_norm)


def error_of(actual: Tensor, expected: Tensor, *, by_norm: bool | None = None) -> float:
    """Largest difference over the largest number, or (in half precision) the same of norms.

    One that is not finite is infinitely wrong.
    """
    if by_norm is None:
        by_norm = actual.dtype in HALF_PRECISION
    size = torch.linalg.vector_norm if by_norm else lambda x: x.abs().max()
    wide = torch.promote_types(expected.dtype, torch.float32)
    scale = size(expected.to(wide)).clamp_min(torch.finfo(torch.float32).tiny)
    error = float(size(actual.to(wide) - expected.to(wide)) / scale)
    return error if error == error else float("inf")
