"""A scatter of each predictor against what came of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt

SHOWN = (
    "R² of keys",
    "R² of values",
    "attention cosine",
    "… as a share of what the control lacks",
    "probe (before any fit)",
    "concentration of keys' error",
)
MARKERS = "osD^vPX*"


def draw(
    rows: Sequence[Mapping[str, Any]], judged: Mapping[str, Any], path: Path, *, usable: float
) -> None:
    """Six panels: a predictor each, against the share of KL taken away; a marker a family.

    Filled where the gap's recovered share is at least ``usable``, hollow where it is not, so that
    it can be read without colour; crossed out where there is no gap.
    """
    families = list(dict.fromkeys(row["family"] for row in rows))
    figure, axes = plt.subplots(2, 3, figsize=(9.6, 6.2), sharey=True, layout="constrained")
    for axis, name in zip(axes.flat, SHOWN, strict=True):
        for row in rows:
            index = families.index(row["family"])
            good = row["gap"] is not None and row["gap"]["value"] >= usable
            axis.plot(
                row["predictors"][name],
                max(0.0, row["kl"]["value"]),
                MARKERS[index],
                color=f"C{index}",
                markerfacecolor=f"C{index}" if good else "white",
                markersize=6,
            )
        rank = judged[name]["spearman"]["value"]
        axis.set_title(f"{name.replace('…', 'cosine')}\nSpearman {rank:.2f}", fontsize=9)
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel("KL taken away (0: worse than none, too)")
    handles = [
        plt.Line2D([], [], marker=MARKERS[i], color=f"C{i}", linestyle="", label=family)
        for i, family in enumerate(families)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=100)
    plt.close(figure)
