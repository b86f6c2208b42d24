"""The three runs of the persona battery on SmolLM2, each written to a folder of results.

python experiments/steering/battery/study.py
"""

from pathlib import Path

from kvtransfer import battery, load, read_persona
from kvtransfer.hf.quiet import quiet
from kvtransfer.report import write_report
from kvtransfer.steering.battery_plot import save_plot

RESULTS = Path(__file__).parent / "results"

RUNS = {
    "poet-to-pirate": ("poet", "pirate", 24, 0),
    "poet-to-pirate-150-tokens": ("poet", "pirate", 8, 150),
    "pirate-to-poet": ("pirate", "poet", 16, 0),
}
"""Source, target, samples, and tokens of the long run."""


def main() -> None:
    """Run all three."""
    quiet()
    model = load("smollm2-135m", dtype="float32")
    for name, (source, target, samples, long) in RUNS.items():
        report = battery(
            model, read_persona(source), read_persona(target), samples=samples, persistence=long
        )
        write_report(report, RESULTS / name)
        save_plot(report, RESULTS / name / "plot.png")


if __name__ == "__main__":
    main()
