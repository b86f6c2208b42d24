"""Bars are as long as their numbers, and what runs off a scale is said to."""

import re

import pytest

from kvtransfer.evaluation.page.bars import Axis, Bar, bars, track
from kvtransfer.evaluation.page.scale import digits, scale
from kvtransfer.report import Estimate

from .test_markup import Seen

AXIS = Axis(low=-0.5, high=1.5, zero=0, ticks=(0, 1), floor=0, ceiling=1)


def bar(value: float, low: float | None = None, high: float | None = None) -> Bar:
    return Bar(name="mapped", plain="", role="mapped", value=Estimate(value, low, high, 8))


def parts(drawn: str, style: str) -> list[dict[str, float]]:
    found = [attrs for _, attrs in Seen(drawn).tags if attrs.get("class") == style]
    return [
        {key: float(v.rstrip("%")) for key, v in each.items() if v and re.match(r"[\d.-]+%?$", v)}
        for each in found
    ]


@pytest.mark.parametrize("value", [0.1, 0.5, 0.9, 1.2, -0.4])
def test_a_bar_reaches_from_zero_to_its_value(value: float) -> None:
    (fill,) = parts(track(bar(value), AXIS), "fill")
    (unit,) = parts(track(bar(1.0), AXIS), "fill")

    assert fill["width"] == pytest.approx(abs(value) * unit["width"], abs=0.02)
    start = fill["x"] if value > 0 else fill["x"] + fill["width"]
    assert start == pytest.approx(AXIS.at(0), abs=0.02)


def test_an_interval_lies_where_its_ends_do_and_holds_the_end_of_the_bar() -> None:
    drawn = track(bar(0.7, 0.6, 0.9), AXIS)
    along = [each for each in parts(drawn, "whisker") if each["x1"] != each["x2"]]
    (fill,) = parts(drawn, "fill")

    assert [(each["x1"], each["x2"]) for each in along] == [(55.0, 70.0)]
    assert (AXIS.at(0.6), AXIS.at(0.9)) == pytest.approx((55.0, 70.0))
    assert along[0]["x1"] < fill["x"] + fill["width"] < along[0]["x2"]


def test_floor_and_ceiling_are_marked_apart() -> None:
    drawn = track(bar(0.7), AXIS)

    assert [each["x1"] for each in parts(drawn, "floor-line")] == [AXIS.at(0)]
    assert [each["x1"] for each in parts(drawn, "ceiling-line")] == [AXIS.at(1)]


@pytest.mark.parametrize(("value", "off"), [(-9.0, True), (9.0, True), (0.7, False)])
def test_what_runs_off_the_scale_ends_in_an_arrow(value: float, off: bool) -> None:
    drawn = track(bar(value, value - 1, value + 1), AXIS)

    assert ('class="arrow"' in drawn) == off
    assert ('class="whisker"' in drawn) != off
    for fill in parts(drawn, "fill"):
        assert fill["x"] >= 0
        assert fill["x"] + fill["width"] <= 100


def test_without_a_zero_there_are_dots_as_a_length_would_mean_nothing() -> None:
    axis = Axis(low=2.5, high=3.5)

    drawn = track(bar(3.0, 2.9, 3.1), axis)

    assert 'class="fill"' not in drawn
    assert [each["cx"] for each in parts(drawn, "dot")] == [50.0]


def test_groups_without_members_have_no_heading() -> None:
    assert "Controls" not in bars([("", [bar(0.5)]), ("Controls", [])], AXIS, ".0%")
    assert "Controls" in bars([("", [bar(0.5)]), ("Controls", [bar(0.1)])], AXIS, ".0%")


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 0.0), (0.013, 0.014), (2.4, 3.6), (-17.0, 900.0), (5.0, 5.0)]
)
def test_a_scale_holds_everything_in_a_few_round_steps(low: float, high: float) -> None:
    first, last, step = scale([Estimate((low + high) / 2, low, high, 3)])

    assert first <= low + 1e-12
    assert high <= last + 1e-12
    assert 1 <= round((last - first) / step) <= 6
    assert float(f"{step:.1e}"[:3]) in (1.0, 2.0, 2.5, 5.0)


@pytest.mark.parametrize(
    ("step", "wanted"), [(0.2, ".1f"), (0.25, ".2f"), (0.05, ".2f"), (1.0, ".0f"), (50.0, ".0f")]
)
def test_levels_have_the_digits_that_tell_them_apart(step: float, wanted: str) -> None:
    assert digits(step, ".3f") == wanted
    assert digits(step, ".0%") == ".0%"
