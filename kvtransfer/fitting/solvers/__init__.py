"""Closed-form fits: moments in, one map out. To add one: write it, name it in SOLVERS."""

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Literal

from kvtransfer.fitting.columns import Solver
from kvtransfer.fitting.solvers.attention import Attention
from kvtransfer.fitting.solvers.damped import Damping, Scale
from kvtransfer.fitting.solvers.headwise import Headwise
from kvtransfer.fitting.solvers.procrustes import Procrustes
from kvtransfer.fitting.solvers.reduced_rank import ReducedRank
from kvtransfer.fitting.solvers.ridge import Ridge

ClosedForm = Literal["ridge", "headwise", "procrustes", "lowrank", "attention"]


SOLVERS: Mapping[ClosedForm, type[Solver]] = MappingProxyType(
    {
        "ridge": Ridge,
        "headwise": Headwise,
        "procrustes": Procrustes,
        "lowrank": ReducedRank,
        "attention": Attention,
    }
)
"""Every solver that needs nothing but moments."""


def solver(name: ClosedForm, **settings: Any) -> Solver:
    """The named solver with those of ``settings`` that it has."""
    kind = SOLVERS[name]
    mine = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{key: value for key, value in settings.items() if key in mine})


__all__ = [
    "SOLVERS",
    "Attention",
    "ClosedForm",
    "Damping",
    "Headwise",
    "Procrustes",
    "ReducedRank",
    "Ridge",
    "Scale",
    "Solver",
    "solver",
]
