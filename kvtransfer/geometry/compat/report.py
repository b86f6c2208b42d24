"""Findings about a pair of models, and the one word that sums them up."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvtransfer.errors import IncompatibleModels
from kvtransfer.geometry.spec import ModelSpec
from kvtransfer.report import to_json


class Verdict(StrEnum):
    """How much one finding costs."""

    SAME = "same"
    MAPPED = "mapped"
    BLOCKED = "blocked"
    UNKNOWN = "unknown"


COLOURS = {
    Verdict.SAME: "green",
    Verdict.MAPPED: "yellow",
    Verdict.BLOCKED: "bold red",
    Verdict.UNKNOWN: "dim",
}

MEANINGS = {
    "reuse": "the cache can be read as it is",
    "map": "the cache can cross through a fitted mapping",
    "blocked": "no linear map can take the cache across",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing compared, and what it means for a transfer."""

    topic: str
    source: str
    target: str
    verdict: Verdict
    why: str = ""


@dataclass(frozen=True, slots=True)
class CompatReport:
    """The findings for one ordered pair of models. True where the cache can cross."""

    source: ModelSpec
    target: ModelSpec
    findings: tuple[Finding, ...]

    def __bool__(self) -> bool:
        return self.verdict != "blocked"

    @property
    def verdict(self) -> Literal["reuse", "map", "blocked"]:
        """``reuse`` needs every topic shown to be the same; what is unknown asks for a map."""
        verdicts = {finding.verdict for finding in self.findings}
        if Verdict.BLOCKED in verdicts:
            return "blocked"
        return "reuse" if verdicts == {Verdict.SAME} else "map"

    def raise_if_blocked(self) -> None:
        """Raise IncompatibleModels for the first finding that rules a transfer out."""
        for finding in self.findings:
            if finding.verdict is Verdict.BLOCKED:
                raise IncompatibleModels(
                    f"{self.source.name} → {self.target.name}: {finding.why} "
                    f"({finding.topic}: {finding.source} and {finding.target})",
                    hint="`kvtransfer check` shows every topic of this pair",
                )

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape that scripts rely on."""
        return {
            "verdict": self.verdict,
            "source": self.source.to_dict(),
            "target": self.target.to_dict(),
            "topics": [
                {
                    "topic": finding.topic,
                    "source": finding.source,
                    "target": finding.target,
                    "verdict": str(finding.verdict),
                    "why": finding.why,
                }
                for finding in self.findings
            ],
        }

    def to_json(self) -> str:
        """Stable text: two reports can be diffed."""
        return to_json(self.to_dict())

    def __rich__(self) -> Group:
        table = Table("", self.source.name, self.target.name, "verdict", "why")
        for f in self.findings:
            table.add_row(
                f.topic, f.source, f.target, Text(f.verdict, style=COLOURS[f.verdict]), f.why
            )
        return Group(table, Text(f"{self.verdict}: {MEANINGS[self.verdict]}", style="bold"))
