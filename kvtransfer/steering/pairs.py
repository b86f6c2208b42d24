"""Contrastive prompts: two that differ in what a vector is to steer towards, and in little else."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import SteeringError, TextError
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.spec import first_line

Message = Mapping[str, str]
"""Of a conversation: ``{"role": "user", "content": "…"}``."""

Said = str | Sequence[Message]
"""A prompt: plain text, or a conversation, which the model's chat template makes one of."""

FOLDER = Path(__file__).parent / "contrasts"
"""Pairs that come with kvtransfer: everyday questions, asked for an answer in numbered steps or in
prose (``steps``), like a pirate or like a teacher (``pirate``)."""

EXAMPLE = '{"positive": "…", "negative": "…"}, either a text or a list of messages'


@dataclass(frozen=True, slots=True)
class Pair:
    """Two prompts: what ``positive`` has and ``negative`` has not is what is steered towards."""

    positive: Said
    negative: Said


def read_pairs(path: str | Path) -> tuple[Pair, ...]:
    """Read a file of pairs: a JSON object a line, with ``positive`` and ``negative``.

    Args:
        path: The file, or the name of pairs that come with kvtransfer: ``steps``, ``pirate``.

    Raises:
        TextError: the file is missing or empty, or a line is broken; the line is named.
    """
    builtin = {each.stem: each for each in FOLDER.glob("*.jsonl")}
    path = builtin.get(str(path), Path(path))
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except FileNotFoundError as error:
        raise TextError(
            f"no file of pairs at {path}",
            hint=f"check the path; pairs that come with kvtransfer: {', '.join(sorted(builtin))}",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(
            f"{path} cannot be read as UTF-8 text: {error}", hint="give a .jsonl file in UTF-8"
        ) from error
    pairs = tuple(
        _pair(line, f"{path}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    )
    if not pairs:
        raise TextError(f"{path} holds no pairs", hint=f"one a line: {EXAMPLE}")
    return pairs


def _pair(line: str, where: str) -> Pair:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise TextError(f"{where} is not JSON: {error}", hint=f"such as {EXAMPLE}") from error
    if not isinstance(row, dict):
        raise TextError(f"{where} holds a {type(row).__name__}", hint=f"such as {EXAMPLE}")
    positive, negative = (_said(row.get(side), side, where) for side in ("positive", "negative"))
    return Pair(positive, negative)


def _said(given: Any, side: str, where: str) -> Said:
    if isinstance(given, str) and given.strip():
        return given
    if (
        isinstance(given, list)
        and given
        and all(
            isinstance(each, dict)
            and set(each) == {"role", "content"}
            and all(isinstance(text, str) for text in each.values())
            for each in given
        )
    ):
        return tuple(given)
    raise TextError(f"{where}: {side!r} is {str(given)[:60]!r}", hint=f"such as {EXAMPLE}")


def prompt_ids(model: LanguageModel, said: Said, *, chat: bool = False) -> Int[Tensor, " t"]:
    """The token ids of a prompt, with what opens every text of the model.

    Args:
        model: Whose tokenizer, and whose chat template.
        said: The prompt. A conversation is rendered up to where the answer begins.
        chat: Whether a plain text is what a user says.

    Raises:
        SteeringError: there is no chat template, or it refuses the conversation.
        TextError: nothing is said, or half a character.
    """
    if isinstance(said, str) and not said.strip():
        raise TextError("an empty prompt", hint="say something")
    text = said if isinstance(said, str) and not chat else _rendered(model, said)
    if any("\ud800" <= letter <= "\udfff" for letter in text):  # JSON can spell one
        raise TextError(f"a prompt holds half a character: {text[:60]!r}", hint="leave it out")
    return model.opened(model.encode(text))


def _rendered(model: LanguageModel, said: Said) -> str:
    turns: Sequence[Message] = (
        [{"role": "user", "content": said}] if isinstance(said, str) else said
    )
    if not model.tokenizer.chat_template:
        raise SteeringError(
            f"the tokenizer of {model.spec.name} has no chat template",
            hint="give prompts as plain text, without chat",
        )
    try:
        return str(
            model.tokenizer.apply_chat_template(
                [dict(turn) for turn in turns], tokenize=False, add_generation_prompt=True
            )
        )
    except Exception as error:  # a template is a program, and raises what it likes
        raise SteeringError(
            f"the chat template of {model.spec.name} refuses the conversation: {first_line(error)}",
            hint="some know no system message; roles take turns, beginning with the user",
        ) from error


def read_alike(one: Int[Tensor, " s"], other: Int[Tensor, " t"], at: int) -> bool:
    """Whether two prompts are the same tokens up to and with the one ``at`` (from the end)."""
    first, second = one[: len(one) + at + 1], other[: len(other) + at + 1]
    return torch.equal(first, second)
