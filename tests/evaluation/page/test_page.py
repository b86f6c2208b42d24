"""The page says what JSON says, loads nothing, and lets no text become markup."""

import json
import re
from itertools import pairwise
from typing import Any

import pytest

from kvtransfer.evaluation.inside import Inside
from kvtransfer.evaluation.report import EvalReport

from .conftest import HOSTILE, SOURCE_DEPTH, TARGET_DEPTH, guides, inside, report, text
from .test_markup import Seen


def numbers_of(document: Any) -> set[float]:
    """Every estimate's numbers."""
    if isinstance(document, list):
        return set().union(*map(numbers_of, document))
    if not isinstance(document, dict):
        return set()
    if set(document) == {"value", "low", "high", "n"}:
        return {document[key] for key in ("value", "low", "high") if document[key] is not None}
    return set().union(*map(numbers_of, document.values()))


def test_every_estimate_of_the_json_is_on_the_page_and_no_other_number(usual: EvalReport) -> None:
    document = json.loads(usual.to_json())
    wanted = numbers_of(document["text"]) | numbers_of(document["guides"])

    seen = Seen(usual.to_html())

    shown = {float(attrs["value"] or "nan") for tag, attrs in seen.tags if tag == "data"}
    same = {e for e in wanted if e not in shown}
    # Intervals that are a point are not written.
    assert same <= {0.0, 1.0}
    assert shown <= wanted


def test_n_stands_by_every_figure_and_table(usual_page: str) -> None:
    text_of_page = Seen(usual_page).text

    assert text_of_page.count("n\u00a0=\u00a024") >= 5
    assert text_of_page.count("n\u00a0=\u00a060") >= 3
    assert "n\u00a0=\u00a04 windows" in text_of_page
    assert "2,048 tokens, judged on 768" in text_of_page


def test_no_text_becomes_markup(hostile_page: str) -> None:
    seen = Seen(hostile_page)

    assert HOSTILE in seen.text
    assert not {"script", "img", "iframe", "object", "embed"} & {tag for tag, _ in seen.tags}
    assert not [key for _, attrs in seen.tags for key in attrs if key.startswith("on")]
    assert HOSTILE not in hostile_page


def test_nothing_is_loaded_from_anywhere(hostile_page: str) -> None:
    seen = Seen(hostile_page)

    for tag, attrs in seen.tags:
        for key in ("href", "src", "xlink:href", "action", "srcset", "poster"):
            assert attrs.get(key) in (None, "data:,"), (tag, attrs)
    (policy,) = [a["content"] for _, a in seen.tags if a.get("http-equiv")]
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_headings_and_tables_are_named_for_those_who_hear_the_page(usual_page: str) -> None:
    seen = Seen(usual_page)
    levels = [int(tag[1]) for tag, _ in seen.tags if re.fullmatch("h[1-6]", tag)]

    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))
    assert all(attrs.get("scope") in ("row", "col") for tag, attrs in seen.tags if tag == "th")
    for tag, attrs in seen.tags:
        if tag == "table" or attrs.get("role") in ("region", "img"):
            assert attrs.get("aria-label")
    pictures = [attrs for tag, attrs in seen.tags if tag == "svg" and "width" in attrs]
    assert all(attrs.get("aria-hidden") or attrs.get("aria-label") for attrs in pictures)
    assert "lang" in dict(seen.tags)["html"]
    assert "<title>smollm2-24l → smollm2-135m" in usual_page


def test_the_layer_map_has_every_number_and_marks_what_is_read(usual_page: str) -> None:
    seen = Seen(usual_page)
    layers = inside().layers
    assert layers is not None

    cells = [a for tag, a in seen.tags if tag == "td" and (a.get("class") or "").startswith("s")]
    chosen = [a for a in cells if "chosen" in (a["class"] or "")]

    assert len(cells) == SOURCE_DEPTH * TARGET_DEPTH
    assert len(chosen) == sum(map(len, layers.chosen))
    assert "target layer 0 from source layer 0: R² 0.990, read by the mapping" in [
        a["title"] for a in cells
    ]
    assert float(layers.scores.min()) < 0
    assert "<0" in seen.text


def test_the_command_can_be_taken_as_it_is(usual_page: str) -> None:
    seen = Seen(usual_page)

    assert "kvtransfer eval a b --report 'out of the way.html'" in seen.text


@pytest.mark.parametrize(
    "made",
    [
        report(text=None),
        report(guides=None),
        report(text=None, guides=None),
        report(text=text(1), guides=guides({"none": 0.0, "own": 0.0}, 1)),
        report(text=text(nll={"none": 3.0, "own": 2.0})),
    ],
    ids=["guides", "text", "nothing", "one item", "no mapping"],
)
def test_what_was_not_measured_leaves_no_hole(made: EvalReport) -> None:
    seen = Seen(made.to_html(inside=Inside(missing={"diagnosis": "there is no text"})))

    assert "Attention by layer is left out: there is no text." in seen.text
    assert "nan" not in re.findall(r"\w+", seen.text)
    assert ("On text" in seen.text) == (made.text is not None)


def test_a_part_is_drawn_or_set_as_its_table(hostile_page: str) -> None:
    seen = Seen(hostile_page)

    assert "Drift by turn" in seen.text
    assert "Tasks" in seen.text
    assert "a table with" in seen.text


def test_a_share_that_is_read_again_becomes_a_curve() -> None:
    found = text(nll=dict.fromkeys(("none", "own"), 3.0) | {"mapped": 2.9, "mapped+50%": 2.8})

    page = report(text=found, guides=None, shares=(0.0, 0.5)).to_html()

    assert "Tokens read again" in page
    assert "mapped, repaired, 50: " in page
