"""The tables of README.md here, from results/*.json.

python -m experiments.recompute.markdown
"""

import json
from typing import Any

from experiments.recompute.curve import RESULTS
from kvtransfer.report import Estimate

METRICS = (
    ("nll", "NLL", ".3f"),
    ("kl_to_own", "KL to own", ".4f"),
    ("accuracy", "accuracy", ".0%"),
    ("nll_recovered", "of the NLL lost", ".0%"),
    ("kl_to_own_recovered", "of the KL", ".0%"),
    ("gap_recovered", "gap recovered", ".0%"),
    ("loss_recovered", "of mapped's loss", ".0%"),
)


def main() -> None:
    """Print one table a file."""
    for path in sorted(RESULTS.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        points = found.get("recompute")
        rows = (
            {f"{100 * point['share']:g} %": point for point in points} if points else found["arms"]
        )
        print(f"{path.stem}\n\n" + "\n".join(lines(rows)) + "\n")


def lines(rows: dict[str, dict[str, Any]]) -> list[str]:
    """A table in Markdown: only the metrics that there are."""
    shown = [each for each in METRICS if any(each[0] in row for row in rows.values())]
    made = [
        f"| | {' | '.join(header for _, header, _ in shown)} |",
        f"|---|{'---:|' * len(shown)}",
    ]
    for name, row in rows.items():
        cells = [_cell(row.get(key), form) for key, _, form in shown]
        made.append(f"| {name} | {' | '.join(cells)} |")
    return made


def _cell(estimate: dict[str, Any] | None, form: str) -> str:
    if not estimate:
        return "–"
    found = Estimate(**estimate)
    if found.low is None or found.high is None:
        return format(found.value, form)
    return f"{found.value:{form}} ({found.low:{form}} to {found.high:{form}})"


if __name__ == "__main__":
    main()
