"""What a probe found: a score, what the prefix is worth at all, and a verdict in words."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvtransfer.report import Estimate, Provenance, plain, to_json

Verdict = Literal["transfers", "doubtful", "does not transfer"]

ENOUGH = 0.3
"""Score above which a cache transfers. Pairs of trained siblings reach 0.5 and more on 1,024
tokens, models that have nothing to tell each other 0.21 at most."""

FALLEN = 0.5
"""A mapping whose score on a text is below this share of the one on builtin prose is out of its
depth there, however high it is."""

COLOURS = {"transfers": "bold green", "doubtful": "bold yellow", "does not transfer": "bold red"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """Whether one model's cache can be mapped to another's. True where it transfers.

    The score is the share of attention's error that mapped keys and values take away, where all
    of it is what the target's attention returns wrong from average tokens: 1 is as good as its own
    prefix, 0 as good as knowing nothing, and below 0 worse than that.
    """

    source: str
    target: str
    judged: Literal["pair", "mapping"]
    """A linear map that was fitted to the other windows, or a mapping that was given."""
    score: Estimate
    """Mean over layers, with its interval over windows."""
    layers: tuple[float, ...]
    """The same of each target layer; NaN where there is nothing to be a share of."""
    reference: Estimate | None
    """A given mapping's score on builtin prose."""
    prefix_worth: Estimate
    """Nats a token that the target loses over the next few tokens without what stands before."""
    nll: Estimate
    """Of the target on its own prefix."""
    chance: float
    """NLL of a uniform guess."""
    tokens: int
    length: int
    """Tokens in a window."""
    notes: tuple[str, ...]
    provenance: Provenance

    def __bool__(self) -> bool:
        return self.verdict == "transfers"

    @property
    def verdict(self) -> Verdict:
        """What the intervals allow to say."""
        if self.blocked is not None or _high(self.score) < ENOUGH:
            return "does not transfer"
        return "doubtful" if _low(self.score) <= ENOUGH or self.fallen else "transfers"

    @property
    def blocked(self) -> str | None:
        """Why no prefix of any origin can be of use to the target on this text, if so."""
        if not _high(self.nll) < self.chance:
            return (
                f"{self.target} predicts this text no better than a uniform guess "
                f"({self.nll:.2f} nats a token, a guess costs {self.chance:.2f})"
            )
        if not _low(self.prefix_worth) > 0:
            return (
                f"its own prefix is worth nothing to {self.target} on this text "
                f"({self.prefix_worth:.3f} nats a token)"
            )
        return None

    @property
    def fallen(self) -> bool:
        """Whether a mapping does much worse on this text than on builtin prose."""
        return self.reference is not None and self.score.value < FALLEN * self.reference.value

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape that scripts rely on."""
        return {
            "verdict": self.verdict,
            "sentence": self.sentence(),
            "blocked": self.blocked,
            "source": self.source,
            "target": self.target,
            "judged": self.judged,
            "score": self.score.to_dict(),
            "enough": ENOUGH,
            "reference": plain(self.reference),
            "layers": [None if math.isnan(each) else each for each in self.layers],
            "prefix_worth": self.prefix_worth.to_dict(),
            "target_nll": self.nll.to_dict(),
            "chance_nll": self.chance,
            "tokens": self.tokens,
            "window_tokens": self.length,
            "notes": list(self.notes),
            "provenance": self.provenance.to_dict(),
        }

    def to_json(self) -> str:
        """Stable text."""
        return to_json(self.to_dict())

    def sentence(self) -> str:
        """What the numbers mean, in one sentence."""
        head = f"{self.verdict.capitalize()}: "
        if self.reference is not None:
            said = (
                f"the mapping scores {self.score:.2f} on this text and {self.reference:.2f} on "
                "builtin prose"
            )
        else:
            said = f"the score is {self.score:.2f}"
        if self.blocked is not None:
            return f"{head}{self.blocked}, so no cache can be judged or be of use; {said}."
        return f"{head}{said}; {self._advice()}."

    def _advice(self) -> str:
        if self.fallen:
            return "it was fitted on text of another kind, so do not use it on this"
        if self.judged == "mapping":
            return "it may be used" if self else f"above {ENOUGH} is needed"
        if self.verdict == "doubtful":
            return f"above {ENOUGH} is needed: probe on more tokens"
        if self.verdict == "transfers":
            return "a mapping of this pair is worth fitting"
        return f"what {self.source} keeps of a token says too little of what {self.target} keeps"

    def __rich__(self) -> Group:
        return Group(
            *(Text(f"Note: {note}.", style="red") for note in self.notes),
            self._table(),
            Text(self.sentence(), style=COLOURS[self.verdict]),
        )

    def _table(self) -> Table:
        table = Table(
            "",
            "measured",
            "needed",
            title=f"{self.source} → {self.target}: "
            + (
                "can its cache be mapped?"
                if self.judged == "pair"
                else "this mapping, on this text"
            ),
            caption=f"{self.tokens:,} tokens in n = {self.score.n} windows of {self.length}; 95 % "
            "intervals over windows. Score: 1 as its own prefix, 0 as an average token's.",
        )
        known = [(each, i) for i, each in enumerate(self.layers) if not math.isnan(each)]
        worst, layer = min(known)
        table.add_row("score", f"{self.score:.3f}", f"> {ENOUGH}")
        table.add_row(f"  weakest layer ({layer})", f"{worst:.3f}", "")
        if self.reference is not None:
            table.add_row("  on builtin prose", f"{self.reference:.3f}", "")
        table.add_row("its own prefix is worth, nats", f"{self.prefix_worth:.3f}", "> 0")
        table.add_row("target's NLL, nats", f"{self.nll:.2f}", f"< {self.chance:.2f} (a guess)")
        return table


def _low(estimate: Estimate) -> float:
    return -math.inf if estimate.low is None else estimate.low


def _high(estimate: Estimate) -> float:
    return math.inf if estimate.high is None else estimate.high
