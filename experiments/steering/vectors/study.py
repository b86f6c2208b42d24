"""Read a vector off the pairs of a style, sweep it, and sweep the controls that should do nothing.

python experiments/steering/vectors/study.py steps
python experiments/steering/vectors/study.py pirate
"""

import argparse
from pathlib import Path

from rich.console import Console

from kvtransfer import extract, load, sweep
from kvtransfer.hf.quiet import quiet
from kvtransfer.report import Provenance, to_json
from kvtransfer.steering.guard import Matches
from kvtransfer.steering.pairs import read_pairs

HERE = Path(__file__).parent

PROMPTS = (
    "How do I make a cup of tea?",
    "How can I save money?",
    "What should I do to sleep better?",
    "Why is the sky blue?",
    "How does a bicycle stay upright?",
    "What is the capital of France?",
)
"""None of them among the pairs. The last asks for a fact, where steps have no place."""

STRENGTHS = (0, 1, 2, 3, 4, 6, 8, 12)

EFFECTS = {
    "steps": Matches(r"(?m)^\s*\d+[.)]"),
    "pirate": Matches(r"(?i)\b(arr+|aye|ahoy|matey|ye|hearties|treasure|ships?|seas?|pirates?)\b"),
}
"""Written down before any text was swept."""

ARMS = {
    "vector": ("mean", 1.0, 1.0),
    "random, as long in every layer": ("random", 1.0, 1.0),
    "values alone": ("mean", 0.0, 1.0),
    "keys alone": ("mean", 1.0, 0.0),
    "half of the pairs turned round": ("turned", 1.0, 1.0),
}
"""Direction, and the strengths of keys and of values. Random ones should do nothing."""


def main() -> None:
    """Run one style, and write its results as each arm is done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("style", choices=EFFECTS)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--arms", type=int, default=5, help="How many, in the order of ARMS.")
    asked = parser.parse_args()
    quiet()
    console = Console(width=120)
    model = load(asked.model, dtype="float32")
    read = extract(model, read_pairs(asked.style), chat=True)
    console.print(read)
    vector = read.vector
    directions = {
        "mean": vector,
        "random": vector.random(0),
        "turned": read.flipped.as_long_as(vector),
    }
    found = {}
    for name, (direction, keys, values) in list(ARMS.items())[: asked.arms]:
        found[name] = sweep(
            model,
            directions[direction],
            PROMPTS,
            STRENGTHS,
            key_strength=keys,
            value_strength=values,
            chat=True,
            max_new_tokens=asked.max_new_tokens,
            effect=EFFECTS[asked.style],
        )
        console.print(name, found[name])
        document = {
            "extraction": read.to_dict(),
            "arms": {arm: report.to_dict() for arm, report in found.items()},
            "provenance": Provenance.here(seed=0).to_dict(),
        }
        (HERE / "results" / f"{asked.style}.json").write_text(to_json(document), encoding="utf-8")


if __name__ == "__main__":
    main()
