"""``kvtransfer probe``: its truth is its exit status, and its JSON says why."""

import json
from pathlib import Path

import pytest

from .conftest import Done, Run

MAPPING = "tiny-4l-to-tiny-6l"


def found(done: Done) -> dict[str, object]:
    """What stdout holds, if it holds one JSON document and stderr nothing."""
    assert done.stderr == ""
    document = json.loads(done.stdout)
    assert isinstance(document, dict)
    return document


def test_a_pair_that_transfers_is_exit_0(run: Run, places: dict[str, Path]) -> None:
    done = run(
        "probe", "tiny-4l", "tiny-6l", "--data", places["prose"], "--tokens", "512", "--json"
    )

    assert done.code == 0
    document = found(done)
    assert document["verdict"] == "transfers"
    assert document["tokens"] == 512
    assert isinstance(score := document["score"], dict)
    assert score["low"] > document["enough"]
    assert score["n"] == 8
    assert document["reference"] is None


def test_an_untrained_pair_does_not_and_is_exit_1(run: Run, places: dict[str, Path]) -> None:
    ends = (places["source"], places["target"])

    done = run("probe", *ends, "--data", places["heldout"], "--tokens", "256", "--json")
    shown = run("probe", *ends, "--data", places["heldout"], "--tokens", "256")

    assert (done.code, shown.code, shown.stderr) == (1, 1, "")
    document = found(done)
    assert document["verdict"] == "does not transfer"
    assert "uniform guess" in str(document["blocked"])
    assert str(document["sentence"]) in " ".join(shown.stdout.split())


def test_a_mapping_is_judged_on_the_text_that_is_piped_in(run: Run) -> None:
    text = "Die Müllerin zählte Säcke, während der Fluß über das Wehr stürzte. " * 20

    done = run(
        "probe", "tiny-4l", "tiny-6l", "--mapping", MAPPING, "--data", "-", "--tokens", "512",
        "--json", stdin=text.encode(),
    )  # fmt: skip

    document = found(done)
    assert document["judged"] == "mapping"
    assert document["tokens"] == 512
    assert isinstance(reference := document["reference"], dict)
    assert reference["low"] > 0.5
    assert done.code == (0 if document["verdict"] == "transfers" else 1)


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (("--data", "{short}"), 1, "a probe needs 128"),
        (("--mapping", "{mapping}"), 1, "the source's weights are"),
        (("--mapping", "{root}/nowhere"), 1, "no mapping at"),
        (("--tokens", "0"), 2, "128 to 4096 tokens"),
    ],
)
def test_what_is_wrong_is_said_in_two_lines(
    run: Run, places: dict[str, Path], options: tuple[str, str], code: int, says: str
) -> None:
    name, value = options

    done = run("probe", places["other"], places["target"], name, value.format(**places), "--json")

    assert (done.code, done.stdout) == (code, "")
    first, second = done.stderr.splitlines()
    assert first.startswith("error: ")
    assert says in first
    assert second.startswith("hint: ")
