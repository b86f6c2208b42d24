"""The README's code runs, and prints what the README says it prints."""

import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent.parent / "README.md"
BLOCK = re.compile(r"^```(python|console|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

blocks = [(kind, body) for kind, body in BLOCK.findall(README.read_text(encoding="utf-8"))]
snippets = [
    (body, blocks[i + 1][1] if i + 1 < len(blocks) and blocks[i + 1][0] == "text" else None)
    for i, (kind, body) in enumerate(blocks)
    if kind == "python"
]
commands = [
    line.removeprefix("$ ")
    for kind, body in blocks
    if kind == "console"
    for line in body.replace("\\\n", " ").splitlines()
    if line.startswith("$ kvtransfer ") and " demo" not in line
]


def test_the_readme_has_code() -> None:
    assert snippets
    assert commands


@pytest.mark.parametrize(("code", "printed"), snippets, ids=range(len(snippets)))
def test_a_snippet_prints_what_the_readme_shows(
    code: str, printed: str | None, tmp_path: Path
) -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.chdir(tmp_path):
        exec(compile(code, str(README), "exec"), {})

    if printed is not None:
        assert out.getvalue() == printed


def test_the_commands_run_in_the_order_shown(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("The tide comes in twice a day. " * 200)
    guide = {"name": "harbour", "guide": "The tide comes in twice a day, and the harbour empties."}
    (tmp_path / "guides.jsonl").write_text(json.dumps(guide) + "\n")
    for command in commands:
        program = [sys.executable, "-m", "kvtransfer.cli.main", *shlex.split(command)[1:]]
        done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=False)
        # Exit 1 without an error line is a report that is not true, such as a map that a short
        # run could not make good enough.
        assert done.returncode in (0, 1), done.stderr
        assert "error:" not in done.stderr
        assert "Traceback" not in done.stderr
