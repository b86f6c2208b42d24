"""Each window's keys and values as a ridge fitted to the other windows makes them, by its kernel.

Rows are far fewer than features here, so the fit is solved in its dual form, and leaving a window
out of it costs no new fit. This module knows no model and no text: rows go in, rows come out.
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from kvtransfer.measures.intervals import SEED

STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0, 1e1, 1e2, 1e3, math.inf)
"""Of the ridge, relative to the kernel's mean eigenvalue. The last knows average tokens only."""

DIRECTIONS = 32
"""Random directions of a layer's keys or values that a strength is chosen by, in place of all."""

Rows = Float[Tensor, "_w _t _p"]
"""Windows, their tokens, and what a layer keeps of a token, its heads side by side."""


def average(rows: Rows) -> Rows:
    """For each window, the average token of the others; at position 0, their average there.

    Many models make a sink of the token at position 0, with keys and values many times as large as
    all others', whatever the token is.
    """
    windows, length = rows.shape[:2]
    first, rest = rows[:, :1], rows[:, 1:].mean(1, keepdim=True)
    of_others = [(each.sum(0) - each) / (windows - 1) for each in (first, rest)]
    return torch.cat((of_others[0], of_others[1].expand(-1, length - 1, -1)), dim=1)


def leave_out(given: Sequence[Rows], wanted: Sequence[Rows]) -> list[Rows]:
    """What a ridge fitted to the other windows makes of each window.

    All of ``given`` is read for each of ``wanted``, whose strengths are chosen by the other windows
    likewise left out. Position 0 takes no part (see :func:`average`, which fills it): its rows
    would outweigh all others.
    """
    ridge = _Ridge([rows[:, 1:] for rows in given])
    random = torch.Generator().manual_seed(SEED)
    return [
        torch.cat((average(rows)[:, :1], ridge.leave_out(rows[:, 1:], random).to(rows)), dim=1)
        for rows in wanted
    ]


class _Ridge:
    """Ridge regression with a constant, in its dual form, leaving windows out in closed form.

    With H = 11ᵀ/n + U diag(s/(s+λ)) Uᵀ the fit to all rows, of which the kernel of centred rows is
    U diag(s) Uᵀ, the residuals of window w under the fit to the others are (I − H_ww)⁻¹(y − Hy)_w.
    """

    def __init__(self, given: Sequence[Rows]) -> None:
        self.windows, self.length = given[0].shape[:2]
        n = self.windows * self.length
        kernel = torch.zeros(n, n, dtype=torch.float64)
        for rows in given:
            centred = _centred(rows)
            # Each layer's keys and values count alike. By the median row: a few tokens' are huge.
            size = centred.square().sum(1).median().clamp_min(1e-24)
            kernel += centred @ centred.mT / size
        spectrum, self.basis = torch.linalg.eigh(kernel)
        spectrum = spectrum.clamp_min(0)
        scale = spectrum.mean().clamp_min(1e-24)
        self.shrink = [spectrum / (spectrum + strength * scale) for strength in STRENGTHS]
        by_window = self.basis.view(self.windows, self.length, n)
        unit = torch.eye(self.length, dtype=torch.float64) - 1 / n
        self.undo = [
            torch.linalg.inv(unit - (by_window * shrink) @ by_window.mT) for shrink in self.shrink
        ]

    def leave_out(self, wanted: Rows, random: torch.Generator) -> Rows:
        """Each window as the fit to the others has it."""
        y = _centred(wanted)
        y_in_basis = self.basis.mT @ y
        directions = torch.randn(y.shape[1], DIRECTIONS, generator=random, dtype=torch.float64)
        few, few_in_basis = y @ directions, y_in_basis @ directions
        losses = torch.stack(
            [
                self._residuals(few, few_in_basis, strength).square().sum((1, 2))
                for strength in range(len(STRENGTHS))
            ]
        )
        chosen = (losses.sum(1, keepdim=True) - losses).argmin(0)
        made = torch.empty(wanted.shape, dtype=torch.float64)
        for strength in chosen.unique().tolist():
            here = chosen == strength
            made[here] = wanted[here] - self._residuals(y, y_in_basis, strength)[here]
        return made

    def _residuals(self, y: Tensor, in_basis: Tensor, strength: int) -> Tensor:
        fitted = self.basis @ (self.shrink[strength][:, None] * in_basis)
        by_window = (y - fitted).view(self.windows, self.length, -1)
        residuals: Tensor = self.undo[strength] @ by_window
        return residuals


def _centred(rows: Rows) -> Float[Tensor, "n p"]:
    flat = rows.flatten(0, 1).double()
    return flat - flat.mean(0)
