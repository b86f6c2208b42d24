"""Whatever happens to a save, whoever loads sees the pack as it was before it or after it."""

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from random import Random

import pytest
import torch

from kvtransfer.errors import ArtifactError
from kvtransfer.guides import durable, shelf

SIZE = 100_000


def save(folder: Path, number: int, guides: int = 3) -> None:
    """A pack in which everything says the same number."""

    def each(name: int) -> shelf.Volume:
        tensors = {"t": torch.full((SIZE,), number + name / 10)}
        told = {"number": str(number)}
        return shelf.Volume(name=str(name), tokens=1, told=told, tensors=tensors)

    head = {"model": {"number": number}, "provenance": {}}
    shelf.save(folder, head, map(each, range(guides)), lambda: f"# {number}")


def number_in(folder: Path) -> int:
    """The one number that everything says."""
    config = shelf.load(folder)
    found = {int(config["model"]["number"])}
    for entry in config["guides"]:
        held = shelf.tensors_of(folder, entry)["t"]
        told = shelf.told_of(folder, entry)["number"]
        found |= {int(told), int(held.min()), int(held.max())}
    (number,) = found
    return number


def keep_saving(folder: Path, number: int) -> None:
    while True:
        save(folder, number)
        number += 1
        time.sleep(0.01)  # in which another one gets its turn


@contextmanager
def saving(folder: Path, number: int) -> Iterator[Callable[[], bool]]:
    """Another process that saves, until it is killed; tells whether it still does."""
    process = get_context("fork").Process(target=keep_saving, args=(folder, number), daemon=True)
    process.start()
    try:
        yield process.is_alive
    finally:
        process.kill()
        process.join()
        process.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_save_that_is_killed_leaves_the_old_pack_or_the_new_one(tmp_path: Path) -> None:
    folder, random = tmp_path / "pack", Random(0)
    save(folder, 1)
    for _ in range(12):
        before = number_in(folder)
        with saving(folder, before + 1) as saves:
            while (now := number_in(folder)) == before:
                assert saves()
            time.sleep(random.uniform(0.0, 0.02))  # some way into one of the next saves
        assert number_in(folder) >= now

    save(folder, 0)
    assert number_in(folder) == 0
    left = [path for path in folder.rglob(".*") if path.name != durable.LOCK]
    assert left == []  # what the killed ones had begun is gone


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_two_processes_may_save_at_once(tmp_path: Path) -> None:
    folder, seen = tmp_path / "pack", set[int]()
    save(folder, 1)

    with saving(folder, 1_000_000) as one, saving(folder, 2_000_000) as other:
        while not {1, 2} <= seen:  # whole ones, of both
            seen.add(number_in(folder) // 1_000_000)
            assert one()
            assert other()

    assert number_in(folder) // 1_000_000 in (1, 2)


def test_what_a_killed_save_had_begun_is_in_nobodys_way(tmp_path: Path) -> None:
    """Such as the file that safetensors names itself, and writes before ours gets its name."""
    save(tmp_path, 1)
    begun = tmp_path / "guides" / f".{'0' * 32}"
    begun.mkdir()
    (begun / ".tmpuFaDki").write_bytes(b"half")

    save(tmp_path, 2)

    assert number_in(tmp_path) == 2
    assert not begun.exists()


def test_a_guide_of_the_pack_before_can_still_be_read(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (entry, *_) = shelf.load(tmp_path)["guides"]

    save(tmp_path, 2)

    assert shelf.tensors_of(tmp_path, entry)["t"][0] == 1
    save(tmp_path, 3)
    with pytest.raises(ArtifactError, match="is gone"):
        shelf.tensors_of(tmp_path, entry)


def test_a_full_disk_leaves_the_old_pack(tmp_path: Path) -> None:
    save(tmp_path / "pack", 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE, before[1]))  # a quarter of a guide's file
    try:
        with pytest.raises(ArtifactError, match="cannot be written"):
            save(tmp_path / "pack", 2)
        with pytest.raises(ArtifactError, match="cannot be written"):
            save(tmp_path / "fresh", 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert number_in(tmp_path / "pack") == 1
    assert len(list((tmp_path / "pack" / "guides").iterdir())) == 3
    with pytest.raises(ArtifactError, match="holds no guide pack"):
        shelf.load(tmp_path / "fresh")
    save(tmp_path / "fresh", 2)
    assert number_in(tmp_path / "fresh") == 2


def test_a_guide_that_cannot_be_made_leaves_the_old_pack_and_no_file(tmp_path: Path) -> None:
    save(tmp_path, 1)
    held = sorted((tmp_path / "guides").iterdir())

    def each(name: int) -> shelf.Volume:
        if name == 2:
            raise KeyboardInterrupt
        tensors = {"t": torch.full((SIZE,), 2.0)}
        return shelf.Volume(name=str(name), tokens=1, told={"number": "2"}, tensors=tensors)

    with pytest.raises(KeyboardInterrupt):
        shelf.save(tmp_path, {"model": {}, "provenance": {}}, map(each, range(3)), lambda: "# 2")

    assert number_in(tmp_path) == 1
    assert sorted((tmp_path / "guides").iterdir()) == held


def test_a_place_that_cannot_be_written_is_said() -> None:
    with pytest.raises(ArtifactError, match="cannot be written"):
        save(Path("/proc/pack"), 1)


def test_a_reader_without_the_right_to_write_reads(tmp_path: Path) -> None:
    save(tmp_path / "pack", 1)
    paths = [tmp_path / "pack", *(tmp_path / "pack").rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)

    try:
        assert number_in(tmp_path / "pack") == 1
    finally:
        for path in paths:
            path.chmod(0o755)


def test_files_may_be_read_by_whoever_may_read_others(tmp_path: Path) -> None:
    save(tmp_path / "pack", 1)

    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "pack").rglob("*.*")}

    (tmp_path / "plain").touch()
    assert modes - {0o755} == {(tmp_path / "plain").stat().st_mode & 0o777}


@pytest.mark.parametrize("held", ["notes.txt", "guides", "config.json", "pack"])
def test_a_folder_that_holds_something_else_is_left_alone(tmp_path: Path, held: str) -> None:
    folder = tmp_path / "held"
    folder.mkdir()
    if held == "pack":
        folder = tmp_path / "file"
        folder.touch()
    elif held == "guides":
        (folder / "guides").mkdir()
        (folder / "guides" / "mine.txt").write_text("mine")
    else:
        (folder / held).write_text("{}")

    with pytest.raises(ArtifactError):
        save(folder, 1)

    assert held != "guides" or (folder / "guides" / "mine.txt").read_text() == "mine"
