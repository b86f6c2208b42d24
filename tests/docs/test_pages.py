"""Every page's code runs, in order, and prints what the page says it prints."""

import sys
from pathlib import Path

import pytest

from tests.pages import ROOT, printed, snippets

DOCS = ROOT / "docs"
PAGES = [page for page in sorted(DOCS.glob("*.md")) if snippets(page)]


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_a_page_prints_what_it_shows(page: Path, tmp_path: Path) -> None:
    for block, out in printed(page, tmp_path):
        assert out == (block.printed or "")


def test_a_page_that_shows_something_else_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```python\nprint(x)\n```\n\n```text\n2\n```\n")

    found = [(block.printed, out) for block, out in printed(page, tmp_path)]

    assert found == [(None, ""), ("2\n", "1\n")]


def test_files_and_changes_of_a_page_are_made_in_a_copy(tmp_path: Path) -> None:
    page = tmp_path / "adding-a-word.md"
    page.write_text(
        "```python\n# kvtransfer/word.py\nWORD = 'pack'\n```\n\n"
        "```diff\n--- a/kvtransfer/__init__.py\n+++ b/kvtransfer/__init__.py\n@@ -1 +1 @@\n"
        '-"""Move, reuse and change the KV caches of language models.\n'
        '+"""Changed.\n```\n\n'
        "```python\nimport kvtransfer.word\n\n"
        "print(kvtransfer.word.WORD, kvtransfer.__doc__[:8])\n```\n"
    )
    folder = tmp_path / "copy"
    folder.mkdir()

    assert [out for _, out in printed(page, folder)] == ["pack Changed.\n"]
    assert not (ROOT / "kvtransfer" / "word.py").exists()
    assert "Changed." not in (ROOT / "kvtransfer" / "__init__.py").read_text()
    assert "kvtransfer.word" not in sys.modules
