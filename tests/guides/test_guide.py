"""Guide files say what is wrong with them and where; the shipped one is fit for use."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvtransfer.errors import TextError
from kvtransfer.evaluation.evaluate import BUILTIN_GUIDES
from kvtransfer.guides.guide import Choice, Expect, Guide, read_guides

CHOICE = {"prompt": "Which?", "choices": ["this", "that"], "answer": 1}
EXPECT = {"prompt": "Who?", "expect": "Marlow"}
LINE = {"guide": "The harbour master is Marlow.", "items": [CHOICE, EXPECT]}


def write(folder: Path, *lines: Any) -> Path:
    path = folder / "guides.jsonl"
    text = "\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines)
    path.write_text(text, encoding="utf-8")
    return path


def test_a_line_is_a_guide_with_its_questions(tmp_path: Path) -> None:
    guides = read_guides(write(tmp_path, LINE, "", LINE | {"name": "harbour"}))

    items = (Choice("Which?", ("this", "that"), 1), Expect("Who?", "Marlow"))
    assert guides == (
        Guide("guide-1", LINE["guide"], items),  # type: ignore[arg-type]
        Guide("harbour", LINE["guide"], items),  # type: ignore[arg-type]
    )


def test_a_byte_order_mark_is_no_letter(tmp_path: Path) -> None:
    path = write(tmp_path, LINE)
    plain = read_guides(path)

    path.write_text(path.read_text(encoding="utf-8"), encoding="utf-8-sig")

    assert read_guides(path) == plain


def test_letters_that_other_formats_take_for_line_breaks_are_letters(tmp_path: Path) -> None:
    text = "one\u2028two\x85three\x1cfour\u2029"
    path = tmp_path / "guides.jsonl"
    line = json.dumps(LINE | {"guide": text}, ensure_ascii=False)
    path.write_text(line + "\r\n", encoding="utf-8")

    assert read_guides(path)[0].text == text


def test_guessing_is_right_one_time_in_as_many_as_there_are_choices() -> None:
    assert Choice("?", ("a", "b", "c", "d"), 0).chance == 0.25
    assert Expect("?", "a").chance == 0.0


@pytest.mark.parametrize(
    ("written", "right"),
    [("It is MARLOW.", True), ("marlow", True), ("Mar low", False), ("", False)],
)
def test_a_free_answer_is_right_where_the_expected_one_occurs(written: str, right: bool) -> None:
    assert Expect("Who?", "Marlow").right(written) is right


def item(**changed: Any) -> dict[str, Any]:
    """A line whose second item is changed; a field of None is left out."""
    changed_item = {key: value for key, value in (CHOICE | changed).items() if value is not None}
    return LINE | {"items": [EXPECT, changed_item]}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"guide": "x"', "line 2 is not JSON"),
        ("nonsense", "line 2 is not JSON"),
        ("[1]", "line 2 holds a list"),
        ({"items": [CHOICE]}, "line 2 has no text in 'guide'"),
        ({"guide": " ", "items": [CHOICE]}, "line 2 has no text in 'guide'"),
        ({"guide": 7, "items": [CHOICE]}, "line 2 has no text in 'guide'"),
        ({"guide": "x"}, "line 2 has no list of 'items'"),
        ({"guide": "x", "items": []}, "line 2 has no list of 'items'"),
        ({"guide": "x", "items": {"0": CHOICE}}, "line 2 has no list of 'items'"),
        ({"guide": "x", "items": ["why?"]}, "line 2, item 1 holds a str"),
        (item(prompt=None), "line 2, item 2 has no text in 'prompt'"),
        (item(choices=None, answer=None), "line 2, item 2 needs either"),
        (item(expect="that"), "line 2, item 2 needs either"),
        (item(choices=["only"]), "line 2, item 2: 'choices' is not a list of two or more"),
        (item(choices="ab"), "line 2, item 2: 'choices' is not a list of two or more"),
        (item(choices=["a", 2]), "line 2, item 2: 'choices' is not a list of two or more"),
        (item(choices=["a", ""]), "line 2, item 2: 'choices' is not a list of two or more"),
        (item(answer=None), "line 2, item 2: 'answer' is None, not an index into 2 choices"),
        (item(answer=2), "line 2, item 2: 'answer' is 2, not an index into 2 choices"),
        (item(answer=-1), "line 2, item 2: 'answer' is -1, not an index into 2 choices"),
        (item(answer="1"), "line 2, item 2: 'answer' is '1', not an index into 2 choices"),
        (item(answer=True), "line 2, item 2: 'answer' is True, not an index into 2 choices"),
        (LINE | {"guide": "\ud800"}, "line 2: 'guide' holds half a character"),
        (LINE | {"items": [EXPECT | {"expect": ""}]}, "line 2, item 1 has no text in 'expect'"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path: Path, line: Any, says: str) -> None:
    path = write(tmp_path, LINE, line)

    with pytest.raises(TextError) as caught:
        read_guides(path)

    assert says in caught.value.message
    assert str(path) in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("text", ["", "\n\n  \n"])
def test_an_empty_file_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(TextError, match="holds no guides") as caught:
        read_guides(write(tmp_path, text))

    assert caught.value.hint


def test_a_missing_file_and_a_folder_are_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.jsonl", tmp_path):
        with pytest.raises(TextError) as caught:
            read_guides(path)
        assert str(path) in caught.value.message
        assert caught.value.hint


def test_a_file_in_another_encoding_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "guides.jsonl"
    path.write_bytes('{"guide": "café"}'.encode("latin-1"))

    with pytest.raises(TextError, match="UTF-8") as caught:
        read_guides(path)

    assert caught.value.hint


@pytest.fixture(scope="module")
def shipped() -> tuple[Guide, ...]:
    return read_guides(BUILTIN_GUIDES)


def test_enough_guides_and_questions_are_shipped(shipped: tuple[Guide, ...]) -> None:
    assert len(shipped) >= 12
    assert sum(len(guide.items) for guide in shipped) >= 100
    assert len({guide.name for guide in shipped}) == len(shipped)
    assert len({guide.text for guide in shipped}) == len(shipped)


def test_a_shipped_guide_says_the_right_answer_to_each_of_its_questions(
    shipped: tuple[Guide, ...],
) -> None:
    for guide in shipped:
        text = guide.text.casefold()
        for each in guide.items:
            right = each.expect if isinstance(each, Expect) else each.choices[each.answer]
            assert right.strip(" .").casefold() in text, (guide.name, each)


def test_no_position_among_the_choices_gives_the_right_one_away(
    shipped: tuple[Guide, ...],
) -> None:
    choices = [each for guide in shipped for each in guide.items if isinstance(each, Choice)]
    places = Counter(each.answer for each in choices)

    assert all(len(set(each.choices)) == len(each.choices) for each in choices)
    assert max(places.values()) < 1.5 * len(choices) / len(choices[0].choices)
