"""How a pack lies on the disk: a list of guides, and for each of them a file of its own.

config.json              what it is, for which model, and the names of the guides in their order
guides/….safetensors     one guide: keys, values, ids; in its head the text and how it was made
README.md                a card that a person can read

Files of guides are named anew in every save and never written to again, and config.json is replaced
in one step. So whoever reads sees the pack as it was before a save or as it is after it, whenever
the one who saves is interrupted.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kvtransfer import artifact
from kvtransfer.errors import ArtifactError
from kvtransfer.guides import durable
from kvtransfer.report import to_json

KIND = "guide_pack"
FORMAT = 1
READABLE = (1,)
GUIDES = "guides"

Entry = dict[str, Any]
"""One guide as config.json has it: ``name``, ``tokens``, ``file``, and that one's ``crc32``, which
is looked at whenever the guide is read: a SHA-256 would take longer than all the rest of it. No
more than that, so that a pack of many guides opens as quickly as one of few."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Volume:
    """One guide on its way to the disk."""

    name: str
    tokens: int
    told: Mapping[str, str]
    """What the head of its file says."""
    tensors: Mapping[str, Tensor]


FIELDS = {"name": str, "tokens": int, "file": str, "crc32": int}
"""What an entry has, and of what kind."""


def save(
    folder: Path, head: Mapping[str, Any], guides: Iterable[Volume], card: Callable[[], str]
) -> None:
    """Write a pack, replacing a pack that was there.

    Guides are taken one at a time, when the one before is written; the card after the last.

    Raises:
        ArtifactError: the place cannot be written, holds something that is no pack, or another
            process has been saving there for minutes.
    """
    refuse_foreign(folder)
    guides = iter(guides)
    # The first is made before the folder: what is wrong with all of them leaves no trace. Its list
    # lets go of it when the second is asked for.
    guides = chain(list(islice(guides, 1)), guides)
    try:
        (folder / GUIDES).mkdir(parents=True, exist_ok=True)
        with durable.alone(folder):
            entries = _put_all(folder / GUIDES, guides)
            before = _held(folder)
            config = dict(head) | {"format": FORMAT, "kind": KIND, "guides": entries}
            config["sha256"] = digest(config)
            durable.replace(folder, artifact.CARD, card(), by=folder / GUIDES)
            durable.replace(folder, artifact.CONFIG, to_json(config), by=folder / GUIDES)
            # What the last pack held stays for those who have it open; what was before it goes.
            kept = before | {str(entry["file"]) for entry in entries}
            durable.sweep(folder / GUIDES, kept)
    except OSError as error:
        raise artifact.unwritable(folder, error) from error


def load(folder: Path) -> dict[str, Any]:
    """A pack's config; its guides are opened one at a time, by :func:`tensors_of`.

    Raises:
        ArtifactError: there is none, or it is malformed, of another format, or was edited.
    """
    config = artifact.read_config(
        folder, kind=KIND, readable=READABLE, maker="kvtransfer pack build … --out DIR"
    )
    where = folder / artifact.CONFIG
    artifact.require(config, ("model", "guides", "provenance"), where)
    entries = config["guides"]
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ArtifactError(f"{where} has no list of guides", hint="copy or make the pack again")
    if not isinstance(config["provenance"], dict):
        raise ArtifactError(
            f"{where} has a provenance of {config['provenance']!r}", hint="make the pack again"
        )
    for entry in entries:
        _check_entry(entry, where)
    if (found := digest(config)) != config["sha256"]:
        raise artifact.changed(where, found, config["sha256"])
    return config


def tensors_of(folder: Path, entry: Entry) -> dict[str, Tensor]:
    """The numbers of one guide, mapped into memory; their checksum is compared first.

    Raises:
        ArtifactError: they are missing, truncated, or not what was written.
    """
    path = _path(folder, entry)
    with _readable(path, entry):
        _require_written(path, entry)
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def told_of(folder: Path, entry: Entry, *, sure: bool = False) -> dict[str, str]:
    """What the head of a guide's file says.

    Args:
        folder: The pack.
        entry: Of the guide.
        sure: Whether the file's checksum was compared just now, by :func:`tensors_of`.

    Raises:
        ArtifactError: as :func:`tensors_of`.
    """
    path = _path(folder, entry)
    with _readable(path, entry):
        if not sure:
            _require_written(path, entry)
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {})


