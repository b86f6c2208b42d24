"""A curve of quality against what is recomputed: paired over items, with intervals."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from kvtransfer.measures.intervals import SEED, Column, mean, mean_ratio
from kvtransfer.report import Estimate, Provenance

RESULTS = Path(__file__).parent / "results"


@dataclass(slots=True)
class Curve:
    """Per arm and metric, one number an item; ``own`` is the best arm, ``worst`` plain reuse."""

    worst: str
    items: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, found: dict[str, dict[str, float]]) -> None:
        """One item under all arms."""
        for arm, metrics in found.items():
            for metric, value in metrics.items():
                self.items.setdefault(arm, {}).setdefault(metric, []).append(value)

    def column(self, arm: str, metric: str) -> Column:
        """One number an item."""
        return np.array(self.items[arm][metric])

    def recovered(self, arm: str, metric: str) -> Estimate | None:
        """Of what ``worst`` loses against ``own``, the share that is won back."""
        lost = self.column(self.worst, metric) - self.column("own", metric)
        return mean_ratio(self.column(self.worst, metric) - self.column(arm, metric), lost)

    def to_dict(self) -> dict[str, Any]:
        """Means and recovered shares of every arm."""
        return {
            arm: {metric: mean(self.column(arm, metric)).to_dict() for metric in metrics}
            | {
                f"{metric}_recovered": None if share is None else share.to_dict()
                for metric in metrics
                for share in [self.recovered(arm, metric)]
            }
            for arm, metrics in self.items.items()
        }


def save(name: Path, curve: Curve, settings: dict[str, Any]) -> None:
    """Write the curve with its items to results/: after each item, lest a run cut short be lost."""
    document = {
        "settings": settings,
        "arms": curve.to_dict(),
        "items": curve.items,
        "provenance": Provenance.here(seed=SEED).to_dict(),
    }
    path = RESULTS / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def show(curve: Curve) -> None:
    """Print the curve."""
    metrics = list(next(iter(curve.items.values())))
    table = Table("arm", *metrics, *(f"{metric} recovered" for metric in metrics))
    for arm, found in curve.to_dict().items():
        cells = [found.get(metric) for metric in metrics]
        shares = [found.get(f"{metric}_recovered") for metric in metrics]
        table.add_row(
            arm,
            *("–" if cell is None else f"{Estimate(**cell):.4f}" for cell in cells),
            *("–" if share is None else f"{Estimate(**share):.0%}" for share in shares),
        )
    Console(width=150).print(table)
