"""Quality against the share of a prefix's tokens that the target reads again itself."""

from collections.abc import Iterable
from typing import Any

from rich.table import Table

from kvtransfer.evaluation.guide_items import GuideResult
from kvtransfer.evaluation.text import TextResult
from kvtransfer.measures.intervals import mean_ratio
from kvtransfer.report import Estimate

COLUMNS = (
    ("nll", "NLL", ".3f"),
    ("kl_to_own", "KL to own", ".3f"),
    ("gap_recovered", "gap recovered", ".0%"),
    ("loss_recovered", "of {}'s loss", ".0%"),
    ("accuracy", "accuracy", ".0%"),
)


def condition_of(share: float, of: str = "mapped") -> str:
    """What the condition with that share of the prefix of ``of`` is called; with none, ``of``."""
    return f"{of}+{100 * share:g}%" if share else of


def checked_shares(shares: Iterable[float]) -> tuple[float, ...]:
    """Shares in ascending order, each once.

    Raises:
        ValueError: one is not between 0 and 1.
    """
    found = tuple(sorted(set(shares)))
    for share in found:
        if not 0 <= share <= 1:
            raise ValueError(f"a share of {share} is to be recomputed; it lies between 0 and 1")
    return found


def curve(
    shares: tuple[float, ...],
    text: TextResult | None,
    guides: GuideResult | None,
    *,
    of: str = "mapped",
) -> list[dict[str, Any]]:
    """One point a share that could be had; ``loss_recovered`` is of the NLL that ``of`` loses
    against ``own``."""
    points = []
    for share in shares:
        name, point = condition_of(share, of), dict[str, Any]()
        if text is not None and {name, of} <= text.columns.keys():
            measured = text.estimates(name)
            point |= {key: measured[key] for key in ("nll", "kl_to_own", "gap_recovered")}
            plain, own = text.columns[of]["nll"], text.columns["own"]["nll"]
            point["loss_recovered"] = mean_ratio(plain - text.columns[name]["nll"], plain - own)
        if guides is not None and name in guides.right:
            point["accuracy"] = guides.estimates(name)["accuracy"]
        if point:
            points.append({"share": share, "condition": name} | point)
    return points


WHOSE = {
    "mapped": "a mapped prefix",
    "raw": "the source's cache as it is",
    "apart": "a prefix whose second half was read apart",
}


def curve_table(points: list[dict[str, Any]], *, of: str = "mapped") -> Table:
    """What a person reads."""
    shown = [column for column in COLUMNS if any(column[0] in point for point in points)]
    table = Table(
        "tokens read again",
        *(header.format(of) for _, header, _ in shown),
        title=f"{WHOSE[of]}, repaired by the target",
        caption="the tokens that deviate most in the first layers are read again, layer by layer",
    )
    for point in points:
        cells: list[tuple[Estimate | None, str]] = [
            (point.get(key), form) for key, _, form in shown
        ]
        table.add_row(
            f"{100 * point['share']:g} %",
            *("–" if each is None else format(each, form) for each, form in cells),
        )
    return table