def _require_written(path: Path, entry: Entry) -> None:
    """Raise ArtifactError unless a guide's file is, head and numbers, what was written."""
    if (found := durable.crc32(path)) != entry["crc32"]:
        raise artifact.changed(path, f"{found:08x}", f"{entry['crc32']:08x}")


@contextmanager
def _readable(path: Path, entry: Entry) -> Iterator[None]:
    """Say of a guide's file what is wrong with it."""
    try:
        yield
    except FileNotFoundError as error:
        raise ArtifactError(
            f"{path}, the guide {entry['name']!r}, is gone",
            hint="copy the whole folder; if the pack was saved anew since it was opened, open it "
            "again",
        ) from error
    except SafetensorError as error:
        raise artifact.truncated(path, error) from error
    except OSError as error:
        raise ArtifactError(
            f"{path} cannot be read: {error.strerror or error}", hint="copy the pack again"
        ) from error


def _path(folder: Path, entry: Entry) -> Path:
    return folder / GUIDES / Path(entry["file"]).name  # a file of this folder, and no other


def _check_entry(entry: Entry, where: Path) -> None:
    """Raise ArtifactError unless a guide is described as we describe it."""
    artifact.require(entry, tuple(FIELDS), where)
    for field, kind in FIELDS.items():
        if type(entry[field]) is not kind:
            raise ArtifactError(
                f"{where} has {field} {entry[field]!r} of the guide {entry['name']!r}",
                hint="the file was edited; copy or make the pack again",
            )


def refuse_foreign(folder: Path) -> None:
    """Raise ArtifactError if the folder holds something else than a pack, or what a first save
    left of one when it was interrupted."""
    guides = folder / GUIDES
    foreign = (
        [path for path in guides.iterdir() if not durable.is_ours(path)] if guides.is_dir() else []
    )
    if foreign:
        raise ArtifactError(
            f"{foreign[0]} is no guide of a pack", hint="name a new or empty folder"
        )
    if folder.is_dir() and {path.name for path in folder.iterdir()} <= {GUIDES, durable.LOCK}:
        return
    artifact.refuse_foreign(folder, files=(artifact.CONFIG, artifact.CARD, GUIDES, durable.LOCK))
    if (folder / artifact.CONFIG).exists():
        try:
            artifact.read_config(folder, kind=KIND, readable=READABLE)
        except ArtifactError as error:
            raise ArtifactError(
                f"{folder} exists and holds no guide pack that this version knows",
                hint="name a new or empty folder",
            ) from error


def _put_all(guides: Path, volumes: Iterable[Volume]) -> list[Entry]:
    """Write their files; none of them stays if one cannot be made or written."""
    entries: list[Entry] = []
    try:
        # Not by a loop of ours, whose name for a volume would keep it until the next one is made.
        entries.extend(map(partial(_put, guides), volumes))
    except BaseException:
        for entry in entries:
            (guides / entry["file"]).unlink(missing_ok=True)
        raise
    return entries


def _put(guides: Path, volume: Volume) -> Entry:
    """Write a guide's file, and return its entry."""
    # In a folder of its own: safetensors writes to a file that it names itself, which stays behind
    # if this process is killed.
    begun = durable.hidden_in(guides)
    path = durable.named_in(guides, ".safetensors")
    try:
        begun.mkdir()
        fresh = begun / path.name
        artifact.write_tensors(fresh, volume.tensors, volume.told)
        found = durable.crc32(fresh)
        durable.settle(fresh)
        fresh.replace(path)
    finally:
        shutil.rmtree(begun, ignore_errors=True)
    return {"name": volume.name, "tokens": volume.tokens, "file": path.name, "crc32": found}


def _held(folder: Path) -> set[str]:
    """Files of the guides that the pack held until now."""
    try:
        return {str(entry["file"]) for entry in load(folder)["guides"]}
    except ArtifactError:  # there was none, or it was damaged
        return set()


def digest(config: Mapping[str, Any]) -> str:
    """A checksum of all that a config says, but for the checksum itself."""
    said = {name: value for name, value in config.items() if name != "sha256"}
    # On one line: with indents, Python's JSON is several times slower, and this is most of opening.
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()
