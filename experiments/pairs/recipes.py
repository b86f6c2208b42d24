"""Several mappings of one pair on the same text and the same questions, side by side.

    python experiments/pairs/recipes.py smollm2-24l smollm2-135m --text wikitext2-valid.txt \
        ships=smollm2-24l-to-smollm2-135m closed=FOLDER …

The first is measured as ``mapped``, the others as its rivals, so that all are paired.
"""

import argparse
import json
from pathlib import Path

from rich.console import Console

from kvtransfer import KVMapping, evaluate, load, read_guides
from kvtransfer.evaluation.evaluate import BUILTIN_GUIDES
from kvtransfer.fitting.texts import read_all

HERE = Path(__file__).parent


def main() -> None:
    """Measure the mappings that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("mappings", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--text", required=True)
    parser.add_argument("--items", type=int, default=24)
    parser.add_argument("--guides", type=int, default=10)
    asked = parser.parse_args()

    named = [each.partition("=")[::2] for each in asked.mappings]
    fitted = {name: KVMapping.from_pretrained(folder) for name, folder in named}
    first = named[0][0]
    report = evaluate(
        load(asked.source),
        load(asked.target),
        fitted.pop(first),
        rivals=fitted,
        texts=read_all([asked.text]),
        guides=read_guides(BUILTIN_GUIDES)[: asked.guides],
        conditions=("mapped",),
        items=asked.items,
    )
    Console().print(report)
    found = report.to_dict()
    for part in ("text", "guides"):
        found[part]["conditions"][first] = found[part]["conditions"].pop("mapped")
        found[part].pop("examples", None)
    path = HERE / "results" / "recipes.json"
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
