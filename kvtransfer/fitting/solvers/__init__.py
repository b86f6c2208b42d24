"""Closed-form fits: moments in, one affine map out. To add one: write it, name it in SOLVERS."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from kvtransfer.fitting.affine import Affine
from kvtransfer.fitting.moments import Moments
from kvtransfer.fitting.solvers.ridge import Ridge


class Solver(Protocol):
    """Anything that turns moments into a map. Its fields are its settings."""

    def solve(self, moments: Moments) -> Affine:
        """The fitted map."""
        ...


SOLVERS: Mapping[str, type[Ridge]] = MappingProxyType({"ridge": Ridge})
"""Every solver the command line offers."""

__all__ = ["SOLVERS", "Ridge", "Solver"]
