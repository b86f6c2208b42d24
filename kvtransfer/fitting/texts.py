"""Calibration text: documents from files, a hub data set, or the prose that every Python carries.

A document is a plain string. This module knows nothing of tokens or models.
"""

import ast
import hashlib
import inspect
import json
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from kvtransfer.errors import TextError
from kvtransfer.fitting.surface import SPACED, as_named
from kvtransfer.hf.hub import unreachable

Split = Literal["fit", "heldout"]

SHORTEST_DOCSTRING = 80
"""Characters below which a docstring is a label rather than prose."""


SURROGATE = re.compile("[\ud800-\udfff]")
"""JSON can spell it, but no text holds it, and no tokenizer takes it."""

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def documents(name: str) -> Iterator[str]:
    """Yield the documents that ``name`` stands for, in a fixed order.

    ``builtin`` is :func:`builtin`'s fit split; a path ends in ``.txt`` or ``.md`` (one document),
    ``.jsonl`` (a ``text`` field per line) or ``.parquet`` (a ``text`` column); anything else that
    is no path is a hub data set, ``owner/name`` or ``owner/name:config``, streamed from its
    ``train`` split.

    Raises:
        TextError: the file is missing, empty, or not what its ending promises, or the hub
            cannot be reached.
    """
    if name == "builtin":
        yield from builtin("fit")
        return
    path = Path(name)
    reader = READERS.get(path.suffix.lower())
    try:
        is_file, is_path = path.is_file(), path.exists()
    except OSError:  # no path can be as long as that
        is_file, is_path = False, True
    if is_file:
        yield from _not_empty(path, (reader or _plain)(path))
    elif reader is not None or is_path or name.startswith((".", "/", "~")):
        raise TextError(
            f"no text file at {name[:200]}",
            hint="give an existing .txt, .jsonl or .parquet file, a hub data set, or 'builtin'",
        )
    else:
        yield from _hub(name)


def read_all(names: Iterable[str | Iterator[str]]) -> Iterator[str]:
    """The documents of several names, interleaved; ``-`` is standard input, and ``spaced:NAME``
    is NAME with every punctuation mark on its own.

    An iterator of documents may stand in a name's place.

    Whoever has given the fewest characters so far goes next, so that any leading part holds as
    much of each. Every name's first document is read at once: a missing file is known before an
    hour of work.

    Raises:
        TextError: as :func:`documents`.
    """
    sources = [_open(name) if isinstance(name, str) else name for name in names]
    held = [next(source, None) for source in sources]
    if all(text is None for text in held):
        raise TextError("there is no text", hint="name a text file, or 'builtin'")
    return _interleave(sources, held)


def _open(name: str) -> Iterator[str]:
    if name.startswith(SPACED):
        return as_named(name, _open(name.removeprefix(SPACED)))
    return _stdin() if name == "-" else documents(name)


def _interleave(sources: list[Iterator[str]], held: list[str | None]) -> Iterator[str]:
    given = [0] * len(sources)
    while waiting := [i for i, text in enumerate(held) if text is not None]:
        turn = min(waiting, key=given.__getitem__)
        text = held[turn]
        assert text is not None
        yield text
        given[turn] += len(text)
        held[turn] = next(sources[turn], None)


def builtin(split: Split) -> tuple[str, ...]:
    """English prose that this Python carries: the language reference and the docstrings.

    One document in ten, picked by its digest, is ``heldout`` and never used to fit. The order is
    by digest too, so that any leading part is a fair sample. About two million characters.
    """
    return _prose()[split]


def held_out(name: str | None = None) -> Iterable[str]:
    """Documents that no fit on ``builtin`` has read: of ``name``, or the held-out prose."""
    return builtin("heldout") if name in (None, "builtin") else read_all([name])


