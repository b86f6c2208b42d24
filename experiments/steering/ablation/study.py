"""Ablate the builtin guides under SmolLM2 in all layers and in each third, and print the tables.

python experiments/steering/ablation/study.py          runs, and writes results/*.json
python experiments/steering/ablation/study.py --tables prints what the README shows of them
"""

import argparse
import json
from pathlib import Path
from typing import Any

from kvtransfer import ablate, load, read_guides
from kvtransfer.evaluation.ablation import ABLATIONS
from kvtransfer.evaluation.evaluate import BUILTIN_GUIDES
from kvtransfer.hf.quiet import quiet

RESULTS = Path(__file__).parent / "results"
LAYERS = ("all", "early", "mid", "late")
GUIDES = 4
ROWS = (*ABLATIONS, "none")


def main() -> None:
    """Run, or print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", action="store_true")
    if not parser.parse_args().tables:
        run()
    tables()


def run() -> None:
    """A report for each choice of layers."""
    quiet()
    model = load("smollm2-135m", dtype="float32")
    for layers in LAYERS:
        report = ablate(model, read_guides(BUILTIN_GUIDES)[:GUIDES], layers=layers)
        (RESULTS / f"{layers}.json").write_text(report.to_json() + "\n", encoding="utf-8")


def tables() -> None:
    """In Markdown."""
    found = {
        layers: json.loads((RESULTS / f"{layers}.json").read_text(encoding="utf-8"))["conditions"]
        for layers in LAYERS
    }
    print("| the guide | NLL of the answer | KL to intact | softmax on the guide | right |")
    print("|---|---|---|---|---|")
    for row in ROWS:
        cells = (_of(found["all"][row], metric) for metric in ("nll", "kl", "mass", "accuracy"))
        print(f"| {row} | {' | '.join(cells)} |")
    print("\n| the guide | early | mid | late |\n|---|---|---|---|")
    for row in ROWS:
        thirds = (found[layers][row] for layers in LAYERS[1:])
        print(f"| {row} | {' | '.join(map(_third, thirds))} |")


def _of(row: dict[str, Any], metric: str) -> str:
    each = row[metric]
    return f"{each['value']:.2f} ({each['low']:.2f} to {each['high']:.2f})"


def _third(row: dict[str, Any]) -> str:
    mass, right = row["mass"]["value"], row["accuracy"]["value"]
    return f"{row['nll']['value']:.2f} ({mass:.0%}, {right:.0%})"


if __name__ == "__main__":
    main()
