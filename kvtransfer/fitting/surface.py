"""The surface of a text: the same words, written otherwise.

A part of what makes one text another kind than the next to a model is its surface; what it is worth
to fit on text that is written as another one is, experiments/maps says.
"""

import re
from collections.abc import Iterable, Iterator

SPACED = "spaced:"
"""Before the name of a text: as :func:`spaced` writes it."""


_MARK = re.compile(r"\s*([^\w\s]|_)\s*")
_BLANKS = re.compile(r"[ \t]+")


def as_named(name: str, texts: Iterable[str]) -> Iterator[str]:
    """``texts`` as their name asks for them."""
    return map(spaced, texts) if name.startswith(SPACED) else iter(texts)


def spaced(text: str) -> str:
    """Every punctuation mark on its own, as in corpora cut into words (Penn Treebank, WikiText).

    A line that is broken beside a mark is joined; where it is broken beside words it stays so.
    """
    return _BLANKS.sub(" ", _MARK.sub(r" \1 ", text)).strip()
