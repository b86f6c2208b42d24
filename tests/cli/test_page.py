"""eval --report writes a page, and changes nothing of what eval says."""

import json
from pathlib import Path

from .conftest import Run

QUICK = ("--prefix", "24", "--continuation", "8", "--items", "3")


def test_a_page_is_written_beside_the_same_numbers(
    run: Run, places: dict[str, Path], tmp_path: Path
) -> None:
    command = ("eval", places["source"], places["target"], "--mapping", places["mapping"])
    given = (*command, "--text", places["heldout"], "--guides", places["guides"], *QUICK, "--json")
    page = tmp_path / "report.html"

    plain = run(*given)
    done = run(*given, "--report", page)

    assert done.stderr == ""
    assert done.code == plain.code
    told, before = json.loads(done.stdout), json.loads(plain.stdout)
    assert told["text"] == before["text"]
    html = page.read_text(encoding="utf-8")
    assert f'value="{told["text"]["conditions"]["mapped"]["nll"]["value"]!r}"' in html
    assert "Which source layer knows of which target layer" in html
    assert "Does attention find the same things?" in html
    assert "--report" in html  # the command to repeat it


def test_standard_input_is_read_once_and_looked_at_twice(
    run: Run, places: dict[str, Path], tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    options = ("--text", "-", "--guides", "none", *QUICK, "--report", page)

    done = run(
        "eval", places["source"], places["target"], "--mapping", places["mapping"], *options,
        stdin=places["heldout"].read_bytes(),
    )  # fmt: skip

    assert done.stderr == ""
    assert "Does attention find the same things?" in page.read_text(encoding="utf-8")


def test_without_a_mapping_there_is_nothing_to_look_inside(
    run: Run, places: dict[str, Path], tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    options = ("--text", places["heldout"], "--guides", "none", *QUICK, "--report", page)

    run("eval", places["source"], places["target"], *options)

    html = page.read_text(encoding="utf-8")
    assert "not measured" in html
    assert "Does attention" not in html


def test_a_page_is_no_json(run: Run, places: dict[str, Path], tmp_path: Path) -> None:
    done = run("eval", places["source"], places["target"], "--report", tmp_path / "report.json")

    assert done.code == 2
    assert "a report ends in .html" in done.stderr
