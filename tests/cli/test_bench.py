"""kvtransfer bench, as a user runs it."""

import json
from pathlib import Path

import pytest

from .conftest import Run


def test_one_model_is_timed_without_a_mapping(run: Run, places: dict[str, Path]) -> None:
    done = run("bench", places["target"], "--tokens", "32,16", "--repeats", "1", "--json")

    assert done.code in (0, 1)
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert found["source"] is None
    assert {each["tokens"] for each in found["costs"]} == {16, 32}
    assert {each["name"] for each in found["costs"]} >= {"prefill", "restore", "decode on a graft"}


def test_two_models_are_timed_with_the_mapping_between_them(
    run: Run, places: dict[str, Path]
) -> None:
    done = run("bench", places["source"], places["target"], "--mapping", places["mapping"],
               "--tokens", "16,9_999", "--repeats", "2")  # fmt: skip

    assert done.code in (0, 1)
    assert "map + graft ÷ prefill" in done.stdout
    assert "Left out: 9,999 tokens" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["target", "--tokens", "16,many"], 2, "no list of numbers"),
        (["target", "--tokens", "0"], 2, "must be positive"),
        (["target", "--repeats", "0"], 2, "must be positive"),
        (["source", "target"], 2, "go together"),
        (["target", "--mapping", "mapping"], 2, "go together"),
        (["source", "target", "source", "--mapping", "mapping"], 2, "not 3"),
        (["target", "source", "--mapping", "mapping"], 1, "error:"),
        (["target", "--tokens", "9999"], 1, "reads at most"),
        (["no-such-model"], 1, "no-such-model"),
        ([], 2, "Missing argument"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else None,
)
def test_what_cannot_be_timed_is_said_in_two_lines(
    run: Run, places: dict[str, Path], arguments: list[str], code: int, says: str
) -> None:
    done = run("bench", *(places.get(each, each) for each in arguments))

    assert (done.code, done.stdout) == (code, "")
    assert says in done.stderr
    first, second = done.stderr.splitlines()
    assert first.startswith("error: ")
    assert second.startswith("hint: ")
