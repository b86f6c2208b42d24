"""What the results say together: a table, correlations with what came of it, and a picture.

    python -m experiments.predict.summary

Reads results/, writes summary.json and picture.png, and prints the README's tables.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from experiments.predict import association
from experiments.predict.directions import DIRECTIONS
from experiments.predict.picture import draw
from kvtransfer.measures.agreement import cosine_gain
from kvtransfer.measures.intervals import Column, interval, mean_ratio
from kvtransfer.report import Estimate

HERE = Path(__file__).parent

USABLE = 0.5
"""Share of the gap recovered from which a mapping is called usable."""

FLOOR = 0.0
"""Shares below it count as it: worse than no prefix is useless, however much worse."""


@dataclass(frozen=True)
class Direction:
    """One pair-direction, as measured."""

    found: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Source and target."""
        return f"{self.found['source']} → {self.found['target']}"

    @property
    def family(self) -> str:
        """In what the two differ."""
        return str(self.found["family"])

    def column(self, condition: str, metric: str) -> Column:
        """One number a text item."""
        return np.array(self.found["text"][condition][metric])

    @cached_property
    def worth(self) -> Estimate:
        """Nats a token that the target's own prefix is worth."""
        return interval(
            lambda x: x.mean(-1), self.column("none", "nll") - self.column("own", "nll")
        )

    @property
    def has_gap(self) -> bool:
        """Whether its own prefix helps the target at all, so that there is something to recover."""
        return (self.worth.low or 0.0) > 0

    @cached_property
    def gap(self) -> Estimate | None:
        """Share of the gap in NLL that is recovered."""
        if not self.has_gap:
            return None
        none, own, ours = (self.column(each, "nll") for each in ("none", "own", "mapped"))
        return mean_ratio(none - ours, none - own)

    @cached_property
    def kl(self) -> Estimate:
        """Share of the KL to own that no prefix leaves, and the mapped one takes away."""
        none, ours = (self.column(each, "kl_to_own") for each in ("none", "mapped"))
        return interval(lambda a, b: 1 - a.mean(-1) / b.mean(-1), ours, none)

    @cached_property
    def predictors(self) -> dict[str, float]:
        """What was known when the mapping was fitted, and before."""
        fit, seen = self.found["fit"], self.found["seen"]
        layers = {name: np.array(numbers, dtype=float) for name, numbers in seen.items()}
        ours, control = layers["cosine_mapped"], layers["cosine_shuffled"]
        lost, blank = layers["error_mapped"], layers["error_shuffled"]
        concentration = self.found["concentration"]
        return {
            "R² of keys": fit["r2_keys"],
            "R² of values": fit["r2_values"],
            "attention cosine": float(ours.mean()),
            "… above the control's": float((ours - control).mean()),
            "… as a share of what the control lacks": cosine_gain(
                float(ours.mean()), float(control.mean())
            ),
            "… the same, weakest layer": float(cosine_gain(ours, control).min()),
            "attention error taken away": float((1 - lost / blank).mean()),
            "concentration of keys' error": -float(np.nanmean(concentration["key"])),
            "concentration of values' error": -float(np.nanmean(concentration["value"])),
            "probe (before any fit)": self.found["probe"]["value"],
            "KL taken away, the fit's held-out text": float(
                1 - layers["kl_mapped"].mean() / layers["kl_none"].mean()
            ),
        }


def judged(name: str, directions: list[Direction], outcome: str) -> dict[str, Any]:
    """One predictor against one outcome, over the directions that have it."""
    x = np.array([each.predictors[name] for each in directions])
    y = np.array([max(FLOOR, getattr(each, outcome).value) for each in directions])
    families = [each.family for each in directions]
    usable = y >= USABLE
    document: dict[str, Any] = {"n": len(x)}
    for kind in ("pearson", "spearman"):
        correlation = getattr(association, kind)
        document[kind] = association.correlated(correlation, x, y).to_dict()
        without = association.without_each(correlation, x, y, families)
        document[f"{kind}_without_family"] = without
    if usable.any() and not usable.all():
        document["spearman_among_usable"] = association.correlated(
            association.spearman, x[usable], y[usable]
        ).to_dict()
        document |= {
            "auc": association.auc_interval(x, usable).to_dict(),
            "threshold": association.threshold(x, usable),
            "left_out": association.left_out(x, usable),
            "family_left_out": association.left_out(x, usable, families),
            "usable": int(usable.sum()),
        }
    return document


def load_results() -> list[Direction]:
    """All that were measured, in the order of the list."""
    paths = [HERE / "results" / f"{a}-to-{b}.json" for a, b, _ in DIRECTIONS]
    return [Direction(json.loads(path.read_text())) for path in paths if path.exists()]


def main() -> None:
    """Write the summary and the picture, print the tables."""
    directions = load_results()
    within = [each for each in directions if each.has_gap]
    names = list(directions[0].predictors)
    summary = {
        outcome: {name: judged(name, those, outcome) for name in names}
        for outcome, those in (("gap", within), ("kl", directions))
    }
    rows = [
        {
            "source": each.found["source"],
            "target": each.found["target"],
            "family": each.family,
            "predictors": each.predictors,
            "worth": each.worth.to_dict(),
            "gap": None if each.gap is None else each.gap.to_dict(),
            "kl": each.kl.to_dict(),
        }
        for each in directions
    ]
    document = {"usable": USABLE, "directions": rows, "judged": summary}
    (HERE / "summary.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    draw(rows, summary["gap"], HERE / "picture.png", usable=USABLE)
    print(_directions(directions), "\n")
    for outcome in summary:
        print(f"{outcome}\n\n{_judged(summary[outcome])}\n")


def _directions(directions: list[Direction]) -> str:
    lines = [
        "| direction | differs by | R² K, V | cosine | share | error away | conc. K, V | probe "
        "| prefix worth | gap recovered | KL taken away |",
        "|---" * 11 + "|",
    ]
    for each in directions:
        p = list(each.predictors.values())
        lines.append(
            f"| {each.name} | {each.family} | {p[0]:.2f}, {p[1]:.2f} | {p[2]:.3f} | {p[4]:.2f} "
            f"| {p[6]:.2f} | {-p[7]:.2f}, {-p[8]:.2f} | {p[9]:.2f} | {each.worth.value:.3f} "
            f"| {_share(each.gap)} | {_share(each.kl)} |"
        )
    return "\n".join(lines)


def _judged(found: Mapping[str, Any]) -> str:
    lines = [
        "| predictor | Pearson | Spearman | … least without a family | … among usable | AUC "
        "| threshold | right, left out | right, family left out |",
        "|---" * 9 + "|",
    ]
    for name, each in found.items():
        least = min(each["spearman_without_family"].values())
        cells = [name, *(_number(each[kind]) for kind in ("pearson", "spearman")), f"{least:.2f}"]
        if "auc" in each:
            cells += [_number(each[kind]) for kind in ("spearman_among_usable", "auc")]
            cells += [f"{each['threshold']:.3g}"]
            cells += [f"{each[key]:.0%}" for key in ("left_out", "family_left_out")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _number(found: Mapping[str, Any]) -> str:
    if found["low"] is None:
        return f"{found['value']:.2f}"
    return f"{found['value']:.2f} ({found['low']:.2f} to {found['high']:.2f})"


def _share(estimate: Estimate | None) -> str:
    if estimate is None:
        return "–"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:.0%}"
    return f"{estimate.value:.0%} ({estimate.low:.0%} to {estimate.high:.0%})"


if __name__ == "__main__":
    main()
