"""What a vector does at every strength, as a table and as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvtransfer.measures.intervals import mean
from kvtransfer.report import Estimate, Provenance, to_json
from kvtransfer.steering.guard import Guard

SHOWN = 200
"""Letters of a text that the table shows; the JSON has all of them."""


ENOUGH = 5
"""Prompts, below which a useful window is said to be none yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Steered:
    """One answer."""

    text: str
    tokens: int
    repetition: float
    """Share of its 3-grams, in tokens, that stand in it before."""
    nll: float | None
    """Under the model as it is, in nats a token; None where nothing was written."""
    effect: float
    gain: float
    """Effect beyond that of the answer without steering."""
    broken: str | None
    """Why the guard counts it as broken."""

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape that scripts rely on."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Strength:
    """All answers at one strength."""

    strength: float
    effect: Estimate
    gain: Estimate
    repetition: Estimate
    nll: Estimate | None
    broken: float
    """Share of the answers that are."""
    shows: bool
    """Whether the effect is there."""
    holds: bool
    """Whether the guard is content."""
    answers: tuple[Steered, ...]
    """One a prompt."""

    @classmethod
    def of(cls, strength: float, answers: Sequence[Steered], guard: Guard) -> "Strength":
        """The means over ``answers``, and what ``guard`` says of them."""
        known = [each.nll for each in answers if each.nll is not None]
        gain = mean(np.array([each.gain for each in answers], dtype=np.float64))
        surely = gain.value if gain.low is None else gain.low
        broken = sum(each.broken is not None for each in answers) / len(answers)
        return cls(
            strength=strength,
            effect=mean(np.array([each.effect for each in answers], dtype=np.float64)),
            gain=gain,
            repetition=mean(np.array([each.repetition for each in answers], dtype=np.float64)),
            nll=mean(np.array(known, dtype=np.float64)) if known else None,
            broken=broken,
            shows=surely > guard.effect,
            holds=broken <= guard.broken,
            answers=tuple(answers),
        )

    @property
    def useful(self) -> bool:
        """It steers, the effect is there, and the texts are whole."""
        return self.strength != 0 and self.shows and self.holds

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape that scripts rely on."""
        return {
            "strength": self.strength,
            "effect": self.effect.to_dict(),
            "gain": self.gain.to_dict(),
            "repetition": self.repetition.to_dict(),
            "nll": None if self.nll is None else self.nll.to_dict(),
            "broken": self.broken,
            "shows": self.shows,
            "holds": self.holds,
            "useful": self.useful,
            "answers": [each.to_dict() for each in self.answers],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepReport:
    """A vector at many strengths. True where one of them is useful."""

    model: str
    vector: Mapping[str, Any]
    """How it was made."""
    steered: Mapping[str, Any]
    """Strengths of keys and values, layers, token, and what is put after a prompt."""
    prompts: tuple[str, ...]
    effect: str
    """What is measured as the effect."""
    strengths: tuple[Strength, ...]
    """In order; 0 is without steering."""
    guard: Guard
    max_new_tokens: int
    provenance: Provenance

    def __bool__(self) -> bool:
        return bool(self.window)

    @property
    def window(self) -> tuple[float, ...]:
        """The useful strengths."""
        return tuple(each.strength for each in self.strengths if each.useful)

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape that scripts rely on."""
        return {
            "model": self.model,
            "vector": dict(self.vector),
            "steered": dict(self.steered),
            "prompts": list(self.prompts),
            "effect": self.effect,
            "strengths": [each.to_dict() for each in self.strengths],
            "window": list(self.window),
            "guard": self.guard.to_dict(),
            "max_new_tokens": self.max_new_tokens,
            "provenance": self.provenance.to_dict(),
        }

    def to_json(self) -> str:
        """Stable text: two reports can be diffed."""
        return to_json(self.to_dict())

    def __rich__(self) -> Group:
        count = len(self.prompts)
        table = Table(
            "strength",
            "effect",
            "gain",
            "repetition",
            "NLL",
            "broken",
            "",
            title=f"{self.model}, steered: {count} prompt{'s' if count > 1 else ''}, "
            f"{self.max_new_tokens} tokens each",
        )
        for column in table.columns[:-1]:
            column.justify = "right"
        for each in self.strengths:
            table.add_row(
                f"{each.strength:g}",
                f"{each.effect.value:.2f}",
                f"{each.gain:.2f}",
                f"{each.repetition.value:.0%}",
                "–" if each.nll is None else f"{each.nll.value:.2f}",
                f"{each.broken:.0%}",
                self._word(each),
            )
        window = ", ".join(f"{strength:g}" for strength in self.window) or "none"
        bounds = (
            f"Useful strengths: {window}. Effect: {self.effect}. An answer is broken where it "
            f"says nothing, its repetition rises by more than {self.guard.repetition:.0%}, or its "
            f"NLL under the unsteered model by more than {self.guard.nll:g} nats a token."
        )
        if count < ENOUGH:
            bounds += f" On {count} prompt{'s' if count > 1 else ''} that is a hint and no finding."
        return Group(table, Text(bounds), Text(""), *map(Text, self._texts()))

    def _word(self, each: Strength) -> str:
        if each.strength == 0:
            return "as it is"
        if each.useful:
            return "useful"
        return "broken" if not each.holds else "no effect"

    def _texts(self) -> list[str]:
        """Answers to the first prompt."""
        lines = [f"On {self.prompts[0]!r}:"]
        for each in self.strengths:
            first = each.answers[0]
            text = " ".join(first.text.split())
            text = text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
            why = f" ({first.broken})" if first.broken else ""
            lines.append(f"{each.strength:>6g}{why}: {text}")
        return lines
