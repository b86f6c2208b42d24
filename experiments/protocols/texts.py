"""Texts of three domains, each in two parts that share no document.

    python experiments/protocols/texts.py wikitext2-valid.txt --out texts

Writes NAME.fit.jsonl and NAME.heldout.jsonl to the folder, for ``docs`` (the builtin prose:
documentation and docstrings), ``code`` (the standard library's sources, without the docstrings that
``docs`` holds) and ``wiki`` (the articles of the file).
"""

import argparse
import ast
import hashlib
import json
import re
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvtransfer.fitting.texts import builtin

HELD_OUT = 4
"""One document in so many, by its digest; of ``docs``, one in ten is held out as ever."""
SHORTEST = 2_000
"""Characters of a source file or an article; below, there is little to read."""
TITLE = re.compile(r"^ = [^=].*[^=] = $", re.MULTILINE)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def main() -> None:
    """Write the six files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wikitext", type=Path)
    parser.add_argument("--out", type=Path, default=Path("texts"))
    asked = parser.parse_args()

    asked.out.mkdir(parents=True, exist_ok=True)
    for split in ("fit", "heldout"):
        write(asked.out / f"docs.{split}.jsonl", builtin(split))
    for name, texts in (("code", sources()), ("wiki", articles(asked.wikitext))):
        ordered = sorted({text for text in texts if len(text) >= SHORTEST}, key=digest)
        held = [text for text in ordered if digest(text)[0] % HELD_OUT == 0]
        write(asked.out / f"{name}.heldout.jsonl", held)
        write(asked.out / f"{name}.fit.jsonl", [text for text in ordered if text not in held])


def sources() -> Iterator[str]:
    """The standard library's modules, their docstrings cut out."""
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if {"site-packages", "dist-packages", "test", "tests", "idle_test"} & set(parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            tree = ast.parse(text)
        except (SyntaxError, UnicodeDecodeError):
            continue  # lib2to3 and the like carry files broken on purpose
        lines = text.splitlines(keepends=True)
        for node in ast.walk(tree):
            if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                first = node.body[0]
                for number in range(first.lineno - 1, first.end_lineno or first.lineno):
                    lines[number] = ""
        yield "".join(lines)


def articles(path: Path) -> Iterator[str]:
    """Whole articles of a WikiText file."""
    text = path.read_text(encoding="utf-8")
    starts = [found.start() for found in TITLE.finditer(text)]
    for start, end in zip(starts, [*starts[1:], len(text)], strict=True):
        yield text[start:end]


def digest(text: str) -> bytes:
    """What orders and parts the documents."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def write(path: Path, texts: Iterable[str]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


if __name__ == "__main__":
    main()
