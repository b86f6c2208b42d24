"""The tables of README.md here, from results/*.json.

python experiments/maps/markdown.py smollm2-24l-to-smollm2-135m
"""

import json
import sys
from pathlib import Path
from typing import Any

from kvtransfer.report import Estimate

RESULTS = Path(__file__).parent / "results"


def main(names: list[str]) -> None:
    """Print one table a pair."""
    for name in names or sorted(path.stem for path in RESULTS.glob("*-to-*.json")):
        found = json.loads((RESULTS / f"{name}.json").read_text())
        if "baselines" in found:
            print("\n".join(lines(name, found)), end="\n\n")


def lines(name: str, found: dict[str, Any]) -> list[str]:
    """One pair's table, and what stands under it."""
    base = {key: Estimate(**each["nll"]) for key, each in found["baselines"].items()}
    said = ", ".join(
        f"`{key}` {each.value:.3f} ({each.low:.3f} to {each.high:.3f})"
        for key, each in base.items()
    )
    data = " and ".join(f"`{each}`" for each in found["calibration"]["data"])
    rows = [
        f"## {name.replace('-to-', ' → ')}",
        "",
        f"{found['calibration']['rows']:,} rows of {data}; n = {found['n']}. NLL: {said}.",
        "",
        "| map | MB | µs a token | R² keys, values | attention error | NLL | KL to own "
        "| gap recovered | of what the paper leaves |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        r2 = "–" if row["r2"] is None else ", ".join(f"{each:.3f}" for each in row["r2"])
        cells = (
            row["name"],
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['apply_microseconds_a_token']:.0f}",
            r2,
            f"{row['heldout_attention_error']:.3f}",
            f"{row['nll']['value']:.3f}",
            f"{row['kl_to_own']['value']:.4f}",
            _share(row["gap_recovered"]),
            _share(row["of_what_the_paper_leaves"]),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def _share(estimate: dict[str, Any] | None) -> str:
    if not estimate:
        return "–"
    found = Estimate(**estimate)
    if found.low is None or found.high is None:
        return f"{found.value:.0%}"
    return f"{found.value:.0%} ({found.low:.0%} to {found.high:.0%})"


if __name__ == "__main__":
    main(sys.argv[1:])
