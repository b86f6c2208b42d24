"""Which words of one text differ from another's."""

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import SequenceMatcher

from kvtransfer.evaluation.page.markup import Child, Safe, el, join


@dataclass(frozen=True, slots=True)
class Run:
    """Words that stand one after another, and are alike in this: both texts have them, or not."""

    words: str
    """Empty where only the other text has something."""
    other: str
    """What the other text has instead; the same words where they do not differ."""

    @property
    def differs(self) -> bool:
        """Whether the other text has something else."""
        return self.words != self.other


def compare(text: str, other: str) -> tuple[Run, ...]:
    """The words of ``text`` in order, in runs that ``other`` has too and runs that it has not.

    Words are what white space parts. A comma more or an upper case is a difference: models are
    compared, not meanings.
    """
    return tuple(_runs(text.split(), other.split()))


def _runs(words: list[str], others: list[str]) -> Iterator[Run]:
    matcher = SequenceMatcher(None, words, others, autojunk=False)
    for _, i, j, k, m in matcher.get_opcodes():
        yield Run(" ".join(words[i:j]), " ".join(others[k:m]))


def marked(text: str, other: str) -> Safe:
    """The words of ``text``; those that ``other`` lacks are bold, underlined and led by a sign.

    Where only ``other`` has something, dots stand in brackets.
    """
    return join(map(_mark, compare(text, other)), between=" ") or Safe("")


def _mark(run: Run) -> Child:
    if not run.differs:
        return run.words
    if not run.words:
        return el("span", {"class": "gap", "title": f"missing here: {run.other}"}, "[…]")
    instead = f"instead of: {run.other}" if run.other else "more than there"
    return el("mark", {"title": instead}, "≠", run.words)
