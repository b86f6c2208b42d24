"""The ablation matrix as a table and as JSON."""

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvtransfer.measures.intervals import Column, mean
from kvtransfer.report import Estimate, Provenance, to_json

METRICS = (
    ("nll", "NLL of the answer", ".3f"),
    ("kl", "KL to intact", ".3f"),
    ("mass", "softmax on the guide", ".1%"),
    ("accuracy", "answered right", ".0%"),
)
ANSWERS_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Answers:
    """What was written in answer to one question, by row of the matrix."""

    guide: str
    prompt: str
    expect: str
    texts: dict[str, str]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AblationReport:
    """What is left of a guide. True where what was removed takes no part in the softmax."""

    model: str
    layers: str
    columns: dict[str, dict[str, Column]]
    """Per row and metric, one number a question."""
    answers: tuple[Answers, ...]
    removed_to_none: float | None
    """Largest difference of a logit between the guide removed and the run without it, at the same
    positions; None where it was removed from some layers only."""
    provenance: Provenance

    def __bool__(self) -> bool:
        return not self.columns["removed"]["mass"].any()

    @property
    def n(self) -> int:
        """Questions."""
        return len(self.columns["intact"]["nll"])

    def estimates(self, row: str) -> dict[str, Estimate]:
        """The means over questions, with intervals."""
        return {metric: mean(column) for metric, column in self.columns[row].items()}

    def sentence(self) -> str:
        """What the matrix shows, in one sentence."""
        zeroed, removed = self.estimates("keys zeroed"), self.estimates("removed")
        said = (
            f"Keys of zero still take {zeroed['mass']:.0%} of the softmax, and are "
            f"{zeroed['kl'].value:.2f} nats from the intact guide where its removal is "
            f"{removed['kl'].value:.2f}"
        )
        if self.removed_to_none is not None:
            said += (
                "; removed, the logits are within "
                f"{self.removed_to_none:.1e} of those of the run without it"
            )
        return f"{said} (n = {self.n})."

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape that scripts rely on."""
        return {
            "provenance": self.provenance.to_dict(),
            "model": self.model,
            "layers": self.layers,
            "n": self.n,
            "removed_to_none": self.removed_to_none,
            "conditions": {
                row: {metric: each.to_dict() for metric, each in self.estimates(row).items()}
                for row in self.columns
            },
            "items": {
                row: {metric: column.tolist() for metric, column in found.items()}
                for row, found in self.columns.items()
            },
            "answers": [asdict(each) for each in self.answers],
        }

    def to_json(self) -> str:
        """Stable text."""
        return to_json(self.to_dict())

    def __rich__(self) -> Group:
        where = "all layers" if self.layers == "all" else f"layers {self.layers}"
        table = Table(
            "the guide",
            *(header for _, header, _ in METRICS),
            title=f"What is left of a guide: {self.model}, {where}",
            caption=f"n = {self.n} questions; bootstrap 95 % intervals over them. Softmax: a "
            "mean over live tokens, heads and layers; the guide's first token, a sink, counts",
        )
        for row in self.columns:
            found = self.estimates(row)
            cells = [
                "–" if row == "none" and metric == "mass" else format(found[metric], form)
                for metric, _, form in METRICS
            ]
            table.add_row(row, *cells)
        parts: list[RenderableType] = [table]
        if self.answers:
            written = Table("question", "right", *self.columns, title="answers in free text")
            for each in self.answers[:ANSWERS_SHOWN]:
                texts = (Text(each.texts[row]) for row in self.columns)
                written.add_row(Text(each.prompt.strip()), Text(each.expect), *texts)
            parts.append(written)
        return Group(*parts, Text(self.sentence(), style="bold"))
