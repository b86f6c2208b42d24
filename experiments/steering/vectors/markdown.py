"""Print the tables and texts of the README from results/*.json.

python experiments/steering/vectors/markdown.py steps
"""

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def main(style: str) -> None:
    """Of one style: an arm a row, and the texts of the first."""
    arms = json.loads((HERE / "results" / f"{style}.json").read_text(encoding="utf-8"))["arms"]
    strengths = [each["strength"] for each in arms["vector"]["strengths"]]
    print("| |", " | ".join(f"{strength:g}" for strength in strengths), "|")
    print("|---|" + "---:|" * len(strengths))
    for name in sorted(arms, key=lambda name: (name != "vector", name)):
        print(f"| {name} |", " | ".join(map(_cell, arms[name]["strengths"])), "|")
    for each in arms["vector"]["strengths"]:
        for prompt, answer in zip(arms["vector"]["prompts"], each["answers"], strict=True):
            print(f"{each['strength']:g} {prompt!r} {answer['broken'] or ''}: {answer['text']!r}")


def _cell(each: dict[str, Any]) -> str:
    effect, nll = each["effect"]["value"], each["nll"]["value"]
    found = f"{effect:.1f}, {nll:.1f}, {each['broken']:.0%}"
    return f"**{found}**" if each["useful"] else found


if __name__ == "__main__":
    main(sys.argv[1])
