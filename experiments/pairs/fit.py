"""Fit a zoo pair's mapping from one capture, whole and reduced; the reduced one ships.

    python experiments/pairs/fit.py tiny --tokens 131072 --rank 16
    python experiments/pairs/fit.py smollm2 --data builtin prose.jsonl facts.jsonl --tokens 98304 \
        --chunk 256 --rank 64 --dtype bfloat16 --full out/full

Quality is then measured with ``kvtransfer eval``, on text of another kind: see README.md here.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from kvtransfer import load
from kvtransfer.fitting.fit import FitSettings, capture_texts, fit_captured
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
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--rank", type=int, required=True, help="of the mapping that ships")
    parser.add_argument("--layers", default="auto")
    parser.add_argument("--dtype", help="that the models run in while they are captured")
    parser.add_argument("--full", type=Path, help="folder for the mapping of full rank")
    asked = parser.parse_args()

    names = PAIRS[asked.pair][:: -1 if asked.reverse else 1]
    name = "-to-".join(names)
    source, target = (load(each, dtype=asked.dtype) for each in names)
    settings = FitSettings(
        tokens=asked.tokens,
        chunk=asked.chunk,
        batch=8,
        layers=int(asked.layers) if asked.layers.isdigit() else asked.layers,
        products="float32",
    )
    captured = capture_texts(source, target, read_all(asked.data), settings)
    print({stage: round(seconds) for stage, seconds in captured.seconds.items()}, flush=True)
    full = fit_captured(captured, source, target, settings)
    if asked.full:
        full.mapping.save_pretrained(asked.full)
    reduced = fit_captured(
        captured, source, target, replace(settings, rank=asked.rank), choices=full.layers
    )
    reduced.mapping.save_pretrained(MAPPINGS / name, dtype="int8")
    results = {"full": full.to_dict(), "shipped": reduced.to_dict(folder=MAPPINGS / name)}
    results["shipped"]["mapping"] = f"mappings/{name}"
    path = HERE / "results" / f"{name}.fit.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"R² keys {full.r2_keys:.3f} values {full.r2_values:.3f}, reduced {reduced.r2_keys:.3f}")


if __name__ == "__main__":
    main()
