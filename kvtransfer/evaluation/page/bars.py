"""Conditions as bars with their intervals, all on one scale.

Names and numbers are text, and only the bars are drawn, in shares of the width: so nothing shrinks
on a phone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvtransfer.evaluation.page.markup import Safe, el, estimate, join, shown
from kvtransfer.evaluation.page.scale import digits
from kvtransfer.report import Estimate

HEIGHT = 20
"""Of a track, in pixels."""

BAR = 10
"""Of a bar in it."""

Role = Literal["mapped", "ceiling", "floor", "rival", "control"]
"""How a bar is filled; the patterns tell them apart without colour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A stretch of numbers over the whole width of a track."""

    low: float
    high: float
    zero: float | None = None
    """Where bars begin; None for dots, where a length would mean nothing."""
    ticks: tuple[float, ...] = ()
    floor: float | None = None
    ceiling: float | None = None

    def at(self, value: float) -> float:
        """In percent of the width; what lies beyond an end is put at that end."""
        share = 100 * (value - self.low) / (self.high - self.low)
        return min(100.0, max(0.0, share))

    def beyond(self, value: float) -> int:
        """-1 left of the scale, 1 right of it, 0 on it."""
        return (value > self.high) - (value < self.low)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One condition."""

    name: str
    plain: str
    """What it is, in a few words; may be empty."""
    role: Role
    value: Estimate


def bars(
    groups: Iterable[tuple[str, Sequence[Bar]]], axis: Axis, form: str, *, compact: bool = False
) -> Safe:
    """A list of conditions in groups, each with a heading; empty groups are left out."""
    listed = []
    for heading, members in groups:
        if not members:
            continue
        listed.append(el("h4", None, heading) if heading else None)
        listed.append(el("ul", {"class": "bars"}, *(_row(each, axis, form) for each in members)))
    style = "chart compact" if compact else "chart"
    return el("div", {"class": style}, *listed, _scale(axis, form))


def _row(bar: Bar, axis: Axis, form: str) -> Safe:
    return el(
        "li",
        {"class": f"bar {bar.role}"},
        el("span", {"class": "name"}, el("b", None, bar.name), " ", _plain(bar.plain)),
        el("span", {"class": "value"}, estimate(bar.value, form)),
        track(bar, axis),
    )


def _plain(text: str) -> Safe | None:
    return el("span", {"class": "plain"}, text) if text else None


def track(bar: Bar, axis: Axis) -> Safe:
    """The drawn part of a row; the numbers beside it say the same to those who do not see it."""
    middle = HEIGHT / 2
    marks: list[Safe | None] = [
        _upright("ceiling-line", axis, axis.ceiling),
        _upright("floor-line", axis, axis.floor),
    ]
    at, off = axis.at(bar.value.value), axis.beyond(bar.value.value)
    if axis.zero is not None:
        start, end = sorted((axis.at(axis.zero), at))
        marks.append(
            el(
                "rect",
                {
                    "class": "fill",
                    "x": f"{start:.2f}%",
                    "width": f"{end - start:.2f}%",
                    "y": middle - BAR / 2,
                    "height": BAR,
                },
            )
        )
    if bar.value.low is not None and bar.value.high is not None and not off:
        low, high = axis.at(bar.value.low), axis.at(bar.value.high)
        marks.append(_line("halo", low, high, middle, middle))
        marks.append(_line("whisker", low, high, middle, middle))
        marks += [
            _line("whisker", x, x, middle - 4, middle + 4)
            for x, end in ((low, bar.value.low), (high, bar.value.high))
            if not axis.beyond(end)
        ]
    if off:
        marks.append(_arrow(off, middle))
    elif axis.zero is None:
        marks.append(el("circle", {"class": "dot", "cx": f"{at:.2f}%", "cy": middle, "r": 4.5}))
    return el(
        "svg", {"class": "track", "width": "100%", "height": HEIGHT, "aria-hidden": "true"}, *marks
    )


