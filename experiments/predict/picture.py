"""A scatter of each predictor against what came of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt

SHOWN = (
    "R² of values",
    "attention cosine",
    "… as a share of what the control lacks",
    "probe (before any fit)",
    "concentration of keys' error",
    "KL taken away, the fit's held-out text",
)
MARKERS = "osD^vPX*"


def draw(
    rows: Sequence[Mapping[str, Any]], judged: Mapping[str, Any], path: Path, *, usable: float
) -> None:
    """Six panels: a predictor each, against the share of the gap recovered; a marker a family.

    Filled where the share is at least ``usable``, hollow where it is not, so that it can be read
    without colour. Shares below 0 stand at 0; a direction without a gap is left out.
    """
    families = list(dict.fromkeys(row["family"] for row in rows))
    figure, axes = plt.subplots(2, 3, figsize=(9.6, 6.2), sharey=True, layout="constrained")
    for axis, name in zip(axes.flat, SHOWN, strict=True):
        for row in rows:
            if row["gap"] is None:
                continue
            index = families.index(row["family"])
            good = row["gap"]["value"] >= usable
            axis.plot(
                row["predictors"][name],
                max(0.0, row["gap"]["value"]),
                MARKERS[index],
                color=f"C{index}",
                markerfacecolor=f"C{index}" if good else "white",
                markersize=6,
            )
        rank = judged[name]["spearman"]["value"]
        title = name.replace("…", "cosine") + (", negated" if "concentration" in name else "")
        axis.set_title(f"{title}\nSpearman {rank:.2f}", fontsize=9)
        axis.axhline(usable, color="grey", linestyle=":", linewidth=1)
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel("gap recovered")
    handles = [
        plt.Line2D([], [], marker=MARKERS[i], color=f"C{i}", linestyle="", label=family)
        for i, family in enumerate(families)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=100)
    plt.close(figure)
