"""What the calibration text costs: the same map from several texts and numbers of rows.

    python experiments/maps/data.py smollm2 --text prose.txt --tokens 8192 32768 \
        --data builtin self:40000 more-prose.txt --dtype bfloat16

Writes results/PAIR.data.json.
"""

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvtransfer import FitSettings, evaluate, fit, load
from kvtransfer.fitting.selftext import read_all_with
from kvtransfer.fitting.texts import builtin, read_all
from kvtransfer.zoo import PAIRS

HERE = Path(__file__).parent
LAYERS = 4


def main() -> None:
    """Fit every text at every size, and measure all on the same items."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pair", choices=sorted(PAIRS))
    parser.add_argument("--text", required=True, help="held out; 'heldout' is builtin's")
    parser.add_argument("--data", nargs="+", default=["builtin"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[8_192, 32_768])
    parser.add_argument("--items", type=int, default=24)
    parser.add_argument("--dtype")
    asked = parser.parse_args()

    names = PAIRS[asked.pair]
    source, target = (load(each, dtype=asked.dtype) for each in names)
    fitted, r2 = {}, {}
    for data in asked.data:
        texts = list(read_all_with([data], target))
        for tokens in asked.tokens:
            settings = FitSettings(
                tokens=tokens, chunk=256, batch=8, layers=LAYERS, products="float32"
            )
            report = fit(source, target, texts, settings)
            name = f"{Path(data).name}, {report.rows:,} rows"
            fitted[name], r2[name] = report.mapping, (report.r2_keys, report.r2_values)
            print(name, r2[name], flush=True)
    first = next(iter(fitted))
    found = evaluate(
        source,
        target,
        fitted[first],
        rivals={name: each for name, each in fitted.items() if name != first},
        texts=builtin("heldout") if asked.text == "heldout" else read_all([asked.text]),
        conditions=("mapped",),
        items=asked.items,
    ).text
    assert found is not None
    table = Table("calibration", "R² K, V", "NLL", "KL to own", "gap recovered")
    rows = []
    for name, scores in r2.items():
        measured = found.estimates("mapped" if name == first else name)
        table.add_row(
            name,
            ", ".join(f"{each:.3f}" for each in scores),
            *(f"{measured[key]:.3f}" for key in ("nll", "kl_to_own", "gap_recovered")),
        )
        rows.append(
            {"name": name, "r2": scores}
            | {key: None if each is None else each.to_dict() for key, each in measured.items()}
        )
    Console(width=120).print(table)
    path = HERE / "results" / f"{'-to-'.join(names)}.data.json"
    path.write_text(json.dumps({"n": found.n, "text": asked.text, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
