"""Schemas of prompt modules, and the JSON file that holds one.

    {"name": "trip",
     "layout": [
       {"module": "persona", "text": "You are a travel agent.\\n"},
       {"union": "city", "modules": [
         {"module": "paris", "text": "Paris lies on the Seine.\\n"},
         {"module": "rome", "text": "Rome lies on the Tiber.\\n"}]},
       {"module": "plan", "text": "Plan {days} days.", "parameters": {"days": 4}}]}

Modules follow each other; those of a union are alternatives, and begin at the same place. A
parameter is a place in a module's text, ``{days}``, that a prompt fills with at most so many
tokens; its name has no braces, and braces around any other word are text. (Prompt Cache: Gim et
al., arXiv:2311.04934.)
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtransfer.errors import SchemaError

FORM = '{"name": "…", "layout": [{"module": "…", "text": "…"}, {"union": "…", "modules": […]}]}'


@dataclass(frozen=True, slots=True)
class Parameter:
    """A place that a prompt fills."""

    name: str
    tokens: int
    """At most."""


@dataclass(frozen=True, slots=True)
class Module:
    """A text that prompts may have in them, always at the same place."""

    name: str
    parts: tuple[str | Parameter, ...]
    """Text, and the places between."""

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """In the order of the text."""
        return tuple(part for part in self.parts if isinstance(part, Parameter))


@dataclass(frozen=True, slots=True)
class Slot:
    """A stretch of positions, for one of several modules, or for the only one."""

    union: str | None
    modules: tuple[Module, ...]


@dataclass(frozen=True, slots=True)
class Schema:
    """What prompts may be put together from, and in which order it stands."""

    name: str
    slots: tuple[Slot, ...]

    @property
    def modules(self) -> Iterator[Module]:
        """All of them, in order."""
        return (module for slot in self.slots for module in slot.modules)

    @classmethod
    def from_dict(cls, data: Any, *, where: str = "the schema") -> "Schema":
        """A schema from plain data.

        Raises:
            SchemaError: it is malformed; the place is named.
        """
        row = _object(data, where, required=("name", "layout"))
        layout = row["layout"]
        if not isinstance(layout, list) or not layout:
            raise _malformed(f"{where}: 'layout' is no list of modules and unions")
        slots = tuple(_slot(each, f"{where}, slot {i}") for i, each in enumerate(layout, 1))
        found = cls(_name(row, "name", where), slots)
        for kind, names in (
            ("module", [module.name for module in found.modules]),
            ("union", [slot.union for slot in slots if slot.union is not None]),
        ):
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise _malformed(f"{where}: two {kind}s are called {twice!r}")
        return found


def read_schema(path: str | Path) -> Schema:
    """Read a schema from a JSON file.

    Raises:
        SchemaError: the file is missing, is not JSON, or no schema; the place in it is named.
    """
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise SchemaError(f"no schema at {path}", hint="check the path") from error
    except (OSError, UnicodeDecodeError) as error:
        raise SchemaError(f"{path} cannot be read: {error}", hint="give JSON in UTF-8") from error
    except json.JSONDecodeError as error:
        raise SchemaError(
            f"{path}, line {error.lineno} is not JSON: {error.msg}", hint=f"such as {FORM}"
        ) from error
    return Schema.from_dict(data, where=str(path))


def _slot(data: Any, where: str) -> Slot:
    if isinstance(data, Mapping) and "union" in data:
        row = _object(data, where, required=("union", "modules"))
        union = _name(row, "union", where)
        where = f"{where} (union {union!r})"
        if not isinstance(row["modules"], list) or not row["modules"]:
            raise _malformed(f"{where}: 'modules' is no list of modules")
        return Slot(
            union,
            tuple(
                _module(each, f"{where}, alternative {i}")
                for i, each in enumerate(row["modules"], 1)
            ),
        )
    return Slot(None, (_module(data, where),))


def _module(data: Any, where: str) -> Module:
    row = _object(data, where, required=("module", "text"), optional=("parameters",))
    name = _name(row, "module", where)
    where = f"{where} (module {name!r})"
    text = _name(row, "text", where)
    given = row.get("parameters", {})
    if not isinstance(given, Mapping):
        raise _malformed(f"{where}: 'parameters' is no object of names and numbers of tokens")
    for parameter, tokens in given.items():
        if not isinstance(parameter, str) or not parameter.strip() or {*parameter} & {*"{}"}:
            # With a brace in it, its place could overlap that of another one.
            raise _malformed(f"{where}: a parameter is called {parameter!r}, and not by a word")
        if type(tokens) is not int or tokens < 1:  # in JSON, true is no number
            raise _malformed(f"{where}: parameter {parameter!r} has {tokens!r} tokens")
        if (times := text.count("{" + parameter + "}")) != 1:
            raise _malformed(f"{where}: {{{parameter}}} stands {times} times in the text, not once")
    if not given:
        return Module(name, (text,))
    places = re.compile("(" + "|".join(re.escape("{" + each + "}") for each in given) + ")")
    parts = (
        Parameter(part[1:-1], given[part[1:-1]]) if places.fullmatch(part) else part
        for part in places.split(text)
    )
    return Module(name, tuple(part for part in parts if part))


def _object(
    data: Any, where: str, *, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise _malformed(f"{where} is a {type(data).__name__}, not an object")
    for field in required:
        if field not in data:
            raise _malformed(f"{where} has no {field!r}")
    for field in data:
        if field not in (*required, *optional):
            raise _malformed(f"{where} has an unknown field {field!r}")
    return data


def _name(row: Mapping[str, Any], field: str, where: str) -> str:
    text = row[field]
    if not isinstance(text, str) or not text.strip():
        raise _malformed(f"{where}: there is no text in {field!r}")
    if any("\ud800" <= letter <= "\udfff" for letter in text):  # JSON can spell it; no text has it
        raise _malformed(f"{where}: {field!r} holds half a character")
    return text


def _malformed(message: str) -> SchemaError:
    return SchemaError(message, hint=f"such as {FORM}")
