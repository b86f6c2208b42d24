"""``kvtransfer battery``: a document, a folder, and what is refused before any work is done."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtransfer.hf.model import LanguageModel
from kvtransfer.steering.configurations import CONFIGURATIONS

from .conftest import Run

QUICK = ("--samples", "2", "--tokens", "2", "--persistence", "4", "--topic", "Say it.")


@pytest.fixture(scope="module")
def folder(tiny: Callable[..., LanguageModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / "deep"
    model = tiny("llama", num_hidden_layers=8)
    model.module.save_pretrained(made)
    model.tokenizer.save_pretrained(made)
    return made


def test_a_model_that_knows_no_personas_exits_1_and_says_so(run: Run, folder: Path) -> None:
    out = folder.parent / "out"

    done = run("battery", folder, *QUICK, "--json", "--out", out)

    document = json.loads(done.stdout)
    assert done.code == 1
    assert done.stderr == ""
    assert document["configurations"].keys() == {each.name for each in CONFIGURATIONS}
    assert document["full_is_target"] is True
    assert document["apart"] is False
    assert sorted(path.name for path in out.iterdir()) == ["plot.png", "report.json", "report.txt"]
    assert json.loads((out / "report.json").read_text()) == document


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--source-persona", "nobody"), 1, "no persona 'nobody'"),
        (("--target-persona", "{markerless}"), 1, "has no markers"),
        (("--target-persona", "poet"), 1, "the same prompt"),
        (("--topic", " "), 1, "the topic is empty"),
        (("--samples", "0"), 2, "0 samples"),
        (("--persistence", "3"), 2, "no multiple of 2"),
        (("--temperature", "0"), 2, "temperature is 0"),
        (("--out", "{markerless}"), 2, "is a file"),
    ],
    ids=str,
)
def test_mistakes_end_in_an_error_and_a_hint(
    run: Run, folder: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, words: str
) -> None:
    markerless = tmp_path / "markerless.toml"
    markerless.write_text('name = "clerk"\nprompt = "Be a clerk."\n', encoding="utf-8")
    given = [each.replace("{markerless}", str(markerless)) for each in arguments]

    done = run("battery", folder, *QUICK, *given)

    assert done.code == code
    assert done.stdout == ""
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert words in error
    assert hint.startswith("hint: ")
