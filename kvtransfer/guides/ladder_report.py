"""The exactness ladder's result: a table of rungs, where runs part, and a verdict in words."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvtransfer.guides.arms import ARMS
from kvtransfer.guides.climb import OWED, Comparison, Parting
from kvtransfer.guides.rungs import (
    CAUSES,
    RUNGS,
    Cause,
    Finding,
    Noise,
    Rung,
    cause_of,
    judge,
    shown,
)
from kvtransfer.report import Provenance, to_json

DIFFER = {
    ("A", "B"): "no cache, cache",
    ("B", "D"): "in one go, guide apart",
    ("B2", "D"): "in the same two pieces",
    ("D", "P"): "own, out of a pack",
}
"""In what the arms of each pair differ."""

STYLES = {"equal": "green", "noise": "", "parted": "yellow", "fault": "bold red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The first rung on which two arms are apart by more than rounding, and why."""

    rung: Rung | None
    pair: tuple[str, str] | None
    cause: Cause | None
    fault: bool

    def sentence(self, noise: Noise) -> str:
        """What it means."""
        if self.rung is None or self.pair is None or self.cause is None:
            return (
                "No rung separates the arms. Where they owe each other the same bits they have "
                f"them; elsewhere logits differ by rounding (up to {shown(noise.measured)} between "
                "recomputing and decoding), and all write the same tokens."
            )
        pair = " and ".join(self.pair)
        where = f"'{self.rung}', where {pair} part. The cause is {CAUSES[self.cause]}"
        if self.fault:
            return f"FAULT. The first rung that separates is {where}."
        return (
            f"No fault. The first rung that separates is {where}. Each time the best tokens were "
            "nearer to each other than rounding, or a draw fell that near to an edge."
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Climb:
    """All guides in one dtype, by one attention implementation."""

    dtype: str
    attention: str
    comparisons: tuple[Comparison, ...]
    noise: Noise
    findings: tuple[Finding, ...]

    @classmethod
    def of(
        cls, comparisons: Sequence[Comparison], *, dtype: torch.dtype, attention: str
    ) -> "Climb":
        """Judge what was compared."""
        noise = Noise.of(comparisons, dtype)
        return cls(
            dtype=str(dtype).removeprefix("torch."),
            attention=attention,
            comparisons=tuple(comparisons),
            noise=noise,
            findings=judge(comparisons, noise),
        )

    @property
    def verdict(self) -> Verdict:
        """The first fault in the order of the rungs; without one, the first parting by noise."""
        for status in ("fault", "parted"):
            for each in self.findings:
                if each.status == status:
                    return Verdict(
                        rung=each.rung, pair=each.pair, cause=each.cause, fault=status == "fault"
                    )
        return Verdict(rung=None, pair=None, cause=None, fault=False)

    def partings(self) -> Iterator[tuple[Parting, Cause]]:
        """Where free runs part, and why."""
        faults = {
            each.pair: each.cause
            for each in reversed(self.findings)
            if each.status == "fault" and each.rung in RUNGS[:3]
        }
        for each in self.comparisons:
            for parting in each.partings:
                fault = faults.get(each.pair)
                yield parting, cause_of(parting, fault, each.owed, self.noise)

    def firsts(self) -> Iterator[tuple[Parting, Cause]]:
        """Of each pair the first parting of greedy runs, and the first of drawn ones."""
        found: dict[tuple[tuple[str, str], bool], tuple[Parting, Cause]] = {}
        for parting, cause in self.partings():
            key = parting.pair, parting.seed is None
            if key not in found or parting.position < found[key][0].position:
                found[key] = parting, cause
        yield from found.values()

    def to_dict(self, spelt: Mapping[int, str]) -> dict[str, Any]:
        """Plain data for JSON."""
        verdict = self.verdict
        return {
            "dtype": self.dtype,
            "attention": self.attention,
            "verdict": asdict(verdict) | {"sentence": verdict.sentence(self.noise)},
            "noise": {
                "recomputed_vs_cached": self.noise.measured,
                "tolerance": self.noise.tolerance,
                "clear_lead": self.noise.lead,
                "largest_logit": self.noise.largest,
            },
            "rungs": [asdict(each) for each in self.findings],
            "partings": [
                asdict(parting)
                | {"texts": [spelt[token] for token in parting.tokens], "cause": cause}
                for parting, cause in self.partings()
            ],
            "guides": [
                {
                    "guide": each.guide,
                    "pair": each.pair,
                    "tokens": each.tokens,
                    "same_ids": each.same_ids,
                    "first_logits": each.first,
                    "same_history": each.difference,
                    "steps": each.compared,
                    "steps_equal_in_bits": each.equal,
                    "cache_gap": None if each.gap is None else asdict(each.gap),
                }
                for each in self.comparisons
            ],
        }


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LadderReport:
    """Whether hidden guides are read as if they stood in the prompt. True without a fault."""

    model: str
    climbs: tuple[Climb, ...]
    left_out: tuple[str, ...]
    """Ways of computing that the model or its device does not have, and why."""
    guides: tuple[str, ...]
    tokens: int
    seeds: int
    recomputed: int
    top_p: float
    spelt: Mapping[int, str]
    """The text of each token at which runs part."""
    notes: tuple[str, ...]
    provenance: Provenance

    def __bool__(self) -> bool:
        return bool(self.climbs) and not self.faults

    @property
    def faults(self) -> int:
        """In how many ways of computing there is one."""
        return sum(climb.verdict.fault for climb in self.climbs)

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape that scripts rely on."""
        return {
            "exact": bool(self),
            "verdict": "fault" if self.faults else "exact",
            "model": self.model,
            "arms": ARMS,
            "guides": list(self.guides),
            "tokens": self.tokens,
            "seeds": self.seeds,
            "recomputed_steps": self.recomputed,
            "top_p": self.top_p,
            "climbs": [climb.to_dict(self.spelt) for climb in self.climbs],
            "left_out": list(self.left_out),
            "notes": list(self.notes),
            "provenance": self.provenance.to_dict(),
        }

    def to_json(self) -> str:
        """Stable text."""
        return to_json(self.to_dict())

    def __rich__(self) -> Group:
        parts: list[RenderableType] = [Text(f"Note: {note}.", style="red") for note in self.notes]
        parts.append(
            Text(f"{self.model} reads the same token ids in five ways. Where they part, and why?")
        )
        parts += [Text(f"  {name:<3}{does}") for name, does in ARMS.items()]
        for climb in self.climbs:
            parts += [Text(), self._table(climb)]
            if partings := list(climb.firsts()):
                parts.append(self._partings(partings))
            verdict = climb.verdict
            style = "bold red" if verdict.fault else "bold green"
            parts.append(Text(verdict.sentence(climb.noise), style=style))
        parts += [Text(), *(Text(f"Left out: {why}", style="yellow") for why in self.left_out)]
        parts.append(Text(self.sentence, style="bold red" if self.faults else "bold green"))
        return Group(*parts)

    @property
    def sentence(self) -> str:
        """All of it in one line."""
        found = f"a FAULT in {self.faults}" if self.faults else "no fault"
        looked = f"{len(self.climbs)} way{'s' if len(self.climbs) > 1 else ''} of computing"
        left = f", and {len(self.left_out)} left out" if self.left_out else ""
        return f"Verdict: {found} {'of' if self.faults else 'in'} {looked}{left}."

    def _table(self, climb: Climb) -> Table:
        pairs = list(dict.fromkeys(each.pair for each in climb.findings))
        table = Table(
            "rung",
            *(f"{' – '.join(pair)}\n{DIFFER.get(pair, '')}" for pair in pairs),
            title=f"{climb.dtype}, {climb.attention} attention",
            caption=f"n = {len(self.guides)} guides, {self.tokens} tokens after each: one greedy "
            f"run and {self.seeds} drawn ones (top-p {self.top_p}). A looks at {self.recomputed} "
            f"of {self.tokens} steps. Rounding: up to {shown(climb.noise.tolerance)} of a logit; a "
            "clear lead is more than twice that.",
        )
        table.add_row(
            "owed", *("the same bits" if pair in OWED else "rounding apart" for pair in pairs),
            style="dim", end_section=True,
        )  # fmt: skip
        for rung in RUNGS:
            cells = [each for each in climb.findings if each.rung == rung]
            table.add_row(rung, *(Text(_cell(each), style=STYLES[each.status]) for each in cells))
        return table

    def _partings(self, partings: Sequence[tuple[Parting, Cause]]) -> Table:
        table = Table(
            "pair", "run", "guide", "token", "written", "best", "top 25", "logits", "variation",
            "why", title="where runs part first",
        )  # fmt: skip
        for each, cause in partings:
            table.add_row(
                " – ".join(each.pair),
                "greedy" if each.seed is None else f"seed {each.seed}",
                Text(each.guide),
                str(each.position),
                Text(" / ".join(repr(self.spelt[token]) for token in each.tokens)),
                "same" if each.same_best else "another",
                f"{each.overlap} shared",
                shown(each.difference),
                f"{each.variation:.3f}",
                cause,
            )
        return table


def _cell(finding: Finding) -> str:
    if finding.status != "fault":
        return finding.measured
    return f"FAULT ({finding.cause}): {finding.measured}"