@cache
def _prose() -> Mapping[Split, tuple[str, ...]]:
    texts = {text for text in (*_reference(), *_docstrings()) if len(text) >= SHORTEST_DOCSTRING}
    split: dict[Split, list[str]] = {"fit": [], "heldout": []}
    for text in sorted(texts, key=_digest):
        split["heldout" if _digest(text)[0] % 10 == 0 else "fit"].append(text)
    return {name: tuple(part) for name, part in split.items()}


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def _reference() -> Iterator[str]:
    from pydoc_data.topics import topics

    yield from topics.values()


def _docstrings() -> Iterator[str]:
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if {"site-packages", "dist-packages", "test", "tests", "idle_test"} & set(parts):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue  # lib2to3 and the like carry files broken on purpose
        for node in _statements(tree):
            if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node, clean=False)):
                yield inspect.cleandoc(text)


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """A node and the statements below it. Expressions hold no docstring, and are most of a tree."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for block in ("body", "handlers", "orelse", "finalbody", "cases"):
            inner = getattr(node, block, None)
            if isinstance(inner, list):  # a lambda's body is an expression
                waiting += inner


def _stdin() -> Iterator[str]:
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise TextError(
            f"standard input is not UTF-8 text (byte {error.start})", hint="convert it to UTF-8"
        ) from error
    if not text.strip():
        raise TextError("standard input holds no text", hint="pipe prose in, or name a file")
    yield text


def _plain(path: Path) -> Iterator[str]:
    try:
        yield path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise TextError(
            f"{path} is not UTF-8 text (byte {error.start})", hint="convert it to UTF-8"
        ) from error


def _jsonl(path: Path) -> Iterator[str]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except UnicodeDecodeError as error:
                raise TextError(
                    f"{path}, line {number} is not UTF-8 text", hint="convert it to UTF-8"
                ) from error
            except json.JSONDecodeError as error:
                raise TextError(
                    f"{path}, line {number} is not JSON: {error.msg}",
                    hint='each line is an object such as {"text": "…"}',
                ) from error
            yield _text_of(row, f"{path}, line {number}")


def _parquet(path: Path) -> Iterator[str]:
    from pyarrow import ArrowException, parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield _text_of(row, f"{path}, row {number}")
    except ArrowException as error:
        raise TextError(
            f"{path} cannot be read as parquet: {error}", hint="copy or make the file again"
        ) from error


def _hub(name: str) -> Iterator[str]:
    from datasets import load_dataset

    repository, _, config = name.partition(":")
    try:
        if unreachable():
            raise ConnectionError("the hub does not answer")
        rows = load_dataset(repository, config or None, split="train", streaming=True)
    except Exception as error:  # offline, unknown, gated, without a train split: all end here
        raise TextError(
            f"{name} is no file here, and no hub data set by that name can be read",
            hint="check the path and the network, or use --data builtin, which needs neither",
        ) from error
    for number, row in enumerate(rows, 1):
        yield _text_of(row, f"{name}, row {number}")


def _text_of(row: Any, where: str) -> str:
    text = row.get("text") if isinstance(row, Mapping) else None
    if not isinstance(text, str):
        raise TextError(f"{where} has no 'text' string", hint="name the text column 'text'")
    if SURROGATE.search(text):
        raise TextError(f"{where} holds half a character (a lone surrogate)", hint="leave it out")
    return text


def _not_empty(path: Path, texts: Iterator[str]) -> Iterator[str]:
    found = False
    try:
        for text in texts:
            if text.strip():
                found = True
                yield text
    except OSError as error:
        raise TextError(
            f"{path} cannot be read: {error.strerror or error}", hint="check its permissions"
        ) from error
    if not found:
        raise TextError(f"{path} holds no text", hint="give a file with prose in it")


READERS: Mapping[str, Callable[[Path], Iterator[str]]] = MappingProxyType(
    {".txt": _plain, ".md": _plain, ".jsonl": _jsonl, ".parquet": _parquet},
)
"""File readers by ending. A file with another ending is read as plain text."""
