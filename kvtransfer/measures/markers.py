"""How often a text says what its speaker is known for, counted in three ways.

``sorry`` nests in ``I'm so sorry`` and ``art`` in ``start``: a count of substrings takes the one
phrase for two, and a word for what it is not. So each marker is counted as a substring, as whole
words, and as whole words of which the longest phrase is taken first and nothing is taken twice.
Never is the third count above the second, or the second above the first.

Upper and lower case are one, as are straight and curly apostrophes, and any run of spaces.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Matching = Literal["naive", "boundary", "deduplicated"]
MATCHING: tuple[Matching, ...] = ("naive", "boundary", "deduplicated")

WORD = re.compile(r"\w+(?:['-]\w+)*")
"""What counts as a word: letters and digits, with apostrophes and hyphens between them."""

CURLY = str.maketrans({"\u2018": "'", "\u2019": "'"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkerCount:
    """Markers in one text."""

    naive: int
    """As substrings, wherever they stand."""
    boundary: int
    """As whole words."""
    deduplicated: int
    """As whole words, longest first; what lies within a phrase that is counted is not counted."""
    words: int
    """Of the text."""

    def density(self, way: Matching) -> float:
        """Per 100 words, counted in one of the three ways; 0 of a text without words."""
        return 100 * getattr(self, way) / self.words if self.words else 0.0


def count_markers(text: str, markers: Sequence[str]) -> MarkerCount:
    """Count ``markers`` in ``text``. One that is given twice is one.

    Raises:
        ValueError: a marker is empty.
    """
    plain = fold(text)
    wanted = dict.fromkeys(map(fold, markers))
    if "" in wanted:
        raise ValueError("an empty marker is everywhere")
    found = {marker: _whole(plain, marker) for marker in wanted}
    taken: list[tuple[int, int]] = []
    for marker in sorted(wanted, key=lambda each: (-len(each), each)):
        free = [span for span in found[marker] if not any(_meet(span, held) for held in taken)]
        taken += free
    return MarkerCount(
        naive=sum(map(plain.count, wanted)),
        boundary=sum(map(len, found.values())),
        deduplicated=len(taken),
        words=len(words(plain)),
    )


def words(text: str) -> list[str]:
    """The words of ``text``, in order, as :data:`WORD` has them, in lower case."""
    return WORD.findall(fold(text))


def fold(text: str) -> str:
    """``text`` as it is compared: without case, curly apostrophes, or runs of spaces."""
    return " ".join(text.translate(CURLY).casefold().split())


def _whole(plain: str, marker: str) -> list[tuple[int, int]]:
    """Where ``marker`` stands with no letter or digit at either end.

    Each place is also one where it stands as a substring, and no two overlap, so there are never
    more of them than ``str.count`` finds.
    """
    pattern = rf"(?<!\w){re.escape(marker)}(?!\w)"
    return [match.span() for match in re.finditer(pattern, plain)]


def _meet(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]
