"""A curve: several lines over one axis, told apart by their marks and dashes.

Drawn in shares of the width, with its labels as text beside it, so that nothing shrinks.
"""

from collections.abc import Sequence
from itertools import pairwise

from kvtransfer.evaluation.figure import Curve, Series
from kvtransfer.evaluation.page.markup import Safe, el, shown
from kvtransfer.evaluation.page.scale import digits, scale
from kvtransfer.evaluation.page.tables import numbers

HEIGHT = 190
"""Of the drawing, in pixels."""

MARGIN = 3.0
"""Percent of the width, and of the height, that stay free at the ends."""

STYLES = ("disc", "square", "triangle", "ring", "diamond", "cross")
"""Marks, each with a dash of its own."""

NUMBERED = 16
"""Places on the x axis up to which each gets its number."""


def curve(of: Curve, *, table: bool = True) -> Safe:
    """The drawing and its legend, and its numbers in a table that opens, unless they stand
    elsewhere."""
    series = [each for each in of.series if each.points]
    if not series:
        return el("p", {"class": "note"}, "There is nothing to draw.")
    places = sorted({x for each in series for x, _ in each.points})
    low, high, step = scale([e for each in series for _, e in each.points])
    styles = [STYLES[i % len(STYLES)] for i in range(len(series))]
    levels = [low + i * step for i in range(round((high - low) / step) + 1)]
    drawn: list[Safe] = [_line("grid", 0, 100, *[_down(level, low, high)] * 2) for level in levels]
    for each, style in zip(series, styles, strict=True):
        drawn += _drawn(each, style, places, low, high, of.form)
    named = ", ".join(each.name for each in series)
    labels = [
        el(
            "span",
            {"style": f"top:{_down(level, low, high):.2f}%"},
            shown(level, digits(step, of.form)),
        )
        for level in levels
    ]
    ticks = [
        el("span", {"style": f"left:{_across(x, places):.2f}%"}, f"{x:g}") for x in _ticks(places)
    ]
    return el(
        "div",
        {"class": "curve"},
        el(
            "p",
            {"class": "legend"},
            *(_key(s, style) for s, style in zip(series, styles, strict=True)),
        ),
        el("p", {"class": "ylabel"}, of.y),
        el(
            "div",
            {"class": "plot"},
            el("div", {"class": "levels", "aria-hidden": "true"}, *labels),
            el(
                "svg",
                {
                    "role": "img",
                    "aria-label": f"{of.title}: {of.y} by {of.x}, of {named}",
                    "width": "100%",
                    "height": HEIGHT,
                },
                *drawn,
            ),
            el("div", {"class": "ticks", "aria-hidden": "true"}, *ticks),
        ),
        el("p", {"class": "xlabel"}, of.x),
        _table(of, series, places) if table else None,
    )


def _across(x: float, places: Sequence[float]) -> float:
    if len(places) == 1:
        return 50.0
    share = (x - places[0]) / (places[-1] - places[0])
    return MARGIN + share * (100 - 2 * MARGIN)


def _down(y: float, low: float, high: float) -> float:
    return MARGIN + (high - y) / (high - low) * (100 - 2 * MARGIN)


def _ticks(places: Sequence[float]) -> list[float]:
    """Some of the places, so that their numbers do not meet on a phone."""
    every = -(-len(places) // 8) if len(places) > NUMBERED else 1 if len(places) <= 8 else 2
    every = next((n for n in (1, 2, 5, 10, 20, 50, 100) if n >= every), every)
    return list(places[::every])


def _drawn(
    series: Series, style: str, places: Sequence[float], low: float, high: float, form: str
) -> list[Safe]:
    line = f"line {style}"
    at = [(_across(x, places), _down(e.value, low, high), x, e) for x, e in series.points]
    drawn = [_line(line, x1, x2, y1, y2) for (x1, y1, *_), (x2, y2, *_) in pairwise(at)]
    for x, y, place, e in at:
        if e.low is not None and e.high is not None:
            drawn.append(_line("error", x, x, _down(e.low, low, high), _down(e.high, low, high)))
        words = f"{series.name}, {place:g}: {format(e, form)}"
        drawn.append(_mark(style, x, y, words))
    return drawn


def _mark(style: str, x: float, y: float, words: str | None = None) -> Safe:
    """A shape at a place given in percent; a nested picture brings the shape's pixels there."""
    shapes = {
        "disc": el(
            "circle",
            {"r": 3.5},
        ),
        "ring": el("circle", {"r": 3.5}),
        "square": el("rect", {"x": -3, "y": -3, "width": 6, "height": 6}),
        "triangle": el("path", {"d": "M0 -4L4 3.2L-4 3.2Z"}),
        "diamond": el("path", {"d": "M0 -4.4L4.4 0L0 4.4L-4.4 0Z"}),
        "cross": el("path", {"d": "M-3 -3L3 3M3 -3L-3 3"}),
    }
    title = None if words is None else el("title", None, words)
    place = {"x": f"{x:.2f}%", "y": f"{y:.2f}%", "overflow": "visible"}
    return el("svg", place, el("g", {"class": f"mark {style}"}, title, shapes[style]))


def _key(series: Series, style: str) -> Safe:
    line = el("line", {"class": f"line {style}", "x1": 0, "x2": 26, "y1": 7, "y2": 7})
    mark = el(
        "svg",
        {"x": 13, "y": 7, "overflow": "visible"},
        el("g", {"class": f"mark {style}"}, _mark(style, 0, 0)),
    )
    picture = el("svg", {"width": 26, "height": 14, "aria-hidden": "true"}, line, mark)
    return el("span", {"class": "key"}, picture, " ", series.name)


def _line(style: str, x1: float, x2: float, y1: float, y2: float) -> Safe:
    return el(
        "line",
        {
            "class": style,
            "x1": f"{x1:.2f}%",
            "x2": f"{x2:.2f}%",
            "y1": f"{y1:.2f}%",
            "y2": f"{y2:.2f}%",
        },
    )


def _table(of: Curve, series: Sequence[Series], places: Sequence[float]) -> Safe:
    found = [dict(each.points) for each in series]
    rows = [(f"{x:g}", *(points.get(x) for points in found)) for x in places]
    return el(
        "details",
        None,
        el("summary", None, "The numbers"),
        numbers(
            of.title,
            (of.x, *(each.name for each in series)),
            rows,
            ("", *[of.form] * len(series)),
        ),
    )
