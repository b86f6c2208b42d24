"""A persona's file says all that is needed, or is refused by name."""

import json
from pathlib import Path

import pytest

from kvtransfer.errors import PersonaError
from kvtransfer.measures.markers import count_markers
from kvtransfer.steering.axis import FOLDS
from kvtransfer.steering.persona import Persona, builtin_personas, read_persona

GOOD = {"name": "clerk", "prompt": "You are a clerk.", "markers": ["Form"], "texts": ["Sign here."]}


def written(folder: Path, found: object, name: str = "persona.json") -> Path:
    path = folder / name
    path.write_text(found if isinstance(found, str) else json.dumps(found), encoding="utf-8")
    return path


def test_toml_and_json_say_the_same(tmp_path: Path) -> None:
    toml = "\n".join(f"{key} = {json.dumps(value)}" for key, value in GOOD.items())

    read = [
        read_persona(written(tmp_path, GOOD)),
        read_persona(written(tmp_path, toml, "persona.toml")),
    ]

    assert read[0] == read[1]
    assert read[0] == Persona(
        name="clerk", prompt="You are a clerk.", markers=("form",), texts=("Sign here.",)
    )


def test_a_file_without_a_name_is_called_by_its_own(tmp_path: Path) -> None:
    nameless = {key: value for key, value in GOOD.items() if key != "name"}

    assert read_persona(written(tmp_path, nameless, "sailor.json")).name == "sailor"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({**GOOD, "markers": []}, "has no markers"),
        ({key: GOOD[key] for key in ("name", "prompt", "texts")}, "has no markers"),
        ({**GOOD, "markers": ["form", "  "]}, "markers is not a list of texts"),
        ({**GOOD, "markers": "form"}, "markers is not a list of texts"),
        ({**GOOD, "markers": ["!!"]}, "holds no word"),
        ({key: GOOD[key] for key in ("name", "markers", "texts")}, "has no prompt"),
        ({**GOOD, "prompt": " "}, "empty prompt"),
        ({**GOOD, "prompt": 3}, "prompt is no text"),
        ({**GOOD, "name": 3}, "name is no text"),
        ({**GOOD, "texts": [1]}, "texts is not a list of texts"),
        ({**GOOD, "text": ["Sign here."]}, "unknown entry 'text'"),
        ([GOOD], "holds a list"),
        ("{", "is not JSON"),
        ('{"markers": ' + "1" * 5000 + "}", "is not JSON"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, found: object, words: str) -> None:
    with pytest.raises(PersonaError, match=words) as error:
        read_persona(written(tmp_path, found))

    assert error.value.hint


@pytest.mark.parametrize("name", ["nobody", "no/such/file.toml"])
def test_a_missing_persona_lists_those_that_come_with_the_package(name: str) -> None:
    with pytest.raises(PersonaError, match="no persona") as error:
        read_persona(name)

    assert "pirate" in str(error.value.hint)


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "folder.toml").mkdir()

    for name in ("bytes.toml", "folder.toml"):
        with pytest.raises(PersonaError, match="cannot be read"):
            read_persona(tmp_path / name)
    with pytest.raises(PersonaError, match="is not TOML"):
        read_persona(written(tmp_path, "a = ", "broken.toml"))


def test_too_few_texts_are_counted() -> None:
    persona = Persona(name="clerk", prompt="You are a clerk.", markers=("form",), texts=("One.",))

    with pytest.raises(PersonaError, match=f"has 1 example texts, .* needs {FOLDS}"):
        persona.require_texts(FOLDS)
    persona.require_texts(1)


def test_builtin_personas_know_themselves_by_their_texts() -> None:
    """Each one's markers are frequent in its own texts, and all but absent from the others'."""
    personas = [read_persona(name) for name in builtin_personas()]

    assert len(personas) >= 2
    for persona in personas:
        persona.require_texts(2 * FOLDS)
        for other in personas:
            counts = [count_markers(text, persona.markers) for text in other.texts]
            found = sum(count.deduplicated for count in counts)
            density = 100 * found / sum(count.words for count in counts)
            assert density > 8 if other is persona else density < 4, (persona.name, other.name)
