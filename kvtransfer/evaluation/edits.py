"""Conditions that edit the prefix of another: ``mapped+Steer(v,1.0)``."""

from collections.abc import Iterable, Mapping
from typing import Any

from kvtransfer.evaluation.conditions import CONDITIONS
from kvtransfer.steering.edit import Intervention
from kvtransfer.steering.expression import parse, terms


def edits_of(
    conditions: Iterable[str], bound: Mapping[str, Any], *, others: Iterable[str] = ()
) -> dict[str, tuple[str, Intervention]]:
    """Of each condition with a ``+``, the condition that it begins with, and its edit.

    Args:
        conditions: Names; those without ``+`` are passed over.
        bound: What the edits may name: vectors, donors, interventions.
        others: Further conditions that may be edited: mappings and packs.

    Raises:
        ValueError: what it begins with is no condition.
        SteeringError: the rest is no intervention.
    """
    found, known = {}, (*CONDITIONS, *others)
    for name in conditions:
        base, *steps = terms(name)
        if not steps:
            continue
        if base not in known:
            raise ValueError(f"no condition {base}; there are {', '.join(known)}")
        found[name] = (base, parse("+".join(steps), bound))
    return found
