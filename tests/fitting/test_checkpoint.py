"""A capture that was interrupted goes on where it was, and comes to the same, bit for bit."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtransfer.errors import ArtifactError
from kvtransfer.fitting import checkpoint
from kvtransfer.fitting.capture import Capture, capture
from kvtransfer.fitting.workspace import Workspace
from kvtransfer.hf.model import LanguageModel

from .kills import tensors
from .test_columns import CHUNKS

ROOT = Path(__file__).parents[2]


class Stopped(Exception):
    """What ends a capture in the middle."""


def until(chunks: Iterable[Tensor], number: int) -> Iterator[Tensor]:
    for at, chunk in enumerate(chunks):
        if at == number:
            raise Stopped
        yield chunk


def taken(
    source: LanguageModel, target: LanguageModel, chunks: Iterable[Tensor], **asked: Any
) -> Capture:
    return capture(source, target, chunks, **{"tokens": 10_000, "batch": 2} | asked)


def assert_equal(found: Capture, expected: Capture) -> None:
    mine, whole = tensors(found), tensors(expected)
    assert mine.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(mine[name], tensor), name


def interrupted(
    source: LanguageModel,
    target: LanguageModel,
    folder: Path,
    at: int = 13,
    held: Iterable[Tensor] = CHUNKS,
    **asked: Any,
) -> Workspace:
    """A capture that ended within chunk ``at``, and the workspace to go on with."""
    workspace = replace(Workspace(checkpoint=folder, every=2), **asked.pop("work", {}))
    with pytest.raises(Stopped):
        taken(source, target, until(held, at), workspace=workspace, **asked)
    return workspace


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"attention": True, "features": "both", "before": (2, 0), "starts": (1,), "band": 1},
        {"products": torch.float32, "work": {"moments": "device"}},
        {"work": {"passes": 2}, "attention": True},
    ],
    ids=["plain", "everything", "on a device", "two passes"],
)
def test_what_was_interrupted_goes_on_and_comes_to_the_same(
    source: LanguageModel, target: LanguageModel, tmp_path: Path, asked: dict[str, Any]
) -> None:
    plain = {name: each for name, each in asked.items() if name != "work"}
    work = Workspace(**asked.get("work", {}))
    expected = taken(source, target, CHUNKS, workspace=work, **plain)

    workspace = interrupted(source, target, tmp_path / "c", **asked)
    (state,) = (tmp_path / "c").iterdir()  # only the last is kept
    found = taken(source, target, CHUNKS, workspace=workspace, **plain)

    assert state.name == "state-0-000000006"
    assert_equal(found, expected)
    assert found.seconds.keys() == expected.seconds.keys()
    checkpoint.remove(tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_the_second_pass_goes_on_too(
    source: LanguageModel, target: LanguageModel, tmp_path: Path
) -> None:
    expected = taken(source, target, CHUNKS)
    workspace = Workspace(checkpoint=tmp_path / "c", every=4, passes=2)
    told: list[int] = []

    def stop(tokens: int) -> None:
        told.append(tokens)
        if len(told) == 17:
            raise Stopped

    with pytest.raises(Stopped):
        taken(source, target, CHUNKS, workspace=workspace, progress=stop)
    (state,) = (tmp_path / "c").iterdir()

    assert state.name.startswith("state-1-")
    assert_equal(taken(source, target, CHUNKS, workspace=workspace), expected)


def test_it_goes_on_from_the_state_and_not_from_the_text_alone(
    source: LanguageModel, target: LanguageModel, tmp_path: Path
) -> None:
    """The twin: no batch before the place is read again, so without the state they are missing."""
    workspace = interrupted(source, target, tmp_path / "c")
    passed: list[int] = []
    read = taken(source, target, CHUNKS, workspace=workspace, progress=passed.append)
    missing = taken(source, target, CHUNKS[12:])

    assert sum(passed) == sum(map(len, CHUNKS))
    assert read.fit.rows > missing.fit.rows
    assert read.seconds["target_forward"] > 0
    assert not torch.equal(tensors(read)["fit.keys.gram"], tensors(missing)["fit.keys.gram"])


def test_another_text_setting_or_model_is_refused_with_both_values(
    source: LanguageModel, target: LanguageModel, tuned: LanguageModel, tmp_path: Path
) -> None:
    workspace = interrupted(source, target, tmp_path / "c")
    other = [CHUNKS[0].flip(0), *CHUNKS[1:]]

    refusals: list[tuple[Callable[[], Capture], str]] = [
        (lambda: taken(source, target, other, workspace=workspace), "is of another text"),
        (lambda: taken(source, target, CHUNKS[:5], workspace=workspace), "is of a longer text"),
        (
            lambda: taken(source, target, CHUNKS, workspace=workspace, seed=3),
            "of a fit with seed 0, and this one has 3",
        ),
        (
            lambda: taken(source, target, CHUNKS, workspace=workspace, band=1),
            "of a fit with band None, and this one has 1",
        ),
        (
            lambda: taken(tuned, target, CHUNKS, workspace=workspace),
            rf"source identity '{source.spec.identity}', and this one has '{tuned.spec.identity}'",
        ),
        (
            lambda: taken(source, target, CHUNKS, workspace=replace(workspace, passes=2)),
            "with passes 1, and this one has 2",
        ),
    ]
    for refused, reason in refusals:
        with pytest.raises(ArtifactError, match=reason) as caught:
            refused()
        assert "to begin anew" in str(caught.value.hint)
    taken(source, target, CHUNKS, workspace=workspace)  # none of which has harmed it


def test_a_damaged_state_and_a_folder_of_something_else_are_refused(
    source: LanguageModel, target: LanguageModel, tmp_path: Path
) -> None:
    workspace = interrupted(source, target, tmp_path / "c")
    (state,) = (tmp_path / "c").iterdir()
    held = (state / "tensors.safetensors").read_bytes()
    (state / "tensors.safetensors").write_bytes(held[:-1] + bytes([held[-1] ^ 1]))

    with pytest.raises(ArtifactError, match="has checksum"):
        taken(source, target, CHUNKS, workspace=workspace)

    (tmp_path / "c" / "notes.txt").touch()
    with pytest.raises(ArtifactError, match=r"holds notes\.txt, which is no checkpoint"):
        taken(source, target, CHUNKS, workspace=workspace)
    with pytest.raises(ArtifactError, match="is a file"):
        checkpoint.refuse_foreign(tmp_path / "c" / "notes.txt")


def test_what_a_death_left_half_written_or_half_removed_does_not_count(
    source: LanguageModel, target: LanguageModel, tmp_path: Path
) -> None:
    expected = taken(source, target, CHUNKS)
    workspace = interrupted(source, target, tmp_path / "c")
    half = tmp_path / "c" / ".state-0-000000008-xyz" / "fresh"
    half.mkdir(parents=True)
    (half / "config.json").write_text("{")
    older = tmp_path / "c" / "state-0-000000002"
    older.mkdir()  # whose files are gone already

    assert_equal(taken(source, target, CHUNKS, workspace=workspace), expected)
    checkpoint.remove(tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_it_may_be_killed_at_any_moment(
    source: LanguageModel,
    target: LanguageModel,
    tiny: Callable[..., LanguageModel],
    tmp_path: Path,
) -> None:
    for name, model in (("s", source), ("t", target)):
        model.module.save_pretrained(tmp_path / name)
        model.tokenizer.save_pretrained(tmp_path / name)

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.fitting.kills", tmp_path, "10", "1"],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["equal"]
    assert all(found["equal"])
    assert found["kills"] == 10
    places = {max(names) for names in found["left"] if names}
    assert len(places) >= 3  # it died at several
