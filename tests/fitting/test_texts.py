"""Documents come out of every kind of file as they went in, and bad files are named."""

import hashlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from _pytest.mark import ParameterSet
from pyarrow import parquet

from kvtransfer.errors import TextError
from kvtransfer.fitting.texts import SHORTEST_DOCSTRING, builtin, documents, read_all

TEXTS = ["One document.\nOf two lines.", "Another — with ünïcode, 漢字 and \u2028 a separator."]


def write_parquet(path: Path, column: str, values: list[str | int]) -> None:
    parquet.write_table(pyarrow.table({column: values}), path)


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    for name in ("a.txt", "a.md", "a.rst", "noending"):
        (tmp_path / name).write_text(TEXTS[1], encoding="utf-8")

        assert list(documents(str(tmp_path / name))) == [TEXTS[1]]


@pytest.mark.parametrize("ascii_only", [True, False])
def test_each_line_of_a_jsonl_file_is_a_document(tmp_path: Path, ascii_only: bool) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": text, "id": 1}, ensure_ascii=ascii_only) for text in TEXTS]
    path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")

    assert list(documents(str(path))) == TEXTS


def test_each_row_of_a_parquet_file_is_a_document(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", "text", [*TEXTS])

    assert list(documents(str(tmp_path / "a.parquet"))) == TEXTS


def test_names_are_read_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text(TEXTS[0], encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", io.StringIO(TEXTS[1]))

    assert list(read_all([str(tmp_path / "a.txt"), "-"])) == TEXTS


def test_builtin_prose_is_split_once_and_for_all() -> None:
    fit, heldout = builtin("fit"), builtin("heldout")

    assert not set(fit) & set(heldout)
    assert len(set(fit)) == len(fit)
    assert 0.08 < len(heldout) / (len(fit) + len(heldout)) < 0.12
    # The order is by digest: the same on every machine, and a fair sample from the start.
    for split in (fit, heldout):
        digests = [hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest() for text in split]
        assert digests == sorted(digests)
    assert next(documents("builtin")) == fit[0]
    assert all(len(text) >= SHORTEST_DOCSTRING for text in fit)


def bad(name: str, write: Callable[[Path], object], says: str) -> ParameterSet:
    return pytest.param(name, write, says, id=f"{name}: {says}")


BAD = [
    bad("a.txt", lambda path: None, "no text file at"),
    bad("a.jsonl", lambda path: None, "no text file at"),
    bad("a.txt", Path.mkdir, "no text file at"),
    bad("a.txt", lambda path: path.write_text(" \n"), "holds no text"),
    bad("a.jsonl", lambda path: path.write_text("\n"), "holds no text"),
    bad("a.jsonl", lambda path: path.write_text('{"text": ""}\n'), "holds no text"),
    bad("a.jsonl", lambda path: path.write_text('{"text": "x"}\n{"text"\n'), "line 2 is not JSON"),
    bad("a.jsonl", lambda path: path.write_text('{"text": "x"}\n{"t": 1}\n'), "line 2 has no"),
    bad("a.jsonl", lambda path: path.write_text('["x"]\n'), "line 1 has no 'text'"),
    bad("a.jsonl", lambda path: path.write_text('{"text": 7}\n'), "line 1 has no 'text'"),
    bad("a.jsonl", lambda path: path.write_text('{"text": "\\ud800"}'), "line 1 holds half a char"),
    bad("a.txt", lambda path: path.write_bytes(b"caf\xe9 au lait"), "is not UTF-8 text (byte 3)"),
    bad("a.jsonl", lambda path: path.write_bytes(b'{"text": "caf\xe9"}\n'), "is not UTF-8"),
    bad("a.parquet", lambda path: path.write_text("PAR1 not"), "cannot be read as parquet"),
    bad("a.parquet", lambda path: write_parquet(path, "t", ["x"]), "row 1 has no 'text' string"),
    bad("a.parquet", lambda path: write_parquet(path, "text", [1]), "row 1 has no 'text' string"),
    bad("a.parquet", lambda path: write_parquet(path, "text", []), "holds no text"),
]


@pytest.mark.parametrize(("name", "write", "says"), BAD)
def test_a_bad_file_is_an_error_that_names_the_place(
    tmp_path: Path, name: str, write: Callable[[Path], object], says: str
) -> None:
    path = tmp_path / name
    write(path)

    with pytest.raises(TextError) as caught:
        list(documents(str(path)))

    assert str(path) in caught.value.message
    assert says in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("name", ["nobody/nothing", "nobody/nothing:en", "nothing-at-all"])
def test_a_hub_data_set_that_cannot_be_had_is_named(name: str) -> None:
    with pytest.raises(TextError, match=f"{name} is no file here") as caught:
        list(documents(name))

    assert caught.value.hint
    assert "builtin" in caught.value.hint


def test_a_text_given_instead_of_a_name_is_no_hub_data_set() -> None:
    with pytest.raises(TextError):
        list(documents("This is the text itself, and not the name of a file. " * 40))


def test_a_missing_file_is_known_before_anything_is_read_from_others(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="no text file at"):
        read_all([str(tmp_path / "missing.txt"), "builtin"])


def test_nothing_to_read_is_an_error() -> None:
    with pytest.raises(TextError, match="there is no text"):
        read_all([])


@pytest.mark.parametrize(
    ("given", "says"), [(b" \n ", "holds no text"), (b"caf\xe9", "not UTF-8")], ids=["", "latin-1"]
)
def test_standard_input_needs_text(
    monkeypatch: pytest.MonkeyPatch, given: bytes, says: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))

    with pytest.raises(TextError, match=f"standard input.*{says}"):
        read_all(["-"])
