"""What a fit costs: time by stage, as ratios, and peak memory, by length of text and by band.

    python benchmarks/fit_cost.py smollm2-24l smollm2-135m --tokens 4096 16384 --band -1 4

Each band and length runs in a process of its own, so that its peak memory is its own. Writes
benchmarks/results/fit_cost.json.
"""

import argparse
import json
import resource
import subprocess
import sys
from itertools import product
from pathlib import Path

RESULT = Path(__file__).parent / "results" / "fit_cost.json"


def main() -> None:
    """Measure every length, print the table, and keep the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4_096, 16_384])
    parser.add_argument("--band", type=int, nargs="+", default=[-1], help="-1 for none")
    parser.add_argument("--only", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.only:
        print(json.dumps(measure(asked.source, asked.target, asked.only, *asked.band)))
        return
    rows = []
    for band, tokens in product(asked.band, asked.tokens):
        command = [sys.executable, __file__, asked.source, asked.target]
        command += ["--only", str(tokens), "--band", str(band)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        rows.append(json.loads(done.stdout))
        print(f"{tokens:>8} tokens, band {band}: {rows[-1]}", flush=True)
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(rows, indent=1) + "\n")


def measure(source: str, target: str, tokens: int, band: int) -> dict[str, float | int | str]:
    """One fit, in this process."""
    from kvtransfer import FitSettings, builtin, fit, load

    models = load(source), load(target)
    texts = builtin("fit")
    before = _peak()
    settings = FitSettings(tokens=tokens, band=band if band >= 0 else None)
    report = fit(*models, texts, settings)
    moments = sum(report.moments.values()) / 2**20
    forwards = report.seconds["source_forward"] + report.seconds["target_forward"]
    return {
        "source": source,
        "target": target,
        "rows": report.rows,
        "band": band,
        "peak_mb": round(_peak()),
        "above_models_and_moments_mb": round(_peak() - before - moments),
        "peak_mb_before": round(before),
        "forwards_s": round(forwards, 1),
        "moments_mb": round(moments),
        "statistics_over_forwards": round(report.seconds["statistics"] / forwards, 2),
        "solve_over_forwards": round(report.seconds["solve"] / forwards, 2),
        "commit": str(report.mapping.provenance["commit"]),
    }


def _peak() -> float:
    """Peak resident memory so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
