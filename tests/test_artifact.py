"""Saving replaces an artifact of ours whole, or leaves everything as it was."""

import json
from pathlib import Path

import pytest
import torch

from kvtransfer import artifact
from kvtransfer.errors import ArtifactError


def save(folder: Path, number: float = 1.0) -> None:
    tensors = {"t": torch.full((3,), number)}
    artifact.save(
        folder, kind="thing", config={"number": number}, tensors=tensors, card="# A thing"
    )


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below, hidden ones too, with its content."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_an_artifact_is_three_files_that_a_person_can_open(tmp_path: Path) -> None:
    save(tmp_path / "deep" / "er" / "a", 2.5)

    assert sorted(tree(tmp_path)) == [
        "deep/er/a/README.md",
        "deep/er/a/config.json",
        "deep/er/a/tensors.safetensors",
    ]
    config, tensors = artifact.load(tmp_path / "deep" / "er" / "a", kind="thing")
    assert (config["format"], config["kind"], config["number"]) == (3, "thing", 2.5)
    assert torch.equal(tensors["t"], torch.full((3,), 2.5))


def test_saving_again_replaces_the_older_artifact(tmp_path: Path) -> None:
    save(tmp_path / "a", 1.0)

    save(tmp_path / "a", 2.0)

    assert artifact.load(tmp_path / "a", kind="thing")[0]["number"] == 2.0
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_empty_folder_may_be_saved_to(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()

    save(tmp_path / "a")

    assert artifact.load(tmp_path / "a", kind="thing")


@pytest.mark.parametrize(
    "files",
    [
        {"notes.txt": "mine"},
        {"config.json": json.dumps({"model_type": "llama"}), "model.safetensors": "weights"},
        {"config.json": "{"},
        {"config.json": "[]"},
    ],
    ids=["notes", "a model", "broken", "a list"],
)
def test_a_folder_that_is_no_artifact_is_not_overwritten(
    tmp_path: Path, files: dict[str, str]
) -> None:
    (tmp_path / "a").mkdir()
    for name, text in files.items():
        (tmp_path / "a" / name).write_text(text)
    before = tree(tmp_path)

    with pytest.raises(ArtifactError, match="holds something else") as caught:
        save(tmp_path / "a")

    assert caught.value.hint
    assert tree(tmp_path) == before


def test_a_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")

    with pytest.raises(ArtifactError, match="is a file"):
        save(tmp_path / "a")

    assert tree(tmp_path) == {"a": b"mine"}


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")

    with pytest.raises(ArtifactError, match="cannot be written") as caught:
        save(tmp_path / "file" / "a")

    assert caught.value.hint
    assert tree(tmp_path) == {"file": b"mine"}


@pytest.mark.parametrize("stops_at", ["save_file", "to_json"])
def test_an_interrupted_save_leaves_the_older_artifact_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stops_at: str
) -> None:
    save(tmp_path / "a", 1.0)
    before = tree(tmp_path)

    def interrupt(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(artifact, stops_at, interrupt)
    for name in ("a", "fresh"):
        with pytest.raises(KeyboardInterrupt):
            save(tmp_path / name, 2.0)

    assert tree(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_full_disk_is_an_error_and_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifact, "save_file", fail)
    with pytest.raises(ArtifactError, match="No space left on device"):
        save(tmp_path / "a")

    assert not list(tmp_path.iterdir())
