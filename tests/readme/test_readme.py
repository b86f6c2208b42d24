"""The README's code runs, and prints what the README says it prints."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT, Block, commands, run, snippets

README = ROOT / "README.md"
SNIPPETS = snippets(README)
COMMANDS = [line for line in commands(README) if " demo" not in line]


def test_the_readme_has_code() -> None:
    assert SNIPPETS
    assert COMMANDS


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_a_snippet_prints_what_the_readme_shows(snippet: Block, tmp_path: Path) -> None:
    printed = run(snippet, README, tmp_path, {})

    if snippet.printed is not None:
        assert printed == snippet.printed


def test_the_commands_run_in_the_order_shown(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("The tide comes in twice a day. " * 200)
    guide = {"name": "harbour", "guide": "The tide comes in twice a day, and the harbour empties."}
    (tmp_path / "guides.jsonl").write_text(json.dumps(guide) + "\n")
    for command in COMMANDS:
        program = [sys.executable, "-m", "kvtransfer.cli.main", *shlex.split(command)[1:]]
        done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
        # Exit 1 without an error line is a report that is not true, such as a map that a short
        # run could not make good enough.
        assert done.returncode in (0, 1), done.stderr
        assert "error:" not in done.stderr
        assert "Traceback" not in done.stderr
