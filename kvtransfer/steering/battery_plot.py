"""One picture of a persona battery: how far the cache is the target's, and how far the text is.

Shape and label tell the configurations apart, so it reads in grey and with any colour vision.
"""

from collections.abc import Sequence
from pathlib import Path

from kvtransfer.errors import KVTransferError
from kvtransfer.fitting.heatmap import require_drawable
from kvtransfer.report import Estimate
from kvtransfer.steering.battery_report import BatteryReport

SHAPES = {
    "none": ("o", "white"),
    "full": ("o", "black"),
    "early": ("<", "black"),
    "mid": ("D", "black"),
    "late": (">", "black"),
    "mid-a": ("d", "white"),
    "mid-b": ("d", "0.6"),
    "mid-c": ("d", "black"),
    "α 0.25": ("s", "white"),
    "α 0.5": ("s", "0.6"),
    "lag": ("v", "white"),
    "shuffle": ("X", "white"),
    "same tokens": ("*", "white"),
}
"""Marker and filling of each configuration."""

INK = "#1b4f72"


def save_plot(report: BatteryReport, path: str | Path) -> None:
    """Draw alignment (V-gap in the edited layers) against expression (markers in 100 words).

    Args:
        report: Of a battery.
        path: Ends in .png or .svg.

    Raises:
        KVTransferError: matplotlib is not installed, or the file cannot be written.
    """
    path = Path(path)
    require_drawable(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 5.2), layout="constrained")
    axes = figure.add_subplot()
    points = [(cell.v_here, cell.markers["deduplicated"]) for cell in report.cells]
    left = min(x.value if x.low is None else x.low for x, _ in points)
    right = max(x.value if x.high is None else x.high for x, _ in points)
    top = max(y.value if y.high is None else y.high for _, y in points) or 1.0
    wide = right - left or 1.0
    places = _labels(report, middle=(left + right) / 2, room=0.062 * top, aside=0.05 * wide)
    for cell, (x, y), place in zip(report.cells, points, places, strict=True):
        shape, filling = SHAPES[cell.name]
        axes.errorbar(
            *(x.value, y.value),
            xerr=_arms(x),
            yerr=_arms(y),
            fmt=shape,
            markersize=11 if shape == "*" else 8,
            markerfacecolor=INK if filling == "black" else filling,
            markeredgecolor=INK,
            ecolor="0.75",
            elinewidth=0.8,
            zorder=3,
        )
        axes.annotate(
            cell.name + (" (forced)" if cell.forced else ""),
            (x.value, y.value),
            xytext=place,
            va="center",
            fontsize=9,
            arrowprops={"arrowstyle": "-", "color": "0.8", "lw": 0.7, "shrinkA": 0, "shrinkB": 6},
        )
    axes.axhline(report.cell("none").markers["deduplicated"].value, color="0.5", lw=0.8, ls=":")
    axes.axvline(0, color="0.5", lw=0.8, ls=":")
    axes.set_xlim(left - 0.05 * wide, right + 0.32 * wide)
    heights = [height for _, height in places]
    axes.set_ylim(min(-0.04 * top, *(h - 0.05 * top for h in heights)), max(1.08 * top, *heights))
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= 1.08 * top])
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("alignment: V-gap in the edited layers (all layers where none is edited)")
    axes.set_ylabel(f"expression: markers of {report.target.name} in 100 words")
    axes.set_title(
        f"{report.model}, {report.source.name} → {report.target.name}: "
        f"{report.samples} samples of {report.tokens} tokens, 95 % intervals",
        fontsize=10,
        loc="left",
    )
    try:
        figure.savefig(path, dpi=160)
    except OSError as error:
        raise KVTransferError(
            f"{path} cannot be written: {error.strerror or error}", hint="choose another place"
        ) from error


def _arms(estimate: Estimate) -> list[list[float]] | None:
    if estimate.low is None or estimate.high is None:
        return None
    # A bootstrap interval of a skewed statistic may leave its value out.
    return [
        [max(0.0, estimate.value - estimate.low)],
        [max(0.0, estimate.high - estimate.value)],
    ]


def _labels(
    report: BatteryReport, *, middle: float, room: float, aside: float
) -> list[tuple[float, float]]:
    """Where each cell's name stands: in one column right of the points on the left, or in another
    right of all."""
    halves: dict[bool, list[int]] = {False: [], True: []}
    for index, cell in enumerate(report.cells):
        halves[cell.v_here.value > middle].append(index)
    places: dict[int, tuple[float, float]] = {}
    for half in halves.values():
        cells = [report.cells[index] for index in half]
        gaps = [cell.v_here for cell in cells]
        column = max((g.value if g.high is None else g.high for g in gaps), default=0.0) + aside
        heights = apart([cell.markers["deduplicated"].value for cell in cells], room=room)
        for index, height in zip(half, heights, strict=True):
            places[index] = column, height
    return [places[index] for index in range(len(report.cells))]


def apart(heights: Sequence[float], *, room: float) -> list[float]:
    """Heights for labels, in the order of their points, at least ``room`` from each other.

    Labels that would collide are spread around their common middle (pool adjacent violators).
    """
    order = sorted(range(len(heights)), key=heights.__getitem__)
    pools: list[tuple[float, list[int]]] = []
    for index in order:
        pool = (heights[index], [index])
        while pools and _bottom(pool, room) < _top(pools[-1], room) + room:
            middle, held = pools.pop()
            members = [*held, *pool[1]]
            total = middle * len(held) + pool[0] * len(pool[1])
            pool = (total / len(members), members)
        pools.append(pool)
    placed = [0.0] * len(heights)
    for pool in pools:
        for number, index in enumerate(pool[1]):
            placed[index] = _bottom(pool, room) + number * room
    return placed


def _bottom(pool: tuple[float, list[int]], room: float) -> float:
    return pool[0] - room * (len(pool[1]) - 1) / 2


def _top(pool: tuple[float, list[int]], room: float) -> float:
    return pool[0] + room * (len(pool[1]) - 1) / 2
