"""Guides, the questions asked after them, and the JSONL file that holds both."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtransfer.errors import TextError, WrongKind, require

EXAMPLE = '{"guide": "…", "items": [{"prompt": "…", "choices": ["…", "…"], "answer": 0}]}'


@dataclass(frozen=True, slots=True)
class Choice:
    """A question with its possible answers; ``answer`` is the index of the right one."""

    prompt: str
    choices: tuple[str, ...]
    answer: int

    @property
    def chance(self) -> float:
        """Accuracy of guessing."""
        return 1 / len(self.choices)


@dataclass(frozen=True, slots=True)
class Expect:
    """A question answered in free text, which is right when ``expect`` occurs in it."""

    prompt: str
    expect: str

    @property
    def chance(self) -> float:
        """Accuracy of guessing."""
        return 0.0

    def right(self, text: str) -> bool:
        """Whether a generated text gives the answer; upper and lower case are one."""
        return self.expect.casefold() in text.casefold()


Item = Choice | Expect


@dataclass(frozen=True, slots=True)
class Guide:
    """A text to be kept as a hidden prefix, and what it should enable a model to answer."""

    name: str
    text: str
    items: tuple[Item, ...]


Guides = Iterable[Guide | tuple[str, str]] | Mapping[str, str]
"""Guides, or names and texts: as pairs, or as a dict."""

READ = "read_guides(path) reads a file; in Python, [(name, text), …] or {name: text, …}"


def guides_of(given: Guides) -> Iterator[Guide]:
    """Each of them as a guide; one that is a name and a text has no questions.

    Raises:
        WrongKind: it is something else, such as a path, or a text without a name.
    """
    if isinstance(given, str | Guide) or not isinstance(given, Iterable):
        raise WrongKind("what holds the guides", given, "a list or a dict", hint=READ)
    for each in given.items() if isinstance(given, Mapping) else given:
        if isinstance(each, Guide):
            yield each
            continue
        pair = tuple(each) if isinstance(each, tuple | list) else ()
        if len(pair) != 2:
            raise WrongKind("a guide", each, "a Guide, or a name and its text", hint=READ)
        name, text = pair
        require("the name of a guide", name, str, "a text", hint=READ)
        require(f"the guide {name!r}", text, str, "a text", hint=READ)
        yield Guide(name, text, items=())


def read_guides(path: str | Path, *, questions: bool = True) -> tuple[Guide, ...]:
    """Read a guide file: one JSON object a line, with ``guide`` and ``items``.

    Each item has a ``prompt``, and either ``choices`` with the index ``answer``, or ``expect``.
    Where no ``questions`` are to be asked, guides need no items.

    Raises:
        TextError: the file is missing or empty, or a line is broken; the line is named.
    """
    path = Path(path)
    try:
        # Not splitlines(): it also breaks at letters that JSON strings may hold.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError as error:
        raise TextError(f"no guide file at {path}", hint="check the path") from error
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(
            f"{path} cannot be read as UTF-8 text: {error}", hint="give a .jsonl file in UTF-8"
        ) from error
    guides = tuple(
        _guide(line, f"{path}, line {number}", number, questions=questions)
        for number, line in enumerate(lines, 1)
        if line.strip()
    )
    if not guides:
        raise TextError(f"{path} holds no guides", hint=f"one a line, such as {EXAMPLE}")
    return guides


def _guide(line: str, where: str, number: int, *, questions: bool) -> Guide:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise TextError(f"{where} is not JSON: {error.msg}", hint=f"such as {EXAMPLE}") from error
    if not isinstance(row, Mapping):
        raise TextError(f"{where} holds a {type(row).__name__}", hint=f"such as {EXAMPLE}")
    items = row.get("items", None if questions else [])
    if not isinstance(items, list) or (questions and not items):
        raise TextError(f"{where} has no list of 'items'", hint=f"such as {EXAMPLE}")
    name = row.get("name", f"guide-{number}")
    if not isinstance(name, str) or not name.strip() or _half_a_character(name):
        raise TextError(f"{where}: 'name' is {name!r}", hint="a text that is not empty, or none")
    return Guide(
        name=name,
        text=_string(row, "guide", where),
        items=tuple(_item(each, f"{where}, item {i}") for i, each in enumerate(items, 1)),
    )


def _item(row: Any, where: str) -> Item:
    if not isinstance(row, Mapping):
        raise TextError(f"{where} holds a {type(row).__name__}", hint=f"such as {EXAMPLE}")
    prompt = _string(row, "prompt", where)
    if ("expect" in row) == ("choices" in row):
        raise TextError(
            f"{where} needs either 'choices' and 'answer', or 'expect'",
            hint="choices are scored by likelihood, expect by what the model writes",
        )
    if "expect" in row:
        return Expect(prompt, _string(row, "expect", where))
    choices, answer = row["choices"], row.get("answer")
    if (
        not isinstance(choices, list)
        or len(choices) < 2
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise TextError(
            f"{where}: 'choices' is not a list of two or more texts: {choices!r}",
            hint=f"such as {EXAMPLE}",
        )
    if type(answer) is not int or not 0 <= answer < len(choices):  # in JSON, true is no number
        raise TextError(
            f"{where}: 'answer' is {answer!r}, not an index into {len(choices)} choices",
            hint="the first choice is 0",
        )
    return Choice(prompt, tuple(choices), answer)


def _string(row: Mapping[str, Any], field: str, where: str) -> str:
    text = row.get(field)
    if not isinstance(text, str) or not text.strip():
        raise TextError(f"{where} has no text in '{field}'", hint=f"such as {EXAMPLE}")
    if _half_a_character(text):
        raise TextError(f"{where}: '{field}' holds half a character", hint="leave it out")
    return text


def _half_a_character(text: str) -> bool:
    """Whether a lone surrogate stands in it: JSON can spell one, and no text has it."""
    return any("\ud800" <= letter <= "\udfff" for letter in text)
