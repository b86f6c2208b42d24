"""A fine-tuned sibling's cache used by its base: raw, with tokens, or with a group of layers anew.

    python -m experiments.recompute.sibling --dtype bfloat16

The sibling is experiments/siblings/telegram. The group is profiled on documentation and made-up
facts (the fit split), and judged on others (heldout). Writes results/sibling.json.
"""

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import torch
from jaxtyping import Int
from rich.console import Console
from torch import Tensor

from experiments.recompute.curve import Curve, write
from experiments.siblings import facts
from experiments.siblings.openings import START
from experiments.siblings.taught import taught
from kvtransfer import KVCache, LanguageModel, builtin, load, prefill, score
from kvtransfer.guides.group_profile import GroupProfile, profile_groups
from kvtransfer.guides.recompute import recompute
from kvtransfer.guides.reuse import Group, lend, recompute_group
from kvtransfer.measures.agreement import kl, nll

SIZES = (1, 3, 5, 8, 10)
"""Layers of the groups that are judged; the model has 30."""
SHARES = (0.15, 0.33)
SEED = 11


def items(model: LanguageModel, split: str, length: int) -> Iterator[Int[Tensor, " t"]]:
    """Documentation and paragraphs of made-up facts with their questions, in turn."""
    documents = (text for text in builtin(split) if len(text) > 6 * length)
    made_up = facts.documents(SEED if split == "fit" else SEED + 1)
    for text in documents:
        if len(ids := model.encode(START + text)) >= length:
            yield ids[:length]
        while len(ids := model.encode(START + next(made_up))) < length:
            pass
        yield ids[:length]


def arms(
    source: LanguageModel, target: LanguageModel, hidden: Tensor, found: GroupProfile
) -> dict[str, KVCache]:
    """The same prefix, made in every way."""
    groups = [found.of_size(size) for size in SIZES if size <= found.share * found.depth + 1e-9]
    random = Random(SEED).randrange(found.depth - len(groups[-1]))
    control = Group(random, random + len(groups[-1]) - 1)
    every = sorted({group.first for group in (*groups, control)})
    raw, states = lend(source, target, hidden, layers=every)

    def anew(group: Group) -> KVCache:
        return recompute_group(target, hidden, raw, states[group.first], group)

    return {
        "own": prefill(target, hidden),
        "raw": raw,
        **{f"best {len(group)} layers": anew(group) for group in groups},
        f"some {len(control)} layers": anew(control),
        **{f"{share:.0%} of tokens": recompute(target, hidden, raw, share) for share in SHARES},
    }


def main() -> None:
    """Profile, judge, and write both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--calibration", type=int, default=4, help="items to profile on")
    parser.add_argument("--items", type=int, default=24, help="items to judge on")
    parser.add_argument("--prefix", type=int, default=96)
    parser.add_argument("--live", type=int, default=32)
    asked = parser.parse_args()
    source, target = taught(asked.dtype), load("smollm2-135m", dtype=asked.dtype)
    length = asked.prefix + asked.live
    found = profile_groups(
        source,
        target,
        islice(items(target, "fit", length), asked.calibration),
        prefix=asked.prefix,
        progress=lambda: print("profiled an item", flush=True),
    )
    Console(width=120).print(found)
    curve = Curve(worst="raw")
    for ids in islice(items(target, "heldout", length), asked.items):
        hidden, live = ids[None, : asked.prefix], ids[None, asked.prefix :]
        made = arms(source, target, hidden, found)
        logits = {name: score(target, live, cache)[0] for name, cache in made.items()}
        logits["none"] = score(target, live)[0]
        curve.add(
            {
                name: {
                    "nll": float(nll(row[:-1], live[0, 1:]).mean()),
                    "kl_to_own": float(kl(logits["own"], row).mean()),
                }
                for name, row in logits.items()
            }
        )
        print(len(curve.items["own"]["nll"]), flush=True)
    write(
        Path("sibling.json"),
        curve,
        {
            "source": "smollm2-telegram",
            "target": "smollm2-135m",
            "dtype": asked.dtype,
            "prefix": asked.prefix,
            "live": asked.live,
            "profile": found.to_dict(),
        },
    )


if __name__ == "__main__":
    with torch.no_grad():
        main()
