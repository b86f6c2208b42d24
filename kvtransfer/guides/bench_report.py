"""What each way to a prefix costs, as a table and as JSON."""

from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvtransfer.report import Estimate, Provenance, plain, to_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One way at one length."""

    tokens: int
    """Length of the prefix."""
    name: str
    seconds: float
    """Median, of one run, or of one token where it writes some."""
    against: str | None = None
    """What ``ratio`` is a ratio to; None for a way that others are compared with."""
    ratio: Estimate | None = None
    """Median over repeats; low and high are the smallest and the largest of them."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape that scripts rely on."""
        return {
            "tokens": self.tokens,
            "name": self.name,
            "seconds": self.seconds,
            "against": self.against,
            "ratio": plain(self.ratio),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """Costs as ratios within one run. True where restoring is cheaper than prefilling, always."""

    target: str
    source: str | None
    dtype: str
    device: str
    threads: int
    repeats: int
    costs: tuple[Cost, ...]
    left_out: tuple[str, ...]
    """Lengths and ways that were not measured, and why."""
    provenance: Provenance

    def __bool__(self) -> bool:
        ratios = [each.ratio for each in self.costs if each.name == "restore"]
        return bool(ratios) and all(ratio is not None and ratio.value < 1 for ratio in ratios)

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape that scripts rely on."""
        return {
            "target": self.target,
            "source": self.source,
            "dtype": self.dtype,
            "device": self.device,
            "threads": self.threads,
            "repeats": self.repeats,
            "costs": [each.to_dict() for each in self.costs],
            "left_out": list(self.left_out),
            "provenance": self.provenance.to_dict(),
        }

    def to_json(self) -> str:
        """Stable text: two reports can be diffed."""
        return to_json(self.to_dict())

    def __rich__(self) -> Group:
        lengths = sorted({each.tokens for each in self.costs})
        pair = self.target if self.source is None else f"{self.source} → {self.target}"
        table = Table(
            "cost",
            *(f"{length:,} tokens" for length in lengths),
            title=f"{pair} ({self.dtype}, {self.device}, threads: {self.threads}): medians of "
            f"{self.repeats} interleaved runs, with the smallest and the largest",
        )
        for column in table.columns[1:]:
            column.justify = "right"
        cells: dict[str, dict[int, str]] = {}
        for each in self.costs:
            cells.setdefault(_label(each), {})[each.tokens] = _cell(each)
        for label, row in cells.items():
            table.add_row(label, *(row.get(length, "–") for length in lengths))
        return Group(table, *(Text(f"Left out: {why}") for why in self.left_out))


def _label(cost: Cost) -> str:
    return f"{cost.name}, seconds" if cost.against is None else f"{cost.name} ÷ {cost.against}"


def _cell(cost: Cost) -> str:
    if cost.ratio is None:
        return f"{cost.seconds:.3g}"
    ratio = cost.ratio
    if ratio.low is None or ratio.high is None:
        return _ratio(ratio.value)
    return f"{_ratio(ratio.value)} ({_ratio(ratio.low)} to {_ratio(ratio.high)})"


def _ratio(value: float) -> str:
    """Small shares as one part of so many."""
    return f"1/{1 / value:,.0f}" if 0 < value < 0.1 else f"{value:.2f}"
