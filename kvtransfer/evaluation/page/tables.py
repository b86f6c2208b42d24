"""Tables of numbers, in a box of their own that scrolls where a screen is narrow."""

from collections.abc import Iterable, Sequence

from kvtransfer.evaluation.figure import Cell, Listing
from kvtransfer.evaluation.page.markup import Safe, el, estimate, number
from kvtransfer.report import Estimate


def numbers(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[Cell]], forms: Sequence[str]
) -> Safe:
    """A table whose rows are named by their first cell.

    Args:
        title: Its caption.
        columns: Its headings.
        rows: As many cells each.
        forms: How numbers are written, one a column.
    """
    head = el("tr", None, *(el("th", {"scope": "col"}, name) for name in columns))
    body = [
        el(
            "tr",
            None,
            el("th", {"scope": "row"}, str(name)),
            *(el("td", None, _cell(c, form)) for c, form in zip(cells, forms[1:], strict=True)),
        )
        for name, *cells in rows
    ]
    table = el(
        "table",
        {"class": "numbers", "aria-label": title},
        el("thead", None, head),
        el("tbody", None, *body),
    )
    return captioned(title, table)


def listing(of: Listing) -> Safe:
    """What a part wants shown as a table."""
    return numbers(of.title, of.columns, of.rows, of.forms)


def scrolling(label: str, inside: Safe) -> Safe:
    """A box that may be wider inside than outside; the keyboard reaches it."""
    place = {"class": "scroll", "tabindex": "0", "role": "region", "aria-label": label}
    return el("div", place, inside)


def captioned(caption: str, table: Safe) -> Safe:
    """A table in such a box, and above it, where it does not scroll away, what it is."""
    return el(
        "div",
        {"class": "table"},
        el("p", {"class": "caption", "aria-hidden": "true"}, caption),
        scrolling(caption, table),
    )


def _cell(cell: Cell, form: str) -> Safe | str:
    if cell is None:
        return "–"
    if isinstance(cell, Estimate):
        return estimate(cell, form)
    return cell if isinstance(cell, str) else number(cell, form)