def _upright(style: str, axis: Axis, value: float | None) -> Safe | None:
    if value is None or axis.beyond(value):
        return None
    x = axis.at(value)
    return _line(style, x, x, 0, HEIGHT)


def _line(style: str, x1: float, x2: float, y1: float, y2: float) -> Safe:
    return el("line", {"class": style, "x1": f"{x1:.2f}%", "x2": f"{x2:.2f}%", "y1": y1, "y2": y2})


def _arrow(side: int, middle: float) -> Safe:
    """The bar goes on beyond the scale."""
    # A nested picture stands at an end of the track whatever its width.
    shape = f"M9 {middle - 7}L1 {middle}L9 {middle + 7}Z"
    if side > 0:
        shape = f"M1 {middle - 7}L9 {middle}L1 {middle + 7}Z"
    x = "0" if side < 0 else "100%"
    drawn = el("path", {"class": "arrow", "d": shape})
    shift = {"transform": "translate(-10 0)"} if side > 0 else {}
    return el("svg", {"x": x, "overflow": "visible"}, el("g", shift, drawn))


def _scale(axis: Axis, form: str) -> Safe:
    step = axis.ticks[1] - axis.ticks[0] if len(axis.ticks) > 1 else 1.0
    tick_form = digits(step, form)
    ticks = [
        el(
            "span",
            {"style": f"left:{axis.at(tick):.2f}%", "class": _anchor(axis.at(tick))},
            shown(tick, tick_form),
        )
        for tick in axis.ticks
    ]
    return el("div", {"class": "scale", "aria-hidden": "true"}, el("div", None, *ticks))


def _anchor(at: float) -> str | None:
    """Labels at an end stand within it."""
    return "first" if at < 5 else "last" if at > 95 else None


def legend(axis: Axis, *, controls: bool = True) -> Safe:
    """What the patterns and the two lines mean."""
    entries = [("mapped", "mapped")]
    if controls:
        entries.append(("control", "control, should fail"))
    swatches = [
        el("span", {"class": f"key bar {role}"}, _swatch(role, axis), " ", word)
        for role, word in entries
    ]
    for style, value, word in (
        ("floor-line", axis.floor, "floor: no prefix"),
        ("ceiling-line", axis.ceiling, "ceiling: its own prefix"),
    ):
        if value is not None:
            drawn = el("line", {"class": style, "x1": 4, "x2": 4, "y1": 0, "y2": 14})
            picture = el("svg", {"width": 8, "height": 14, "aria-hidden": "true"}, drawn)
            swatches.append(el("span", {"class": "key"}, picture, " ", word))
    whisker = el(
        "svg",
        {"width": 22, "height": 14, "aria-hidden": "true"},
        el("line", {"class": "whisker", "x1": 1, "x2": 21, "y1": 7, "y2": 7}),
        *(el("line", {"class": "whisker", "x1": x, "x2": x, "y1": 3, "y2": 11}) for x in (1, 21)),
    )
    swatches.append(el("span", {"class": "key"}, whisker, " ", "95 % interval"))
    return el("p", {"class": "legend"}, join(swatches, between=" "))


def _swatch(role: str, axis: Axis) -> Safe:
    drawn = el("rect", {"class": "fill", "x": 0, "y": 2, "width": 22, "height": 10})
    if axis.zero is None:
        drawn = el("circle", {"class": "dot", "cx": 11, "cy": 7, "r": 4.5})
    return el("svg", {"width": 22, "height": 14, "aria-hidden": "true"}, drawn)


def patterns() -> Safe:
    """The hatching that bars refer to; it stands once on a page, and takes no room."""
    hatch = el(
        "pattern",
        {
            "id": "hatch",
            "width": 5,
            "height": 5,
            "patternUnits": "userSpaceOnUse",
            "patternTransform": "rotate(45)",
        },
        el("line", {"class": "hatch", "x1": 0, "x2": 0, "y1": 0, "y2": 5}),
    )
    return el(
        "svg",
        {"class": "patterns", "width": 0, "height": 0, "aria-hidden": "true"},
        el("defs", None, hatch),
    )
