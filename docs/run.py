"""Run the pages and the notebook of this folder, and write down what they print.

    python -m docs.run [PAGE ...]

From the root of a checkout. The tests hold the pages against what is written here.
"""

import sys
import tempfile
from pathlib import Path

import nbformat

from tests.notebooks import executed
from tests.pages import printed

HERE = Path(__file__).parent


def rewrite(page: Path) -> None:
    """Put what is printed now in the place of what was."""
    text = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        found = list(printed(page, Path(folder)))
    for block, out in reversed(found):
        rest = text[block.end :]
        if block.printed is not None:
            shown = f"```text\n{block.printed}```"
            rest = rest[rest.index(shown) + len(shown) :]
        elif not out:
            continue
        text = f"{text[: block.end]}\n\n```text\n{out}```{rest}"
    page.write_text(text, encoding="utf-8")


def execute(notebook: Path) -> None:
    """Run every cell, and keep what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        nbformat.write(executed(notebook, Path(folder)), notebook)


if __name__ == "__main__":
    asked = [Path(name) for name in sys.argv[1:]]
    for each in asked or [*sorted(HERE.glob("*.md")), *HERE.glob("*.ipynb")]:
        execute(each) if each.suffix == ".ipynb" else rewrite(each)
