"""What refining found, judgement by judgement, as a table and as JSON.

This module knows neither how the maps were trained nor how they were judged.
"""

from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.report import to_json


@dataclass(frozen=True, slots=True)
class Judgement:
    """Held-out windows after some steps, in nats a token."""

    step: int
    kl: float
    nll: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RefineReport:
    """What refining found. True where the held-out KL fell; else the mapping is as it was."""

    mapping: KVMapping
    history: tuple[Judgement, ...]
    """The first is of the mapping as it came."""
    best: Judgement
    """The one whose maps were kept."""
    seconds: float

    def __bool__(self) -> bool:
        return self.best.kl < self.history[0].kl

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "history": [asdict(each) for each in self.history],
            "best": asdict(self.best),
            "seconds": self.seconds,
        }

    def to_json(self) -> str:
        """Stable text."""
        return to_json(self.to_dict())

    def __rich__(self) -> Table:
        table = Table(
            "step",
            "held-out KL to own",
            "held-out NLL",
            title="refined on the target's own predictions",
            caption=f"{self.seconds:.0f} s; → was kept",
        )
        for each in self.history:
            kept = "bold" if each == self.best else None
            step = f"→ {each.step}" if kept else str(each.step)
            table.add_row(step, f"{each.kl:.4f}", f"{each.nll:.4f}", style=kept)
        return table
