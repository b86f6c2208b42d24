"""Two names in, one verdict out, and no weights read."""

import json
from pathlib import Path

import pytest

from kvtransfer.errors import ModelNotFound
from kvtransfer.hf.check import check


def test_a_model_may_reuse_its_own_cache_as_it_is(folder: Path) -> None:
    assert check(str(folder), str(folder)).verdict == "reuse"
    assert check(str(folder), f"{folder}/").verdict == "reuse"


def test_a_copy_might_be_another_so_it_asks_for_a_map(folder: Path, pristine: Path) -> None:
    report = check(str(pristine), str(folder))

    assert report.verdict == "map"
    assert [f.topic for f in report.findings if f.verdict != "same"] == ["weights"]


def test_no_weights_are_read(folder: Path, pristine: Path) -> None:
    (folder / "model.safetensors").write_text("not weights")

    assert check(str(folder), str(pristine))


def test_another_tokenizer_is_mapped(folder: Path, pristine: Path) -> None:
    path = folder / "tokenizer.json"
    inside = json.loads(path.read_text(encoding="utf-8"))
    inside["model"]["merges"].pop()
    path.write_text(json.dumps(inside), encoding="utf-8")

    report = check(str(pristine), str(folder))

    assert report.verdict == "map"
    assert next(f.verdict for f in report.findings if f.topic == "tokenizer") == "mapped"


def test_a_model_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no model at '\./missing'"):
        check(str(folder), "./missing")
