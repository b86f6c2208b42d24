"""Every relative link of a page leads somewhere."""

import re
from pathlib import Path

import pytest

from tests.pages import ROOT

PAGES = sorted(
    {
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "experiments").glob("**/README.md"),
        ROOT / "mappings" / "README.md",
    }
)
LINK = re.compile(r"\]\(([^()\s]+)\)|<img [^>]*src=\"([^\"]+)\"")
FENCED = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Headings, in the form that links name them by."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.strip().lower()).replace(" ", "-") for head in heads}


def dead(page: Path) -> list[str]:
    """Its links that lead nowhere."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    found = []
    for link in (first or second for first, second in LINK.findall(text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        to = (page.parent / path) if path else page
        if not to.exists() or (anchor and anchor not in anchors(to)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_relative_links_lead_somewhere(page: Path) -> None:
    assert dead(page) == []


def test_a_dead_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading: here\n[a](page.md) [b](#a-heading-here) [c](none.md) [d](#none)\n"
        '[e](https://example.org) `[f](g.md)` <img alt="" src="h.svg">\n'
    )

    assert dead(page) == ["none.md", "#none", "h.svg"]
