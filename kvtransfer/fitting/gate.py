"""A gate: a number that a mapping must reach before its prefixes are relied on.

A gate predicts, and nothing more: where an outcome was measured, the outcome decides.

This module runs no model. What it judges was recorded when the mapping was fitted, or is handed in.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.seen import CONTROL, COSINE, KL
from kvtransfer.measures.agreement import cosine_gain

Measure = Literal["kl", "cosine-gain", "cosine", "r2-keys", "r2-values", "probe"]

MEASURES: Mapping[Measure, str] = MappingProxyType(
    {
        "kl": "KL taken away",
        "cosine-gain": "attention's cosine gain",
        "cosine": "attention cosine",
        "r2-keys": "R² of keys",
        "r2-values": "R² of values",
        "probe": "the probe's score",
    }
)
"""What a gate may look at, and how it is called in a sentence. None exceeds 1."""

NAMES: Mapping[Measure, str] = MappingProxyType(
    {
        "kl": KL,
        "cosine": COSINE,
        "r2-keys": "held-out R² of keys",
        "r2-values": "held-out R² of values",
    }
)
"""Under which names in a mapping's quality some stand as they are."""

RECORDED = "its fit's held-out text"
"""What was recorded with a mapping was measured on."""

OFF = "none"
"""How a user says that there is to be no gate."""


@dataclass(frozen=True, slots=True)
class Gate:
    """A measure and what it must reach.

    The usual one is what foretold best which of 21 pair-directions would recover half of their gap
    in NLL on other documents: Spearman 0.96 (0.85 to 0.99) with the share recovered, 0.94 or more
    without any one family of pairs, and at 0.5 right for all 21, 16 of them usable. R² of values,
    the best of what does not ask for the target's predictions, has 0.89 (0.69 to 0.96)
    (experiments/predict).

    >>> Gate().of(mapping).below
    False
    """

    measure: Measure = "kl"
    """``kl`` is the share that the mapped prefix takes away of the KL to the target's own
    predictions which no prefix leaves; ``cosine-gain`` the attention cosine less that of the
    shuffled control, as a share of what that lacks to 1. Both are 1 on the target's own prefix."""
    threshold: float = 0.5

    def __post_init__(self) -> None:
        if self.measure not in MEASURES:
            raise ValueError(f"no gate looks at {self.measure!r}; one of {', '.join(MEASURES)}")
        if not (math.isfinite(self.threshold) and self.threshold <= 1):
            raise ValueError(
                f"a gate of {self.threshold:g}: {MEASURES[self.measure]} reaches 1 at most"
            )

    @classmethod
    def parse(cls, text: str) -> "Gate | None":
        """``probe=0.3``, ``0.4`` for the usual measure, or ``none`` for no gate.

        Raises:
            ValueError: it is none of these.
        """
        if text.strip() == OFF:
            return None
        name, equals, number = text.rpartition("=")
        asked = name.strip() if equals else cls().measure
        measure = next((each for each in MEASURES if each == asked), None)
        if measure is None:
            raise ValueError(
                f"--gate {text!r}: no gate looks at {asked!r}; one of {', '.join(MEASURES)}"
            )
        try:
            threshold = float(number)
        except ValueError:
            raise ValueError(
                f"--gate takes a number, such as 0.5 or probe=0.3, or 'none', not {text!r}"
            ) from None
        return cls(measure, threshold)

    def of(self, mapping: KVMapping) -> "Judgement":
        """Judge a mapping by what was recorded when it was fitted."""
        return self.judge(_recorded(mapping.quality, self.measure), on=RECORDED, why=self._lacking)

    def judge(self, value: float | None, *, on: str, why: str = "") -> "Judgement":
        """Judge what was measured.

        Args:
            value: None where nothing was.
            on: What it was measured on.
            why: Nothing was, if so.
        """
        return Judgement(gate=self, value=value, on=on, why=why if value is None else "")

    @property
    def _lacking(self) -> str:
        if self.measure == "probe":
            return "no probe is recorded with a mapping; kvtransfer probe runs one"
        return f"the mapping does not carry {MEASURES[self.measure]}; fit it again, or run eval"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What a gate says of a mapping."""

    gate: Gate
    value: float | None
    """None where the gate cannot judge."""
    on: str
    """What it was measured on."""
    why: str = ""
    """It cannot judge, if so."""

    @property
    def below(self) -> bool | None:
        """Whether the gate is not reached; None where that cannot be known."""
        return None if self.value is None else self.value < self.gate.threshold

    def said(self) -> str:
        """The judgement in a clause, without a capital or a full stop."""
        name, threshold = MEASURES[self.gate.measure], self.gate.threshold
        if self.value is None:
            return f"the gate cannot judge: {self.why}"
        where, sign = ("below", "<") if self.below else ("above", "≥")
        return f"{where} the gate: {name} {self.value:.3g} {sign} {threshold:g} on {self.on}"

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape that scripts rely on; ``value`` and ``below`` may be null."""
        return {
            "measure": self.gate.measure,
            "value": self.value,
            "threshold": self.gate.threshold,
            "below": self.below,
            "on": self.on,
            "why": self.why or None,
        }


def _recorded(quality: Mapping[str, Any], measure: Measure) -> float | None:
    """A measure from a mapping's quality; None where it is not there, or is no number."""
    if measure == "cosine-gain":
        ours, control = (_number(quality.get(name)) for name in (COSINE, CONTROL))
        if ours is None or control is None or control >= 1:
            return None
        return cosine_gain(ours, control)
    return _number(quality.get(NAMES[measure])) if measure in NAMES else None


def _number(found: object) -> float | None:
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    return float(found) if math.isfinite(found) else None
