"""A page is written whole or not at all, and a place that cannot be written is refused before."""

import os
from pathlib import Path

import pytest

from kvtransfer.errors import ArtifactError
from kvtransfer.evaluation.page.place import check_place
from kvtransfer.evaluation.page.write import write_page

from .conftest import report


def test_a_page_replaces_the_one_that_was_there_and_leaves_nothing_beside_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")

    write_page(report(), path)

    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("where", "said", "hint"),
    [
        ("missing/report.html", "there is no folder", "mkdir -p"),
        ("folder.html", "is a folder", "folder.html/report.html"),
        ("file/report.html", "cannot be written", "--report"),
        ("pipe.html", "is no file", "--report"),
        ("x" * 300 + ".html", "cannot be written", "--report"),
    ],
)
def test_a_place_that_cannot_be_written_is_named(
    tmp_path: Path, where: str, said: str, hint: str
) -> None:
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe.html")
    before = sorted(tmp_path.iterdir())

    with pytest.raises(ArtifactError, match=said) as caught:
        write_page(report(), tmp_path / where)

    assert hint in (caught.value.hint or "")
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_that_may_not_be_written_to_is_named() -> None:
    with pytest.raises(ArtifactError, match="cannot be written"):
        check_place(Path("/proc/report.html"))


def test_a_page_does_not_take_the_name_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ends in \.html, not in '\.json'"):
        check_place(tmp_path / "report.json")
    check_place(tmp_path / "report.HTM")
    assert not list(tmp_path.iterdir())
