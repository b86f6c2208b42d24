"""What a fit costs: time by stage, as ratios, and peak memory at two lengths of text.

    python benchmarks/fit_cost.py smollm2-24l smollm2-135m --tokens 4096 16384

Each length runs in a process of its own, so that its peak memory is its own. Writes
benchmarks/results/fit_cost.json.
"""

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "fit_cost.json"


def main() -> None:
    """Measure every length, print the table, and keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4_096, 16_384])
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.only:
        print(json.dumps(measure(asked.source, asked.target, asked.only)))
        return
    rows = []
    for tokens in asked.tokens:
        command = [sys.executable, __file__, asked.source, asked.target, "--only", str(tokens)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(done.stdout))
        print(f"{tokens:>8} tokens: {rows[-1]}")
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(rows, indent=1) + "\n")


def measure(source: str, target: str, tokens: int) -> dict[str, float | int | str]:
    """One fit, in this process."""
    from kvtransfer import FitSettings, builtin, fit, load

    models = load(source), load(target)
    before = _peak()
    report = fit(*models, builtin("fit"), FitSettings(tokens=tokens))
    forwards = report.seconds["source_forward"] + report.seconds["target_forward"]
    return {
        "source": source,
        "target": target,
        "rows": report.rows,
        "peak_mb": round(_peak()),
        "peak_mb_before": round(before),
        "forwards_s": round(forwards, 1),
        "statistics_over_forwards": round(report.seconds["statistics"] / forwards, 2),
        "solve_over_forwards": round(report.seconds["solve"] / forwards, 2),
        "commit": str(report.mapping.provenance["commit"]),
    }


def _peak() -> float:
    """Peak resident memory so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
