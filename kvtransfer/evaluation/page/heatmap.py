"""The layer map: a table whose shades are for the eye, and whose numbers are there to be read."""

from kvtransfer.evaluation.inside import LayerMatrix
from kvtransfer.evaluation.page.markup import Safe, el, shown
from kvtransfer.evaluation.page.tables import captioned

SHADES = 10
"""Steps from nothing to everything; style.css has as many."""

TITLED = 3_000
"""Cells up to which each says in full what it is when pointed at."""


def heatmap(of: LayerMatrix, source: str, target: str) -> Safe:
    """Percent of variance: a row a target layer, a column a source layer."""
    scores = of.scores.tolist()
    depth = len(scores[0])
    titled = len(scores) * depth <= TITLED
    head = el(
        "tr",
        None,
        el("th", {"scope": "col"}, el("span", {"class": "unseen"}, "target layer, source layer")),
        *(el("th", {"scope": "col"}, str(s)) for s in range(depth)),
    )
    rows = [
        el(
            "tr",
            None,
            el("th", {"scope": "row"}, str(t)),
            *(_cell(x, s, t, s in of.chosen[t], titled=titled) for s, x in enumerate(row)),
        )
        for t, row in enumerate(scores)
    ]
    label = f"Rows: layers of {target}. Columns: layers of {source}."
    table = el(
        "table",
        {"class": "heatmap", "aria-label": label},
        el("thead", None, head),
        el("tbody", None, *rows),
    )
    return captioned(label, table)


def shade(share: float) -> int:
    """The step of a share of variance; what is below nothing has the lowest."""
    return min(SHADES - 1, max(0, int(share * SHADES)))


def _cell(r2: float, source: int, target: int, chosen: bool, *, titled: bool) -> Safe:
    words = f"target layer {target} from source layer {source}: R² {shown(r2, '.3f')}"
    style = f"s{shade(r2)}" + (" chosen" if chosen else "")
    text = "<0" if r2 < 0 else f"{100 * r2:.0f}"
    inside = el("b", None, text) if chosen else text
    title = words + (", read by the mapping" if chosen else "")
    return el("td", {"class": style, "title": title if titled else None}, inside)
