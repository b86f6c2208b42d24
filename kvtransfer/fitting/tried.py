"""What maps that were tried cost and did, and which of them a budget allows."""

import math
import re
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from kvtransfer.errors import BudgetError
from kvtransfer.report import to_json

CLOSE = 0.1
"""Attention errors that differ by less, relative to the least, say nothing: on SmolLM2 a map of
twice as many layers has the same error and a tenth less KL, on held-out text and on other text."""

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What a mapping did on held-out windows."""

    attention_error: float
    """Mean over layers of ‖attention output − own‖² / ‖own‖², each of all heads and tokens
    together, the queries being those of a run on the target's own prefix. Layers that are not seen
    do not count."""
    kl: float
    """KL(own ‖ mapped) of next-token distributions, nats a token."""
    microseconds: float
    """To map one token, its start not counted; on this machine, at this moment."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a map may cost. Both bounds hold; None is no bound."""

    nbytes: int | None = None
    """On the disk, its control left out."""
    microseconds: float | None = None
    """To map one token, on this machine."""

    @classmethod
    def parse(cls, text: str) -> "Budget":
        """``9.6MB``, ``500KB``, ``40us``.

        Raises:
            ValueError: it is neither a size nor a time.
        """
        found = re.fullmatch(r"([0-9]*\.?[0-9]+)\s*(us|µs|B|KB|MB|GB)", text.strip())
        if found is None or float(found[1]) <= 0:
            raise ValueError(
                f"a budget is a size such as 9.6MB or a time such as 40us, not {text!r}"
            )
        if found[2] in UNITS:
            return cls(nbytes=int(float(found[1]) * UNITS[found[2]]))
        return cls(microseconds=float(found[1]))

    def allows(self, candidate: "Candidate") -> bool:
        """Whether a candidate is within it."""
        small = self.nbytes is None or candidate.nbytes <= self.nbytes
        return small and (
            self.microseconds is None or candidate.tried.microseconds <= self.microseconds
        )

    def __str__(self) -> str:
        size = None if self.nbytes is None else f"{self.nbytes / 1e6:.3g} MB"
        quick = None if self.microseconds is None else f"{self.microseconds:g} µs a token"
        return " and ".join(filter(None, (size, quick))) or "no bound"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Candidate:
    """One map that was solved and tried, stored as it would be saved."""

    name: str
    nbytes: int
    tried: Tried


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AutoReport:
    """What was tried, and which was taken. True where something fits the budget."""

    candidates: tuple[Candidate, ...]
    budget: Budget
    storage: str
    windows: int

    @property
    def allowed(self) -> list[Candidate]:
        """Candidates within the budget, the best first.

        The attention error decides; between maps within CLOSE of the least, which it cannot tell
        apart, and where no attention is seen, KL does.
        """
        found = [each for each in self.candidates if self.budget.allows(each)]
        errors = [error for each in found if not math.isnan(error := each.tried.attention_error)]
        close = (1 + CLOSE) * min(errors, default=0.0)

        def badness(each: Candidate) -> tuple[float, float]:
            error = each.tried.attention_error
            return 0.0 if math.isnan(error) or error <= close else error, each.tried.kl

        return sorted(found, key=badness)

    @property
    def best(self) -> Candidate:
        """The candidate that was taken.

        Raises:
            BudgetError: none is within the budget.
        """
        if not self.allowed:
            smallest = min(self.candidates, key=lambda each: each.nbytes)
            quickest = min(self.candidates, key=lambda each: each.tried.microseconds)
            raise BudgetError(
                f"no map fits {self.budget}: the smallest is {smallest.name} with "
                f"{smallest.nbytes / 1e6:.3g} MB, the quickest {quickest.name} with "
                f"{quickest.tried.microseconds:.0f} µs a token",
                hint="raise --budget, or store it in fewer bits (--storage int8)",
            )
        return self.allowed[0]

    def __bool__(self) -> bool:
        return bool(self.allowed)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "budget": {"bytes": self.budget.nbytes, "microseconds": self.budget.microseconds},
            "storage": self.storage,
            "windows": self.windows,
            "candidates": [
                {
                    "name": each.name,
                    "bytes": each.nbytes,
                    "attention_error": None
                    if math.isnan(each.tried.attention_error)
                    else each.tried.attention_error,
                    "kl_to_own": each.tried.kl,
                    "microseconds": each.tried.microseconds,
                    "taken": self.budget.allows(each) and each is self.best,
                }
                for each in self.candidates
            ],
        }

    def to_json(self) -> str:
        """Stable text."""
        return to_json(self.to_dict())

    def __rich__(self) -> Table:
        table = Table(
            "map",
            "MB",
            "µs a token",
            "attention error",
            "KL to own",
            title=f"tried on {self.windows} held-out windows, stored in {self.storage}",
            caption=f"budget: {self.budget}; → was taken, dim ones exceed the budget; "
            "attention errors within a tenth of the least are told apart by KL",
        )
        for column in table.columns[1:]:
            column.justify = "right"
        for each in self.candidates:
            allowed = self.budget.allows(each)
            taken = allowed and each is self.best
            style = "bold" if taken else (None if allowed else "dim")
            table.add_row(
                f"→ {each.name}" if taken else each.name,
                f"{each.nbytes / 1e6:.2f}",
                f"{each.tried.microseconds:.1f}",
                f"{each.tried.attention_error:.4f}",
                f"{each.tried.kl:.4f}",
                style=style,
            )
        return table
