"""Interventions as text, for commands and for the names of conditions: ``Scale(0.5)+Lag(2)``."""

import ast
from collections.abc import Mapping
from inspect import signature
from typing import Any

from kvtransfer.errors import SteeringError
from kvtransfer.steering.chain import chain
from kvtransfer.steering.edit import Intervention
from kvtransfer.steering.interventions import INTERVENTIONS

KNOWN: Mapping[str, type] = {each.__name__: each for each in INTERVENTIONS}


def parse(text: str, bound: Mapping[str, Any] | None = None) -> Intervention:
    """The intervention that ``text`` describes, its steps from left to right.

    Arguments are numbers, tuples, None, quoted or plain words, and the names of ``bound``. Nothing
    is evaluated.

    >>> parse("Ablate(removed, layers=mid)")
    >>> parse("Steer(v, 1.5)+Scale(0.5, values)", {"v": vector})

    Raises:
        SteeringError: there is no such intervention or name, or its arguments are not as it takes
            them.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise _unread(text, str(error.msg)) from None
    except (RecursionError, MemoryError):
        raise _unread(text, "it goes too deep") from None
    return chain(*(_step(node, text, bound or {}) for node in _terms(tree)))


def terms(text: str) -> list[str]:
    """The parts between the ``+`` that stand outside of all brackets."""
    return _split(text, "+")


def entries(text: str) -> list[str]:
    """The parts of a list between the commas that stand outside of all brackets."""
    return _split(text, ",")


def _split(text: str, at: str) -> list[str]:
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([") - (letter in ")]")
        if letter == at and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _terms(tree: ast.expr) -> list[ast.expr]:
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
        return [*_terms(tree.left), *_terms(tree.right)]
    return [tree]


def _step(node: ast.expr, text: str, bound: Mapping[str, Any]) -> Intervention:
    if isinstance(node, ast.Name) and node.id in bound:
        step: Intervention = bound[node.id]
        if not callable(step):
            raise _unread(text, f"{node.id} is a {type(step).__name__} and edits no cache alone")
        return step
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise _unread(text, f"{ast.unparse(node)!r} is no intervention")
    kind = KNOWN.get(node.func.id)
    if kind is None:
        raise SteeringError(
            f"no intervention is called {node.func.id!r}", hint=f"there are {', '.join(KNOWN)}"
        )
    names = [each.arg for each in node.keywords]
    if twice := [name for name in names if names.count(name) > 1]:
        raise _unread(text, f"{kind.__name__}: {twice[0]} is given twice")
    given = [_value(argument, text, bound) for argument in node.args]
    named = {each.arg or "**": _value(each.value, text, bound) for each in node.keywords}
    try:
        signature(kind).bind(*given, **named)
    except TypeError as error:
        raise _unread(text, f"{kind.__name__}: {error}") from None
    made: Intervention = kind(*given, **named)
    return made


def _value(node: ast.expr, text: str, bound: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return bound.get(node.id, {"nan": float("nan"), "inf": float("inf")}.get(node.id, node.id))
    if isinstance(node, ast.BinOp):  # a band: 3-7, or 9-20/32
        return ast.unparse(node).replace(" ", "")
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise _unread(text, f"{ast.unparse(node)!r} is no number, word or tuple") from None


def _unread(text: str, why: str) -> SteeringError:
    shown = text if len(text) <= 80 else f"{text[:79]}…"
    return SteeringError(
        f"cannot read the intervention {shown!r}: {why}",
        hint="as in Ablate(removed, layers=mid), or Scale(0.5, values)+Lag(2)",
    )
