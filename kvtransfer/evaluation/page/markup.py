"""HTML that cannot be forgotten to be escaped: whatever is no :class:`Safe` is text.

This module knows nothing of what a page says.
"""

import math
import re
from collections.abc import Iterable, Mapping
from html import escape

from kvtransfer.report import Estimate

UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""What no HTML may hold, and half characters, which no UTF-8 can."""

VOID = frozenset({"br", "meta", "link", "rect", "line", "circle", "path"})
"""Elements that are written without an end."""

THIN = "\u202f"
"""A narrow space that does not break: between a number and its percent sign."""


class Safe(str):
    """Markup, made by :func:`el` or :func:`join` alone. Adding strings to it makes text again."""

    __slots__ = ()


Child = str | Safe | None
Attributes = Mapping[str, str | int | float | None]


def el(name: str, attributes: Attributes | None = None, *children: Child) -> Safe:
    """An element; attributes that are None are left out, children that are None too."""
    given = "".join(
        f' {key}="{escaped(value if isinstance(value, str) else f"{value:g}")}"'
        for key, value in (attributes or {}).items()
        if value is not None
    )
    if name in VOID:
        # Within SVG a slash is needed, and elsewhere it is ignored.
        return Safe(f"<{name}{given}/>")
    return Safe(f"<{name}{given}>{join(children)}</{name}>")


def join(children: Iterable[Child], between: Child = "") -> Safe:
    """Children one after another, each escaped unless it is markup."""
    return Safe(_one(between).join(_one(child) for child in children if child is not None))


def escaped(text: str) -> str:
    """Text as it may stand in an element or an attribute; unprintable characters are shown as �."""
    return escape(UNPRINTABLE.sub("\ufffd", text), quote=True)


def _one(child: Child) -> str:
    if child is None or isinstance(child, Safe):
        return child or ""
    return escaped(child)


def said(text: str) -> Safe:
    """Text of a model or a file: it cannot turn the direction of what stands beside it."""
    return el("bdi", None, text)


def shown(value: float, form: str) -> str:
    """A number as people read it: a real minus, and a space before the percent sign."""
    if not math.isfinite(value):
        return "–"
    text = format(value, form).replace("-", "−").replace("%", f"{THIN}%")
    return text[1:] if text.startswith("−") and not re.search("[1-9]", text) else text


def n_of(items: int) -> str:
    """The number of items that something rests on, in one piece."""
    return f"n\u00a0=\u00a0{items:,}"


def number(value: float, form: str) -> Safe:
    """A number with all its digits behind it, so that what is shown is what JSON has."""
    return el("data", {"value": repr(float(value))}, shown(value, form))


def estimate(of: Estimate | None, form: str) -> Safe:
    """A value, and its interval where there is one; a dash for none."""
    if of is None:
        return Safe("–")
    return join([number(of.value, form), interval(of, form)], between=" ")


def interval(of: Estimate, form: str) -> Safe | None:
    """The interval alone, quieter than a value; none where nothing could have come out otherwise.

    Of two percentages only the last has its sign.
    """
    if of.low is None or of.high is None or of.low == of.high:
        return None
    text = shown(of.low, form).removesuffix(f"{THIN}%")
    low = el("data", {"value": repr(of.low)}, text)
    return el("span", {"class": "interval"}, low, " to ", number(of.high, form))
