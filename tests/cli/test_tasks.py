"""``kvtransfer eval --tasks``: one table, one document, and named errors."""

from pathlib import Path

import pytest

from .conftest import Run
from .test_commands import document

ASKED = ("--tasks", "kvtransfer_guides,kvtransfer_prose", "--limit", "2")


def test_tasks_alone_are_measured_where_they_alone_are_named(
    run: Run, places: dict[str, Path], tmp_path: Path
) -> None:
    pair = ("eval", places["source"], places["target"], "--mapping", places["mapping"])

    found = document(run(*pair, *ASKED, "--json", "--out", tmp_path / "out"))

    assert "text" not in found and "guides" not in found
    part = found["tasks"]
    assert set(part["tasks"]) == {"kvtransfer_guides", "kvtransfer_prose"}
    assert set(part["overall"]["conditions"]) == {"none", "own", "mapped", "source"}
    assert "heads" in part["missing"]["raw"]
    estimate = part["overall"]["conditions"]["mapped"]["accuracy"]
    assert set(estimate) == {"value", "low", "high", "n"}
    assert estimate["n"] == 4
    table = (tmp_path / "out" / "report.txt").read_text(encoding="utf-8")
    assert "mean of 2 tasks" in table
    assert "raw was left out" in table


def test_what_is_named_is_measured_beside_them(run: Run, places: dict[str, Path]) -> None:
    done = run(
        *("eval", places["source"], places["target"], "--mapping", places["mapping"]),
        *("--tasks", "kvtransfer_guides", "--limit", "1", "--text", places["heldout"]),
        *("--prefix", "24", "--continuation", "8", "--items", "2"),
        *("--conditions", "mapped,mapped+Scale(0.5)", "--json"),
    )

    found = document(done)
    assert set(found["tasks"]["overall"]["conditions"]) == {"none", "own", "mapped"}
    assert "mapped+Scale(0.5)" in found["text"]["conditions"]
    assert "guides" not in found


def test_edits_are_the_protocols_where_tasks_stand_beside_one(
    run: Run, places: dict[str, Path]
) -> None:
    done = run(
        *("eval", places["source"], places["target"], "--mapping", places["mapping"]),
        *("--tasks", "kvtransfer_guides", "--limit", "1", "--text", places["heldout"]),
        *("--protocol", "lengths", "--lengths", "24", "--continuation", "8", "--items", "2"),
        *("--conditions", "mapped,mapped+Scale(0.5)", "--json"),
    )

    found = document(done)
    assert set(found["tasks"]["overall"]["conditions"]) == {"none", "own", "mapped"}
    assert "mapped+Scale(0.5)" in found["lengths"]["points"][0]["conditions"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ("--tasks kvtransfer_guides --include-path {root}/nowhere", 1, "no folder of tasks at"),
        ("--tasks kvtransfer_guides --limit 0", 2, "limit is 0"),
        ("--tasks kvtransfer_guides --conditions apart", 2, "no condition apart"),
        ("--tasks kvtransfer_guides --conditions own,mapped", 2, "there is no --mapping"),
        ("--tasks , --limit 1", 1, "tasks are"),
        ("--limit 1", 2, "are about --tasks"),
        ("--batch-size 4", 2, "are about --tasks"),
        ("--tasks kvtransfer_guides --mapping {root}/nowhere", 1, "no mapping at"),
    ],
)
def test_a_mistake_is_two_lines_and_a_status(
    run: Run, places: dict[str, Path], arguments: str, code: int, said: str
) -> None:
    done = run(
        *("eval", places["source"], places["target"]),
        *arguments.format(root=places["root"]).split(),
    )

    assert done.code == code
    assert done.stdout == ""
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ") and said in error
    assert hint.startswith("hint: ")


def test_a_mapping_for_another_pair_is_refused(run: Run, places: dict[str, Path]) -> None:
    done = run(
        *("eval", places["source"], places["other"], "--mapping", places["mapping"]),
        *("--tasks", "kvtransfer_guides", "--limit", "1"),
    )

    assert done.code == 1
    assert done.stderr.startswith("error: ")
