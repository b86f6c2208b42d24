"""Saved things: one folder, three files, readable without running our code.

config.json          what it is, for which models, and the checksum of the numbers
tensors.safetensors  the numbers
README.md            a card that a person can read
"""

import hashlib
import json
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvtransfer.errors import ArtifactError
from kvtransfer.report import to_json

FORMAT = 3
"""What is written. Format 1 had no scale a row beside its int8 matrices, and up to format 2 no map
read of the token before."""

READABLE = (1, 2, 3)
MAKER = "kvtransfer fit … --out DIR"
CONFIG, TENSORS, CARD = "config.json", "tensors.safetensors", "README.md"


def save(
    folder: Path, *, kind: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], card: str
) -> None:
    """Write an artifact, replacing an artifact that was there.

    The files are written to a temporary folder beside ``folder``, which then takes its name: an
    interrupted save leaves the old artifact or none, never half of one.

    Raises:
        ArtifactError: the place cannot be written, or holds something that is no artifact.
    """
    refuse_foreign(folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as name:
            fresh = Path(name) / "fresh"
            fresh.mkdir()
            (fresh / CARD).write_text(card, encoding="utf-8")
            write_tensors(fresh / TENSORS, tensors)
            head = {"format": FORMAT, "kind": kind, "sha256": checksum(fresh / TENSORS)}
            (fresh / CONFIG).write_text(to_json(head | dict(config)), encoding="utf-8")
            if folder.exists():
                folder.rename(Path(name) / "old")
            fresh.rename(folder)
    except OSError as error:
        raise unwritable(folder, error) from error


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], told: Mapping[str, str] | None = None
) -> None:
    """One safetensors file, which whoever may read new files may read.

    Args:
        path: Where to.
        tensors: By name.
        told: What its head says beside them.

    Raises:
        OSError: it cannot be written.
    """
    path.touch()
    mode = path.stat().st_mode
    try:
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(whole, path, metadata=dict(told) if told else None)
    except SafetensorError as error:  # its own kind, also for a full disk
        raise OSError(str(error)) from error
    path.chmod(mode)  # it writes files that only their owner may read


def unwritable(folder: Path, error: OSError) -> ArtifactError:
    """What to raise where an artifact could not be written."""
    return ArtifactError(
        f"{folder} cannot be written: {error.strerror or error}",
        hint="choose another --out, or make room",
    )


def refuse_foreign(folder: Path, *, files: Collection[str] = (CONFIG, TENSORS, CARD)) -> None:
    """Raise ArtifactError if saving to ``folder`` would destroy something we did not write."""
    if folder.is_file():
        raise ArtifactError(f"{folder} is a file", hint="name a folder to write to")
    held = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if held and (held - set(files) or not _is_ours(folder / CONFIG)):
        raise ArtifactError(
            f"{folder} exists and holds something else than a kvtransfer artifact",
            hint="name a new or empty folder",
        )


def load(
    folder: Path, *, kind: str, maker: str = MAKER
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read an artifact back, refusing what this version cannot mean.

    Args:
        folder: Of the artifact.
        kind: That is expected.
        maker: The command that writes one.

    Raises:
        ArtifactError: something is missing, malformed, of another kind or format, changed since
            it was written, or not finite.
    """
    config = read_config(folder, kind=kind, maker=maker)
    path = folder / TENSORS
    if not path.is_file():
        raise ArtifactError(f"{folder} has no {TENSORS}", hint="copy the whole folder")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise truncated(path, error) from error
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise ArtifactError(
                f"{path}: {name} holds {bad} numbers that are NaN or infinite",
                hint="make the artifact again; a fit on finite caches gives finite maps",
            )
    if (found := checksum(path)) != config["sha256"]:
        raise changed(path, found, config["sha256"])
    return config, tensors


def truncated(path: Path, error: SafetensorError) -> ArtifactError:
    """What to raise for a file that safetensors cannot open."""
    return ArtifactError(
        f"{path} is truncated or no safetensors file ({path.stat().st_size} bytes): {error}",
        hint="copy or make it again",
    )


def changed(path: Path, found: str, expected: object) -> ArtifactError:
    """What to raise for a file that is not what was written."""
    return ArtifactError(
        f"{path} has checksum {found[:12]}, its config.json says {str(expected)[:12]}",
        hint="the file changed after it was written; copy or make it again",
    )


def read_config(
    folder: Path,
    *,
    kind: str,
    readable: Collection[int] = READABLE,
    maker: str = MAKER,
) -> dict[str, Any]:
    """The config alone, with format and kind checked; raises ArtifactError as :func:`load`.

    Args:
        folder: Of the artifact.
        kind: That is expected.
        readable: Formats that can be read.
        maker: The command that writes one.
    """
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ArtifactError(
            f"{folder} holds no {kind.replace('_', ' ')}: it has no {CONFIG}",
            hint=f"check the path; `{maker}` writes one",
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ArtifactError(
            f"{path} cannot be read as JSON: {error}", hint="copy or make the artifact again"
        ) from error
    if not isinstance(config, dict):
        raise ArtifactError(
            f"{path} holds a {type(config).__name__}, not an object",
            hint="copy or make the artifact again",
        )
    require(config, ("format", "kind", "sha256"), path)
    if config["kind"] == kind and config["format"] not in readable:
        raise ArtifactError(
            f"{path} is in format {config['format']!r}; this version reads {_formats(readable)}",
            hint="use the version of kvtransfer that wrote it, or make it again",
        )
    if config["kind"] != kind:
        raise ArtifactError(
            f"{path} describes a {config['kind']!r}, not a {kind!r}",
            hint=f"name the folder of a {kind.replace('_', ' ')}",
        )
    return config


def require(config: Mapping[str, Any], fields: tuple[str, ...], where: Path) -> None:
    """Raise ArtifactError, naming the fields that ``config`` lacks."""
    if missing := [field for field in fields if field not in config]:
        raise ArtifactError(
            f"{where} lacks {', '.join(missing)}",
            hint="the file was edited or is incomplete; copy or make the artifact again",
        )


def _formats(readable: Collection[int]) -> str:
    *most, last = map(str, sorted(readable))
    return f"formats {', '.join(most)} and {last}" if most else f"format {last}"


def _is_ours(config: Path) -> bool:
    """Whether an artifact of ours lies here: a model folder has a config.json, too."""
    try:
        found = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and {"format", "kind", "sha256"} <= found.keys()


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
