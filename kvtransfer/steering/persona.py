"""A persona: how a model is told to speak, by what words one knows it, and how it sounds.

A small file, TOML or JSON:

    name = "pirate"
    prompt = "You are a pirate. …"
    markers = ["ahoy", "matey"]
    texts = ["Ahoy, matey! …", "…"]

``prompt`` is the system message, ``markers`` are counted in what the model writes, ``texts`` show
the persona speaking, four at least, for the axis that tells it from another one.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtransfer.errors import PersonaError
from kvtransfer.measures.markers import fold, words

FOLDER = Path(__file__).parent / "personas"

EXAMPLE = (
    "name, prompt (the system message), markers (a list of its words) and texts (four or more in "
    "which it speaks), in TOML or JSON"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Persona:
    """A way of speaking that a model can be asked for."""

    name: str
    prompt: str
    """The system message."""
    markers: tuple[str, ...]
    """Words and phrases by which one knows it; see :mod:`kvtransfer.measures.markers`."""
    texts: tuple[str, ...] = ()
    """What it sounds like. The more, and the more different their subjects, the better."""

    def require_texts(self, count: int) -> None:
        """Raise PersonaError unless there are ``count`` example texts or more."""
        if len(self.texts) < count:
            raise PersonaError(
                f"persona {self.name!r} has {len(self.texts)} example texts, and the persona axis "
                f"needs {count}",
                hint="add texts in which it speaks, a few sentences each, on different subjects",
            )


def builtin_personas() -> tuple[str, ...]:
    """Names of the personas that come with kvtransfer."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def read_persona(name: str | Path) -> Persona:
    """Read a persona: a file, or the name of a builtin one.

    Raises:
        PersonaError: there is none, it cannot be read, or it lacks a name, a prompt or markers.
    """
    known = builtin_personas()
    path = FOLDER / f"{name}.toml" if name in known else Path(name)
    hint = f"a .toml or .json file, or a builtin one: {', '.join(known)}"
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise PersonaError(f"no persona {str(name)!r}", hint=hint) from error
    except (OSError, ValueError) as error:  # ValueError: its bytes, or a null in its name
        raise PersonaError(f"{path} cannot be read as UTF-8 text: {error}", hint=hint) from error
    try:
        found = json.loads(text) if path.suffix.lower() == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        kind = "JSON" if path.suffix.lower() == ".json" else "TOML"
        raise PersonaError(f"{path} is not {kind}: {error}", hint=EXAMPLE) from error
    if not isinstance(found, Mapping):
        raise PersonaError(f"{path} holds a {type(found).__name__}", hint=EXAMPLE)
    return _persona(found, path)


def _persona(found: Mapping[str, Any], path: Path) -> Persona:
    """What a file says, once each part of it is seen to say something."""
    if unknown := sorted(set(found) - {"name", "prompt", "markers", "texts"}):
        raise PersonaError(f"{path} has an unknown entry {unknown[0]!r}", hint=EXAMPLE)
    markers = _texts(found, "markers", path)
    if not markers:
        raise PersonaError(
            f"{path} has no markers",
            hint="list words and phrases by which one knows the persona: without any, nothing "
            "tells whether the model speaks as it",
        )
    if silent := [marker for marker in markers if not words(marker)]:
        raise PersonaError(
            f"{path}: the marker {silent[0]!r} holds no word",
            hint="density is per 100 words; leave marks and emoji out",
        )
    return Persona(
        name=_text(found, "name", path, otherwise=path.stem),
        prompt=_text(found, "prompt", path),
        markers=tuple(dict.fromkeys(map(fold, markers))),
        texts=_texts(found, "texts", path),
    )


def _text(found: Mapping[str, Any], key: str, path: Path, otherwise: str | None = None) -> str:
    text = found.get(key, otherwise)
    if text is None:
        raise PersonaError(f"{path} has no {key}", hint=EXAMPLE)
    if not isinstance(text, str):
        raise PersonaError(f"{path}: {key} is no text, but {text!r}", hint=EXAMPLE)
    if not text.strip():
        raise PersonaError(f"{path} has an empty {key}", hint=EXAMPLE)
    # Chat templates trim a message, or refuse it.
    return text.strip()


def _texts(found: Mapping[str, Any], key: str, path: Path) -> tuple[str, ...]:
    listed = found.get(key, [])
    if not isinstance(listed, list) or not all(
        isinstance(each, str) and each.strip() for each in listed
    ):
        raise PersonaError(f"{path}: {key} is not a list of texts", hint=EXAMPLE)
    return tuple(each.strip() for each in listed)
