"""What each source layer alone explains of each target layer: a picture, and one for the terminal.

matplotlib is asked for when a picture is saved, and never through pyplot: no window, no state.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from jaxtyping import Float
from rich.table import Table
from rich.text import Text
from torch import Tensor

from kvtransfer.errors import KVTransferError

SUFFIXES = (".png", ".svg")

SHADES = " ░▒▓█"
"""From nothing to everything, so that a table says the same without colours."""

CHOSEN = "•"

UNSEEN = "·"
"""A source layer that was not looked at: a band left it out."""

COLOURS = "viridis"
"""Its lightness alone tells the order, so it reads in grey and with any colour vision."""

NUMBERED = 12
"""Layers up to which a cell has room for its number."""


@dataclass(frozen=True, slots=True, eq=False)
class LayerScores:
    """Single-layer held-out R², as :func:`kvtransfer.fitting.layers.rank_layers` finds it; −∞ is
    what it did not look at."""

    scores: Float[Tensor, "target source"]
    source: str
    target: str
    chosen: tuple[tuple[int, ...], ...] | None = None
    """The source layers that feed each target layer."""

    def __post_init__(self) -> None:
        _check(self.scores, self.chosen)

    def __rich__(self) -> Table:
        depth, top = self.scores.shape[1], _top(self.scores)
        steps = (f"{shade} {i * top / len(SHADES):.2f}" for i, shade in enumerate(SHADES) if i)
        table = Table(
            "target layer",
            _ruler(depth),
            "best",
            "R²",
            title=f"{self.source} → {self.target}: what one source layer explains",
            caption=f"held-out R² from {', '.join(steps)} on"
            + (f"; {CHOSEN} chosen" if self.chosen else "")
            + (f"; {UNSEEN} not looked at" if not bool(self.scores.isfinite().all()) else ""),
        )
        for column in table.columns:
            column.no_wrap = True
        table.columns[1].overflow = "crop"
        for column in (table.columns[0], *table.columns[2:]):
            column.justify = "right"
        for index, row in enumerate(self.scores.tolist()):
            chosen = self.chosen[index] if self.chosen else ()
            best = max(range(depth), key=row.__getitem__)
            cells = Text.assemble(*(_cell(x / top, s in chosen) for s, x in enumerate(row)))
            table.add_row(str(index), cells, str(best), f"{row[best]:.3f}")
        return table


def _cell(share: float, chosen: bool) -> str:
    """Two characters, which together are about as high as they are wide."""
    if share == -math.inf:
        return UNSEEN * 2
    shade = SHADES[max(0, min(len(SHADES) - 1, int(share * len(SHADES))))]
    return shade + (CHOSEN if chosen else shade)


def _ruler(depth: int) -> str:
    """The numbers of every fifth source layer, above it."""
    return "".join(f"{s:<10}" for s in range(0, depth, 5)).rstrip()


def save_heatmap(
    scores: Float[Tensor, "target source"],
    path: str | Path,
    *,
    source: str,
    target: str,
    chosen: Sequence[Sequence[int]] | None = None,
) -> None:
    """Draw how much of each target layer each source layer explains alone, held out.

    Args:
        scores: As :func:`kvtransfer.fitting.layers.rank_layers` finds them; −∞ is left blank.
        path: Ends in .png or .svg.
        source: Name of the source model.
        target: Name of the target model.
        chosen: The source layers that feed each target layer; they are framed.

    Raises:
        KVTransferError: matplotlib is not installed, or the file cannot be written.
    """
    path = Path(path)
    require_drawable(path)
    _check(scores, chosen)
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import MaxNLocator

    rows, columns = scores.shape
    side = 0.5 if _numbered(scores) else 0.24
    size = max(4.2, side * columns + 2.4), max(3.2, side * rows + 1.5)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    top = _top(scores)
    seen = scores.where(scores.isfinite(), math.nan)  # which is left blank
    image = axes.imshow(seen.numpy(force=True), cmap=COLOURS, vmin=0, vmax=top)
    for t, row in enumerate(scores.tolist()):
        for s, r2 in enumerate(row):
            if r2 == -math.inf:
                continue
            ink = "black" if r2 > 0.6 * top else "white"
            if _numbered(scores):
                axes.text(s, t, f"{r2:.2f}", ha="center", va="center", color=ink, fontsize=8)
            if chosen is not None and s in chosen[t]:
                corner = (s - 0.42, t - 0.42)
                axes.add_patch(Rectangle(corner, 0.84, 0.84, fill=False, edgecolor=ink, lw=1.2))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True, nbins=16, min_n_ticks=1))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(f"source layer ({source})")
    axes.set_ylabel(f"target layer ({target})")
    figure.suptitle(
        "What one source layer explains" + ("; framed: chosen" if chosen else ""), fontsize=11
    )
    bar = figure.colorbar(
        image, ax=axes, extend="min" if float(scores[scores.isfinite()].min()) < 0 else "neither"
    )
    bar.set_label("held-out R² (share of variance)")
    bar.outline.set_visible(False)
    try:
        figure.savefig(path, dpi=160)
    except OSError as error:
        raise KVTransferError(
            f"{path} cannot be written: {error.strerror or error}", hint="choose another place"
        ) from error


def require_drawable(path: Path) -> None:
    """Raise, before any work is done for it, where a picture could not be drawn.

    Raises:
        KVTransferError: matplotlib is not installed.
        ValueError: the path ends in something else than .png or .svg.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"a picture ends in {' or '.join(SUFFIXES)}, not {path.suffix!r}")
    if find_spec("matplotlib") is None:
        raise KVTransferError(
            "pictures are drawn with matplotlib, which is not installed",
            hint="pip install 'matplotlib>=3.9'",
        )


def _numbered(scores: Float[Tensor, "target source"]) -> bool:
    return max(scores.shape) <= NUMBERED


def _top(scores: Float[Tensor, "target source"]) -> float:
    """The end of the scale: the best score, up to the next tenth."""
    return min(1.0, max(1, math.ceil(10 * float(scores.max()))) / 10)


def _check(scores: Float[Tensor, "target source"], chosen: Sequence[Sequence[int]] | None) -> None:
    unseen = scores == -math.inf
    if not bool(scores.isfinite().any()) or not bool((scores.isfinite() | unseen).all()):
        raise ValueError(
            f"scores of shape {tuple(scores.shape)} must be finite, or −∞ where a band left them "
            "out, and at least one"
        )
    rows, columns = scores.shape
    if chosen is not None and (
        len(chosen) != rows or any(not 0 <= s < columns for row in chosen for s in row)
    ):
        raise ValueError(f"chosen names source layers for {rows} target layers, below {columns}")
