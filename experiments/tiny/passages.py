"""Passages that state made-up facts and ask for some of them again.

Nothing but the passage itself can answer its questions: who owns what, which code opens which door
is drawn afresh each time. This module knows characters, not tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from relations import (
    ADJECTIVES,
    FOODS,
    JOBS,
    KINDS,
    NOUNS,
    ONSETS,
    PEOPLE,
    RIMES,
    ROOMS,
    TOWNS,
)

FRAMES = ("{q}", "{q}", "Question: {q}", "Q: {q}", "User: {q}")
REPLIES = {"Question: {q}": " Answer:", "Q: {q}": "\nA:", "User: {q}": "\nAssistant:"}


@dataclass(frozen=True, slots=True)
class Passage:
    """A text, the character spans of its answers, and where its questions begin."""

    text: str
    answers: tuple[tuple[int, int], ...]
    asked_from: int

    def unstated(self) -> "Passage":
        """The questions without the facts: what guessing alone can answer."""
        cut = self.asked_from
        spans = tuple((start - cut, end - cut) for start, end in self.answers)
        return Passage(self.text[cut:], spans, 0)


def passage(rng: Random, prose: Sequence[str], *, questions: int | None = None) -> Passage:
    """Draw facts, half the time a stretch of prose after them, and questions in another order.

    Without ``questions``, up to six of the facts are asked for.
    """
    kinds = rng.sample(KINDS, rng.randint(1, 3))
    # A small pool makes facts share subjects, adjectives and nouns: no single word is the key.
    pool = {name: [draw(rng, name) for _ in range(5)] for name in ("person", "invented")}
    adjectives, nouns = rng.sample(ADJECTIVES, 3), rng.sample(NOUNS, 4)
    pool["thing"] = [f"{adjective} {noun}" for adjective in adjectives for noun in nouns]
    pairs = [(kind, subject) for kind in kinds for subject in dict.fromkeys(pool[kind.subject])]
    stated = rng.sample(pairs, min(len(pairs), rng.randint(2, 8)))
    facts = [(kind, subject, draw(rng, kind.value)) for kind, subject in stated]

    join, bullet = rng.choice(((" ", ""), (" ", ""), ("\n", ""), ("\n", "- ")))
    text = join.join(bullet + rng.choice(k.statements).format(s=s, v=v) for k, s, v in facts)
    text += rng.choice(("\n\n", "\n", " "))
    if rng.random() < 0.5:
        text += stretch(rng, prose) + "\n\n"

    asked_from, spans = len(text), []
    count = rng.randint(2, 6) if questions is None else questions
    for kind, subject, value in rng.sample(facts, min(count, len(facts))):
        question = rng.choice(kind.questions).format(s=subject)
        frame = rng.choice(FRAMES) if "?" in question else "{q}"
        lead = question.find("?") + 1 or len(question)
        text += frame.format(q=question[:lead]) + REPLIES.get(frame, "") + question[lead:]
        spans.append((len(text), len(text) + len(value) + 2))
        text += f" {value}.\n"
    return Passage(text, tuple(spans), asked_from)


def draw(rng: Random, what: str) -> str:
    """One value: four digits, an invented word, or a word of a list."""
    if what == "code":
        return f"{rng.randrange(10_000):04d}"
    if what == "invented":
        return "".join(rng.choice(ONSETS) + rng.choice(RIMES) for _ in range(2))
    return rng.choice(LISTS[what])


def stretch(rng: Random, prose: Sequence[str]) -> str:
    """Up to 400 characters of a document, cut at white space."""
    words = rng.choice(prose).split(" ")
    start = rng.randrange(len(words))
    return " ".join(words[start : start + rng.randint(5, 60)])[:400]


LISTS = {
    "noun": NOUNS,
    "person": PEOPLE,
    "town": TOWNS,
    "room": ROOMS,
    "job": JOBS,
    "food": FOODS,
}
