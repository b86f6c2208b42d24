"""The rows of our own two tasks, made from what the package and its Python carry.

The YAML files in ``tasks/`` name these functions, so that the tasks work offline, from a wheel, and
whatever the current folder is.
"""

from itertools import zip_longest
from typing import Any

from datasets import Dataset

from kvtransfer.evaluation.evaluate import BUILTIN_GUIDES
from kvtransfer.fitting.texts import builtin
from kvtransfer.guides.guide import Choice, read_guides

CONTEXT, ENDING = 90, 12
"""Words of a passage that are read, and of the ending that is to be chosen."""

A_TEXT = 4
"""Passages of one text at most."""

PASSAGES = 64
CHOICES = 4
PROSE = 0.75
"""Share of a passage's words that are of letters, punctuation left aside; below it is a table or
code."""


def prose(**told: Any) -> dict[str, Dataset]:
    """Which words follow: held-out builtin passages, each with the ending of three others.

    Every ending is right once and wrong three times, so nothing is gained by liking one.

    Args:
        told: What lm-eval hands to every maker of rows: the arguments of its model.
    """
    passages = [
        (" ".join(words[:CONTEXT]), " " + " ".join(words[CONTEXT:])) for words in _passages()
    ][:PASSAGES]
    rows = []
    for index, (context, _) in enumerate(passages):
        # Neighbours are of one text, where it is long enough: its topic alone gives nothing away.
        near = [passages[(index + step) % len(passages)][1] for step in range(CHOICES)]
        answer = index % CHOICES
        endings = [*near[1 : answer + 1], near[0], *near[answer + 1 :]]
        rows.append({"context": context, "choices": endings, "answer": answer})
    return {"test": Dataset.from_list(rows)}


def guides(**told: Any) -> dict[str, Dataset]:
    """The builtin guides' questions with choices, each after its guide.

    A question of each guide, then the next of each, so that any leading part asks about all.
    """
    asked = [
        [(guide, item) for item in guide.items if isinstance(item, Choice)]
        for guide in read_guides(BUILTIN_GUIDES)
    ]
    rows = [
        {
            "guide": guide.name,
            "context": guide.text + item.prompt,
            "choices": list(item.choices),
            "answer": item.answer,
        }
        for several in zip_longest(*asked)
        for guide, item in filter(None, several)
    ]
    return {"test": Dataset.from_list(rows)}


def _passages() -> list[list[str]]:
    """Stretches of words, as long as a context and its ending, in the order of the texts."""
    found = []
    for text in builtin("heldout"):
        words = text.split()
        size = CONTEXT + ENDING
        stretches = [words[at : at + size] for at in range(0, len(words) - size + 1, size)]
        found += [each for each in stretches if _is_prose(each)][:A_TEXT]
    return found


def _is_prose(words: list[str]) -> bool:
    plain = [word for word in words if word.strip(".,;:()'\"`").isalpha()]
    return len(plain) >= PROSE * len(words)
