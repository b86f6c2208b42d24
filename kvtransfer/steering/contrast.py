"""Whether pairs of prompts differ in one direction, as a table and as JSON."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvtransfer.report import Provenance, to_json
from kvtransfer.steering.vector import CacheVector

FAINT = 0.02
"""Below this share of their own length, keys and values of two prompts hardly differ."""

CLEAR = 1.5
"""How much more than by chance pairs should agree. Differences that point anywhere in five or more
independent directions agree as much one time in twenty."""

FEW = 4
"""Of fewer pairs nobody can say whether they agree: by chance they do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """How keys, or values, of positive and negative prompts differ, over all layers."""

    size: float
    """Length of a pair's difference, against the length of what it is the difference of."""
    agreement: float
    """Length of the mean difference against the mean length of the differences: 1 where all pairs
    differ by the same, about 1/√n where they have nothing in common."""
    chance: float
    """The agreement (root mean square) of the same differences with signs drawn at random."""
    length: float
    """Of the mean difference, which is the vector's."""

    def to_dict(self) -> dict[str, float]:
        """The JSON shape that scripts rely on."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extraction:
    """A vector, and what it was read off. True where the pairs differ, and in one direction."""

    vector: CacheVector
    flipped: CacheVector
    """A control: the mean with half of the pairs turned round, so that what they share is gone."""
    pairs: int
    tokens: int
    """That were read."""
    keys: Contrast
    values: Contrast
    notes: tuple[str, ...]
    provenance: Provenance

    def __bool__(self) -> bool:
        return not any(doubts({"keys": self.keys, "values": self.values}, self.pairs))

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape that scripts rely on."""
        return {
            "model": {"name": self.vector.spec.name, "fingerprint": self.vector.identity},
            "at": self.vector.at,
            "pairs": self.pairs,
            "tokens": self.tokens,
            "keys": self.keys.to_dict(),
            "values": self.values.to_dict(),
            "agree": bool(self),
            "notes": list(self.notes),
            "provenance": self.provenance.to_dict(),
        }

    def to_json(self) -> str:
        """Stable text: two reports can be diffed."""
        return to_json(self.to_dict())

    def __rich__(self) -> Group:
        table = Table(
            "",
            "difference",
            "agreement",
            "by chance",
            "|vector|",
            title=f"{self.vector.spec.name}: {self.pairs} pairs, token {self.vector.at} of each",
        )
        for column in table.columns[1:]:
            column.justify = "right"
        for kind, found in (("keys", self.keys), ("values", self.values)):
            table.add_row(
                kind,
                f"{found.size:.1%}",
                f"{found.agreement:.2f}",
                f"{found.chance:.2f}",
                f"{found.length:.3g}",
            )
        return Group(
            table,
            Text(
                "Difference: of a pair, against what it is a difference of. Agreement: length of "
                "the mean difference against the mean length; 1 where all pairs differ by the same."
            ),
            *(Text(f"Note: {note}.") for note in self.notes),
        )


def doubts(found: Mapping[str, Contrast], pairs: int) -> Iterator[str]:
    """Why a vector of these pairs may steer towards nothing."""
    for kind, each in found.items():
        if each.size < FAINT:
            yield (
                f"the {kind} of two prompts of a pair hardly differ: by {each.size:.1%} of their "
                f"length, on average ({FAINT:.0%} would be little)"
            )
        elif pairs >= FEW and each.agreement < CLEAR * each.chance:
            yield (
                f"the {kind} of the pairs do not differ in one direction: agreement "
                f"{each.agreement:.2f}, where signs drawn at random would give {each.chance:.2f}"
            )
    if pairs < FEW:
        yield f"{pairs} pairs are too few to say whether they agree: give {FEW} or more"
