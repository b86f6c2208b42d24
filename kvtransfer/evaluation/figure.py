"""What a part of an evaluation may show on the page: curves and tables, as plain values.

A part that has a method ``figures()`` is drawn so; of any other, its table is set as text.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvtransfer.report import Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a curve."""

    name: str
    points: tuple[tuple[float, Estimate], ...]
    """Where on the x axis, in ascending order, and what was found there."""
    control: bool = False
    """Whether this is a floor, a ceiling or another thing to compare with; it is drawn quieter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Something measured at several places: turn by turn, layer by layer, by length."""

    title: str
    x: str
    """What the x axis counts, such as ``turn``."""
    y: str
    """What was measured, with its unit."""
    series: tuple[Series, ...]
    form: str = ".3f"
    """How its numbers are written, as of :func:`format`."""
    note: str = ""
    """What a reader must know: how many items, which way is better."""


Cell = Estimate | float | str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """A table; the first cell of a row names it."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    forms: tuple[str, ...]
    """How the numbers of each column are written; one a column, the first is not used."""
    note: str = ""


Figure = Curve | Listing


@runtime_checkable
class Drawn(Protocol):
    """A part that knows how it wants to be shown."""

    def figures(self) -> tuple[Figure, ...]:
        """What the page draws of it, in this order."""
