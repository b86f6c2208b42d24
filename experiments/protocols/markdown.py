"""The tables of README.md here, from results/*/report.json.

python experiments/protocols/markdown.py
"""

import json
from pathlib import Path
from typing import Any

from kvtransfer.evaluation.conditions import CONDITIONS
from kvtransfer.report import Estimate

RESULTS = Path(__file__).parent / "results"
TEXT = (
    ("nll", "NLL", ".3f"),
    ("perplexity", "perplexity", ".2f"),
    ("kl_to_own", "KL to own", ".3f"),
    ("top1_agreement", "top-1", ".0%"),
    ("attention_cosine", "attention cosine", ".3f"),
    ("gap_recovered", "gap recovered", ".0%"),
    ("retention", "retention", ".0%"),
)
SHOWN = ("nll", "kl_to_own", "top1_agreement", "gap_recovered")


def main() -> None:
    """Print one table a report."""
    for path in sorted(RESULTS.glob("*/report.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        print(f"{path.parent.name}\n")
        if "text" in found:
            print(conditions(found["text"]["conditions"], TEXT))
        if "lengths" in found:
            print(lengths(found["lengths"]))
        if "domains" in found:
            for key in ("gap_recovered", "kl_to_own"):
                print(domains(found["domains"], key), end="\n\n")
        print()


def ordered(of: dict[str, Any]) -> list[str]:
    """Conditions in the order of the tables, other mappings last; JSON sorts its keys."""
    first = [name for name in CONDITIONS if name in of]
    return [*first, *(name for name in of if name not in first)]


def conditions(of: dict[str, Any], metrics: tuple[tuple[str, str, str], ...]) -> str:
    """A row a condition."""
    rows = [
        [f"`{name}`", *(cell(of[name][key], form) for key, _, form in metrics)]
        for name in ordered(of)
    ]
    return table(["", *(header for _, header, _ in metrics)], rows)


def lengths(found: dict[str, Any]) -> str:
    """A row a length and condition; a star where the prefix is longer than the calibration's."""
    shown = [each for each in TEXT if each[0] in SHOWN]
    rows = []
    for point in found["points"]:
        for name in ordered(point["conditions"]):
            each = point["conditions"][name]
            if name == "none" and point is not found["points"][0]:
                continue
            star = " *" if point["beyond_calibration"].get(name) else ""
            moved = (point["change"].get(name) or {}).get("gap_recovered")
            rows.append(
                [
                    "–" if name == "none" else f"{point['prefix_tokens']:,}",
                    f"`{name}`{star}",
                    *(cell(each[key], form) for key, _, form in shown),
                    cell(moved, "+.0%"),
                ]
            )
    headers = ["prefix", "", *(header for _, header, _ in shown), "change beyond calibration"]
    return table(headers, rows)


def domains(found: dict[str, Any], key: str) -> str:
    """A row a mapping, a column a text."""
    texts = found["texts"]
    names = [name for name in ordered(next(iter(texts.values()))["conditions"]) if name != "own"]
    form = ".0%" if key == "gap_recovered" else ".3f"
    rows = [
        [f"`{name}`", *(cell(of["conditions"][name][key], form) for of in texts.values())]
        for name in names
    ]
    return table([key, *(f"{text}, n = {of['n']}" for text, of in texts.items())], rows)


def table(headers: list[str], rows: list[list[str]]) -> str:
    """Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (headers, ["---"] * len(headers), *rows))


def cell(estimate: dict[str, Any] | None, form: str) -> str:
    """Value and interval."""
    if not estimate:
        return "–"
    found = Estimate(**estimate)
    if found.low is None or found.high is None:
        return format(found.value, form)
    return f"{found.value:{form}} ({found.low:{form}} to {found.high:{form}})"


if __name__ == "__main__":
    main()
