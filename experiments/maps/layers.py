"""In which layers do mappings lose what they lose? One layer's keys or values are the target's own.

    python experiments/maps/layers.py smollm2-24l smollm2-135m --text prose.txt NAME=FOLDER …

Writes results/layers.json: per mapping, layer and kind, KL to the target's own prefix.
"""

import argparse
import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch

from kvtransfer import KVMapping, load
from kvtransfer.fitting.chunks import chunks
from kvtransfer.fitting.features import KINDS
from kvtransfer.fitting.texts import read_all
from kvtransfer.fitting.transfer import mapped
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.run import prefill, score
from kvtransfer.measures.agreement import kl
from kvtransfer.report import Provenance

HERE = Path(__file__).parent
HIDDEN = 255


def main() -> None:
    """Measure every mapping, layer by layer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("mappings", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--text", required=True)
    parser.add_argument("--items", type=int, default=6)
    parser.add_argument("--dtype")
    asked = parser.parse_args()

    source, target = (load(each, dtype=asked.dtype) for each in (asked.source, asked.target))
    windows = list(
        islice(
            chunks(
                read_all([asked.text]),
                target.encode,
                length=512,
                separator=target.tokenizer.eos_token_id,
                opening=target.opening,
            ),
            asked.items,
        )
    )
    found = {}
    for name, folder in (each.partition("=")[::2] for each in asked.mappings):
        mapping = KVMapping.from_pretrained(folder)
        lost = {"all mapped": 0.0}
        for ids in windows:
            hidden, live = ids[None, :HIDDEN], ids[None, HIDDEN:-1]
            own = prefill(target, hidden)
            made = mapped(mapping, prefill(source, hidden), target, hidden)
            told = score(target, live, own)[0]

            def loss(cache: KVCache, live: torch.Tensor = live, told: torch.Tensor = told) -> float:
                return float(kl(told, score(target, live, cache)[0]).mean()) / len(windows)

            lost["all mapped"] += loss(made)
            for layer in range(len(target.spec.layers)):
                for kind in KINDS:
                    blocks = list(getattr(made, kind))
                    blocks[layer] = getattr(own, kind)[layer]
                    patched = replace(made, **{kind: tuple(blocks)})  # type: ignore[arg-type]
                    key = f"own {kind} of layer {layer}"
                    lost[key] = lost.get(key, 0.0) + loss(patched)
        found[name] = lost
        first, *rest = sorted(lost.items(), key=lambda item: item[1])[:6]
        print(name, f"{lost['all mapped']:.4f}", [first, *rest], flush=True)
    document = {
        "kl_to_own": found,
        "n": len(windows),
        "provenance": Provenance.here(seed=0).to_dict(),
    }
    (HERE / "results" / "layers.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
