"""Fit a zoo pair's mapping at several numbers of source layers from one capture; one of them ships.

    python experiments/pairs/fit.py tiny --tokens 131072 --layers 4 --ship 4
    python experiments/pairs/fit.py smollm2 --data builtin spaced:builtin prose.jsonl facts.jsonl \
        --tokens 65536 --features both --select greedy --before 6 --layers 4 --ship 4 \
        --refine 400 --dtype bfloat16

Quality is then measured with ``kvtransfer eval``, on text of another kind: see README.md here.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from kvtransfer import KVMapping, load
from kvtransfer.fitting.fit import capture_texts
from kvtransfer.fitting.refine import refine
from kvtransfer.fitting.refine_settings import RefineSettings
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.solve import fit_captured
from kvtransfer.fitting.texts import read_all
from kvtransfer.zoo import PAIRS

HERE = Path(__file__).parent
MAPPINGS = HERE.parent.parent / "mappings"


def main() -> None:
    """Fit one pair in one direction."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pair", choices=sorted(PAIRS))
    parser.add_argument("--reverse", action="store_true", help="from the larger to the smaller")
    parser.add_argument("--data", nargs="+", default=["builtin"])
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--layers", nargs="+", default=["auto"])
    parser.add_argument("--features", choices=["same", "both"], default="same")
    parser.add_argument("--select", choices=["top", "greedy"], default="top")
    parser.add_argument("--before", type=int, default=0)
    parser.add_argument("--refine", type=int, default=0, help="windows of the data, if it ships")
    parser.add_argument("--ship", help="which of --layers goes to mappings/, in int8")
    parser.add_argument("--dtype", help="that the models run in while they are captured")
    asked = parser.parse_args()

    names = PAIRS[asked.pair][:: -1 if asked.reverse else 1]
    name = "-to-".join(names)
    source, target = (load(each, dtype=asked.dtype) for each in names)
    settings = FitSettings(
        tokens=asked.tokens,
        chunk=asked.chunk,
        features=asked.features,
        selection=asked.select,
        before=asked.before,
        batch=8,
    )
    texts = list(read_all(asked.data))
    captured = capture_texts(source, target, texts, settings)
    results = {}
    for layers in asked.layers:
        chosen = int(layers) if layers.isdigit() else layers
        report = fit_captured(captured, source, target, replace(settings, layers=chosen))
        folder = MAPPINGS / name if layers == asked.ship else Path(f"{name}-{layers}")
        report.mapping.save_pretrained(folder, dtype="int8" if layers == asked.ship else "float32")
        if asked.refine and layers == asked.ship:
            # From what was stored, so that what is judged is what ships but for one rounding.
            stored = KVMapping.from_pretrained(folder)
            steps = RefineSettings(windows=asked.refine, heldout=6, every=40)
            found = refine(stored, source, target, texts, steps)
            found.mapping.save_pretrained(folder, dtype="int8")
            report = report.refined_by(found)
        results[layers] = report.to_dict(folder=folder) | {"mapping": folder.name}
        print(layers, f"R² keys {report.r2_keys:.3f} values {report.r2_values:.3f}", flush=True)
    path = HERE / "results" / f"{name}.fit.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
