"""What eval may measure beside text and guides: each a value that options ask for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from kvtransfer.evaluation.part import Part
    from kvtransfer.fitting.mapping import KVMapping
    from kvtransfer.hf.model import LanguageModel


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Asked:
    """What is evaluated, and how much of it: all that a measure may need."""

    source: "LanguageModel"
    target: "LanguageModel"
    mapping: "KVMapping | None"
    """From the one to the other, or insisted to be."""
    rivals: "Mapping[str, KVMapping]"
    conditions: tuple[str, ...] | None
    """Those that were named; None for the usual ones of each measure."""
    alone: bool
    """Whether neither text nor guides nor a protocol is measured: all conditions are for this."""
    bound: Mapping[str, Any]
    """What edits may name."""
    prefix: int
    continuation: int
    items: int
    insist: bool
    """Whether mappings are to be used on other weights than their own."""


class Measure(Protocol):
    """Something to measure."""

    @property
    def key(self) -> str:
        """Under which the report has it, in JSON too."""

    def steps(self, items: int) -> int:
        """How often :meth:`part` tells of progress, at most."""

    def check(self, asked: Asked) -> None:
        """Refuse, before anything is measured, what :meth:`part` would refuse after it."""

    def part(self, asked: Asked, progress: Callable[[], None]) -> "Part":
        """Measure it."""
