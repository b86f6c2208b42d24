"""A folder that several processes may save to, and any of them may be killed at any moment.

What is to appear is written under a name that nobody looks for, made to survive a power cut, and
renamed. This module knows nothing of what the files say.
"""

import os
import re
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from filelock import FileLock, Timeout

from kvtransfer.errors import ArtifactError

LOCK = ".lock"
PATIENCE = 600
"""Seconds that a save waits for another one to the same folder."""

BLOCK = 1 << 20
"""Bytes of a file that are read at once."""


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder against others who save there; it is free again if this process dies."""
    try:
        with FileLock(folder / LOCK, timeout=PATIENCE):
            yield
    except Timeout as error:
        raise ArtifactError(
            f"another process has been saving to {folder} for {PATIENCE} seconds",
            hint="wait for it, or choose another --out",
        ) from error


def hidden_in(folder: Path) -> Path:
    """A new name there for what is not finished."""
    return folder / f".{uuid4().hex}"


def named_in(folder: Path, suffix: str) -> Path:
    """A new name there for what is."""
    return folder / f"{uuid4().hex}{suffix}"


def replace(folder: Path, name: str, text: str, *, by: Path) -> None:
    """Put a whole new file in the place of another, in one step, made in the folder ``by``."""
    fresh = hidden_in(by)
    try:
        fresh.write_text(text, encoding="utf-8")
        settle(fresh)
        settle(by)  # the files that it speaks of have their names by then
        fresh.replace(folder / name)
        settle(folder)
    finally:
        fresh.unlink(missing_ok=True)


def settle(path: Path) -> None:
    """Wait until a file, or what a folder lists, would survive a power cut."""
    if os.name != "posix" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sweep(folder: Path, keep: set[str]) -> None:
    """Remove files that are not among those to keep, and what interrupted saves left."""
    for path in folder.iterdir():
        if path.name not in keep and is_ours(path):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def is_ours(path: Path) -> bool:
    """Whether something has a name that we give: a file, or what is to become one."""
    return re.fullmatch(r"[0-9a-f]{32}\.safetensors|\.[0-9a-f]{32}", path.name) is not None


def crc32(path: Path) -> int:
    """Of a whole file."""
    found = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            found = zlib.crc32(block, found)
    return found
