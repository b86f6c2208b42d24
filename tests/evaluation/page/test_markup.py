"""Nothing that is text can become markup."""

import math
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.evaluation.page.markup import Safe, el, estimate, join, said, shown
from kvtransfer.report import Estimate


class Seen(HTMLParser):
    """What a parser makes of a page."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@given(st.text(st.characters(exclude_categories=("Cc", "Cs"), exclude_characters="\ufffe\uffff")))
def test_text_comes_back_as_the_same_text(text: str) -> None:
    seen = Seen(el("p", {"title": text}, text))

    assert seen.text == text
    assert seen.tags == [("p", {"title": text})]


def test_markup_stays_markup_and_what_is_added_to_it_does_not() -> None:
    bold = el("b", None, "x")

    assert el("p", None, bold) == "<p><b>x</b></p>"
    # Adding to markup gives a plain string again: nothing is trusted by accident.
    assert not isinstance(bold + "<i>", Safe)
    assert el("p", None, bold + "<i>") == "<p>&lt;b&gt;x&lt;/b&gt;&lt;i&gt;</p>"
    assert join([bold, "<"], between="&") == "<b>x</b>&amp;&lt;"


@pytest.mark.parametrize("bad", ["\x00", "\x1b", "\ud800", "\x85"])
def test_what_no_page_may_hold_is_shown_as_unknown(bad: str) -> None:
    assert said(f"a{bad}b") == "<bdi>a\ufffdb</bdi>"


def test_numbers_are_written_for_people_and_kept_for_machines() -> None:
    seen = Seen(estimate(Estimate(-0.4249, -1.58, 0.1, 8), ".0%"))

    assert seen.text == "−42\u202f% −158 to 10\u202f%"
    assert [attrs["value"] for tag, attrs in seen.tags if tag == "data"] == [
        "-0.4249",
        "-1.58",
        "0.1",
    ]
    assert shown(-0.0001, ".2f") == "0.00"
    assert shown(-0.01, ".2f") == "−0.01"
    assert shown(math.nan, ".2f") == "–"
    assert estimate(None, ".2f") == "–"


def test_an_interval_stands_only_where_something_could_have_come_out_otherwise() -> None:
    assert " to " in estimate(Estimate(1.0, 0.9, 1.1, 8), ".1f")
    assert " to " not in estimate(Estimate(1.0, 1.0, 1.0, 8), ".1f")
    assert " to " not in estimate(Estimate(1.0, None, None, 1), ".1f")
