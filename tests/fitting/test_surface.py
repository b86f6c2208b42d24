"""The same words, written otherwise."""

from pathlib import Path

import pytest

from kvtransfer.errors import TextError
from kvtransfer.fitting.surface import spaced
from kvtransfer.fitting.texts import builtin, read_all


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('Hello, world! (a "case")', 'Hello , world ! ( a " case " )'),
        ("well-known x_1=3.5;", "well - known x _ 1 = 3 . 5 ;"),
        ("already , spaced .", "already , spaced ."),
        ("two\nlines and\ta tab", "two\nlines and a tab"),
        ("broken,\nbeside a mark", "broken , beside a mark"),
        ("naïve — 日本。", "naïve — 日本 。"),
        ("", ""),
    ],
)
def test_every_mark_stands_on_its_own(text: str, expected: str) -> None:
    assert spaced(text) == expected
    assert spaced(expected) == expected


def test_words_are_kept_in_order() -> None:
    for text in builtin("heldout")[:50]:
        assert "".join(spaced(text).split()) == "".join(text.split())


def test_a_name_says_how_its_text_is_written(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("One, two.")

    assert list(read_all([f"spaced:{file}"])) == ["One , two ."]
    mixed = list(read_all([str(file), f"spaced:{file}"]))
    assert sorted(mixed) == ["One , two .", "One, two."]
    first = next(read_all(["spaced:builtin"]))
    assert first == spaced(builtin("fit")[0])


@pytest.mark.parametrize("name", ["spaced:", "spaced:missing.txt", "spaced:./none.jsonl"])
def test_a_text_that_is_not_there_is_not_there_spaced(name: str) -> None:
    with pytest.raises(TextError):
        read_all([name])
