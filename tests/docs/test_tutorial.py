"""The tutorial runs, offline, and prints what it shows."""

from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.notebooks import VARIES, executed, printed
from tests.pages import ROOT

TUTORIAL = ROOT / "docs" / "tutorial.ipynb"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return executed(TUTORIAL, tmp_path_factory.mktemp("tutorial"))


def test_the_tutorial_prints_what_it_shows(run: Any) -> None:
    shown = printed(nbformat.read(TUTORIAL, as_version=4))  # type: ignore[no-untyped-call]

    for (tags, now), (_, then) in zip(printed(run), shown, strict=True):
        assert now
        if VARIES in tags:  # the same tables with other numbers
            assert then
        else:
            assert now == then


def test_half_of_it_at_least_does_not_vary(run: Any) -> None:
    varying = [VARIES in tags for tags, _ in printed(run)]

    assert 0 < sum(varying) <= len(varying) / 2


def test_a_cell_that_raises_is_seen(tmp_path: Path) -> None:
    broken: Any = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])  # type: ignore[no-untyped-call]
    nbformat.write(broken, tmp_path / "broken.ipynb")  # type: ignore[no-untyped-call]

    with pytest.raises(Exception, match="ZeroDivisionError"):
        executed(tmp_path / "broken.ipynb", tmp_path)
