"""Where does a mapped guide lose its facts: in the keys or the values, and at which depth?

    python experiments/pairs/where.py smollm2-24l smollm2-135m smollm2-24l-to-smollm2-135m

Grafts guides in which one part of the mapped cache is replaced by the target's own, and asks the
builtin questions. Writes results/where.json.
"""

import json
import sys
from collections.abc import Callable, Container
from dataclasses import replace
from pathlib import Path

import torch

from kvtransfer import KVCache, KVMapping, load, prefill, read_guides
from kvtransfer.evaluation.conditions import Arm
from kvtransfer.evaluation.evaluate import BUILTIN_GUIDES
from kvtransfer.evaluation.guide_items import ask
from kvtransfer.guides.seam import split
from kvtransfer.measures.intervals import mean

RESULT = Path(__file__).parent / "results" / "where.json"
GUIDES = 8


def with_own(mapped: KVCache, own: KVCache, layers: Container[int]) -> KVCache:
    """The mapped cache with some layers replaced by the target's own."""
    return replace(
        mapped,
        keys=tuple((own if i in layers else mapped).keys[i] for i in range(len(mapped))),
        values=tuple((own if i in layers else mapped).values[i] for i in range(len(mapped))),
    )


def third(n: int) -> Callable[[KVCache, KVCache], KVCache]:
    """Own keys and values in the n-th third of the layers."""
    return lambda mapped, own: with_own(
        mapped, own, range(n * len(mapped) // 3, (n + 1) * len(mapped) // 3)
    )


GRAFTS: dict[str, Callable[[KVCache, KVCache], KVCache]] = {
    "own": lambda mapped, own: own,
    "mapped": lambda mapped, own: mapped,
    "own keys, mapped values": lambda mapped, own: replace(mapped, keys=own.keys),
    "mapped keys, own values": lambda mapped, own: replace(mapped, values=own.values),
    "own in the early third": third(0),
    "own in the middle third": third(1),
    "own in the late third": third(2),
    "own in the six layers that the source lacks": lambda mapped, own: with_own(
        mapped, own, (4, 7, 12, 16, 17, 26)
    ),
    "own in six layers next to those": lambda mapped, own: with_own(
        mapped, own, (5, 8, 11, 15, 18, 25)
    ),
}


def main(source_name: str, target_name: str, mapping_name: str) -> None:
    """Ask every question under every graft."""
    source, target = load(source_name), load(target_name)
    mapping = KVMapping.from_pretrained(mapping_name)
    right: dict[str, list[float]] = {name: [] for name in GRAFTS}
    for guide in read_guides(BUILTIN_GUIDES)[:GUIDES]:
        hidden = split(target.tokenizer, guide.text, guide.items[0].prompt, seam="back-off").hidden
        own = prefill(target, hidden[None])
        mapped = mapping(prefill(source, hidden[None]))
        for name, graft in GRAFTS.items():
            arm = Arm(target, graft(mapped, own))
            right[name] += [
                float(ask(arm, guide.text, len(hidden), item)[0]) for item in guide.items
            ]
    found = {name: mean(torch.tensor(column).double().numpy()) for name, column in right.items()}
    for name, accuracy in found.items():
        print(f"{name:<28} {accuracy:.0%}  n = {accuracy.n}")
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps({k: v.to_dict() for k, v in found.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
