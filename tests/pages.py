"""The code of a Markdown page: run in order, and held against what the page says it prints.

A Python block is run; a ``text`` block right after it is what it prints. Names live on from block
to block. A Python block whose first line is ``# some/path.py`` is a file of that name instead, and
a ``diff`` block a change to files: a page that has one is run, block after block, each as a program
of its own, on a copy of the package.
"""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(python|console|text|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w/]+\.py)\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of a page."""

    kind: str
    body: str
    printed: str | None
    """The text block right after it."""
    end: int
    """Where it ends in the page."""

    @property
    def file(self) -> str | None:
        """The path of the file that it is; None where it is code to be run."""
        named = FILE.match(self.body) if self.kind == "python" else None
        return named[1] if named else None

    @property
    def changes(self) -> bool:
        """Whether it makes or changes a file."""
        return self.kind == "diff" or self.file is not None


def blocks(page: Path) -> list[Block]:
    """Every block of a page but the printed ones, in order."""
    text = page.read_text(encoding="utf-8")
    found = list(BLOCK.finditer(text))
    after = [*(match[2] if match[1] == "text" else None for match in found[1:]), None]
    return [
        Block(kind=match[1], body=match[2], printed=printed, end=match.end())
        for match, printed in zip(found, after, strict=False)  # a page may have none
        if match[1] != "text"
    ]


def snippets(page: Path) -> list[Block]:
    """The Python blocks that are to be run."""
    return [each for each in blocks(page) if each.kind == "python" and each.file is None]


def commands(page: Path) -> list[str]:
    """The command lines that begin with kvtransfer, in order."""
    return [
        line.removeprefix("$ ")
        for each in blocks(page)
        if each.kind == "console"
        for line in each.body.replace("\\\n", " ").splitlines()
        if line.startswith("$ kvtransfer ")
    ]


def printed(page: Path, folder: Path) -> Iterator[tuple[Block, str]]:
    """Every block of a page that is run, in order, in ``folder``, and what it prints."""
    every = blocks(page)
    if any(block.changes for block in every):
        yield from _printed_in_copy(every, folder)
        return
    names: dict[str, Any] = {}
    for block in every:
        if block.kind == "python":
            yield block, run(block, page, folder, names)


def run(block: Block, page: Path, folder: Path, names: dict[str, Any]) -> str:
    """What the block prints, run in ``folder`` with ``names``, which it may add to."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.chdir(folder):
        exec(compile(block.body, str(page), "exec"), names)
    return out.getvalue()


def _printed_in_copy(every: list[Block], folder: Path) -> Iterator[tuple[Block, str]]:
    for name in ("kvtransfer", "mappings"):
        shutil.copytree(ROOT / name, folder / name, copy_function=_copied)
    environment = os.environ | {"PYTHONPATH": str(folder)}
    for block in every:
        if block.file is not None:
            (folder / block.file).write_text(block.body, encoding="utf-8")
        elif block.kind == "diff":
            _do(["patch", "--batch", "--silent", "--strip=1"], folder, environment, block.body)
        elif block.kind == "python":
            yield block, _do([sys.executable, "-c", block.body], folder, environment)


def _do(program: list[str], folder: Path, environment: dict[str, str], given: str = "") -> str:
    done = subprocess.run(
        program,
        cwd=folder,
        env=environment,
        input=given,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{done.stdout}{done.stderr}")
    return done.stdout


def _copied(source: str, target: str) -> None:
    """Code is copied, because it is to be changed; all else is large, and linked."""
    if source.endswith(".py"):
        shutil.copy(source, target)
    else:
        Path(target).symlink_to(source)
