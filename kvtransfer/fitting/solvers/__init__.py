"""Closed-form fits: moments in, one map out. To add one: write the class, name it in EVERY."""

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from kvtransfer.fitting.problem import Solver
from kvtransfer.fitting.solvers.attention import Attention
from kvtransfer.fitting.solvers.damped import Damping, Scale
from kvtransfer.fitting.solvers.headwise import Headwise
from kvtransfer.fitting.solvers.procrustes import Procrustes
from kvtransfer.fitting.solvers.reduced_rank import ReducedRank
from kvtransfer.fitting.solvers.ridge import Ridge

EVERY: tuple[type[Solver], ...] = (Ridge, Headwise, Procrustes, ReducedRank, Attention)
"""Every solver that needs nothing but moments."""

SOLVERS: Mapping[str, type[Solver]] = MappingProxyType({each.name: each for each in EVERY})
"""The same by name."""


def solver(name: str, **settings: Any) -> Solver:
    """The named solver with those of ``settings`` that it has."""
    return SOLVERS[name](**{key: settings[key] for key in settings.keys() & fields_of(name)})


def fields_of(name: str) -> frozenset[str]:
    """What can be set of the named solver; nothing where there is none in closed form."""
    kind: Any = SOLVERS.get(name)
    return frozenset() if kind is None else frozenset(each.name for each in fields(kind))


def weighs(name: str) -> bool:
    """Whether the named solver weighs errors by what the target's queries see of them."""
    return bool(getattr(SOLVERS.get(name), "weighs", False))


__all__ = [
    "EVERY",
    "SOLVERS",
    "Attention",
    "Damping",
    "Headwise",
    "Procrustes",
    "ReducedRank",
    "Ridge",
    "Scale",
    "Solver",
    "fields_of",
    "solver",
    "weighs",
]
