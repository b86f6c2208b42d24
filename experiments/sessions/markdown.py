"""The tables of README.md, from results/report.json.

python experiments/sessions/markdown.py
"""

import json
from pathlib import Path
from typing import Any

ARMS = ("whole", "new", "bound", "none")


def main() -> None:
    """Print them."""
    found = json.loads((Path(__file__).parent / "results" / "report.json").read_text())["turns"]
    print("| turn | reader | " + " | ".join(ARMS) + " | re-prefilled |")
    print("|---" * (len(ARMS) + 3) + "|")
    for row in found["by_turn"]:
        conditions = row["conditions"]
        cells = [said(conditions[arm]["kl_to_own"], ".3f") for arm in ARMS]
        again = f"{conditions['bound']['re_prefilled']['value']:.0%}"
        print(f"| {row['turn']} | {row['reader']} | {' | '.join(cells)} | {again} |")
    for key in ("growth", "over_none", "below_whole", "deviation_tells_kl"):
        print(f"\n{key}")
        for arm, models in found[key].items():
            each = ", ".join(f"{name} {said(value, '.3f')}" for name, value in models.items())
            print(f"- {arm}: {each}")
    print("\nre-prefilled")
    for key, value in found["re_prefilled"].items():
        print(f"- {key}: {said(value, '.3f')}")


def said(estimate: dict[str, Any] | None, form: str) -> str:
    """Value and interval."""
    if estimate is None:
        return "–"
    value, low, high = (estimate[key] for key in ("value", "low", "high"))
    if low is None:
        return format(value, form)
    return f"{value:{form}} ({low:{form}} to {high:{form}})"


if __name__ == "__main__":
    main()
