"""A fine-tuned sibling's cache used by its base: raw, with tokens or a group of layers read anew.

    python -m experiments.recompute.sibling --sibling telegram-gentle

The siblings are those of experiments/siblings. The group is profiled on documentation and made-up
facts (the fit split), and judged on others (heldout). Two arms tell why a group brings what it
brings: "exact" has the base's own keys and values in the group, as if the state that enters it were
right; "projections" makes every layer's anew from the state that entered that layer in the sibling.
And two do what DroidSpeak does not: the sibling's cache is taken through a map that was fitted on
the fit split, whole, or after the base has run its first third of layers. Writes results/NAME.json.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from random import Random

import torch
from jaxtyping import Int
from rich.console import Console
from torch import Tensor

from experiments.recompute.curve import Curve, save, show
from experiments.siblings import facts
from experiments.siblings.openings import START
from experiments.siblings.taught import NAMES, taught
from kvtransfer import KVCache, LanguageModel, builtin, load, prefill, score
from kvtransfer.fitting.fit import capture_texts
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.solve import fit_captured
from kvtransfer.fitting.transfer import transfer
from kvtransfer.guides.group_profile import GroupProfile, profile_groups
from kvtransfer.guides.recompute import recompute
from kvtransfer.guides.reuse import Group, lend, recompute_group
from kvtransfer.measures.agreement import kl, nll

SIZES = (1, 3, 5, 8, 10)
"""Layers of the groups that are judged; the model has 30."""
SHARES = (0.15, 0.33)
STEP = 3
"""Layers between the groups that are tried with exact keys and values."""
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


def fitted_on() -> Iterator[str]:
    """What maps are fitted on: whole documents of the kinds that are judged, in turn."""
    made_up = facts.documents(SEED)
    for text in builtin("fit"):
        yield START + text
        yield START + next(made_up)


def maps(source: LanguageModel, target: LanguageModel, tokens: int) -> dict[str, KVMapping]:
    """From the sibling's cache to the model's, alone and after a third of the model's layers."""
    start = len(target.spec.layers) // 3
    with_start = FitSettings(tokens=tokens, layers=2, chunk=128, start=start)
    captured = capture_texts(source, target, fitted_on(), with_start)
    return {
        name: fit_captured(captured, source, target, settings, control=False).mapping
        for name, settings in (
            ("mapped", replace(with_start, start=None)),
            (f"first {start} layers, others mapped", with_start),
        )
    }


def arms(
    source: LanguageModel,
    target: LanguageModel,
    hidden: Tensor,
    found: GroupProfile,
    mappings: dict[str, KVMapping],
) -> dict[str, KVCache]:
    """The same prefix, made in every way."""
    groups = [found.of_size(size) for size in SIZES if size <= found.share * found.depth + 1e-9]
    largest = groups[-1]
    random = Random(SEED).randrange(found.depth - len(largest))
    control = Group(random, random + len(largest) - 1)
    own = prefill(target, hidden)
    raw, states = lend(source, target, hidden, layers=range(found.depth))

    def anew(group: Group, cache: KVCache = raw) -> KVCache:
        return recompute_group(target, hidden, cache, states[group.first], group)

    projected = raw
    for layer in range(found.depth):
        projected = anew(Group(layer, layer), projected)
    return {
        "own": own,
        "raw": raw,
        **{f"best {len(group)} layers": anew(group) for group in groups},
        f"some {len(control)} layers": anew(control),
        f"best {len(largest)} layers, exact": exact(raw, own, largest),
        "projections": projected,
        f"projections, best {len(largest)} layers": anew(largest, projected),
        **{f"{share:.0%} of tokens": recompute(target, hidden, raw, share) for share in SHARES},
        **{name: transfer(each, source, target, hidden) for name, each in mappings.items()},
    }


def exact(raw: KVCache, own: KVCache, group: Group) -> KVCache:
    """A sibling's cache with the model's own keys and values in a group of layers."""
    first, after = group.first, group.last + 1
    return replace(
        raw,
        keys=(*raw.keys[:first], *own.keys[first:after], *raw.keys[after:]),
        values=(*raw.values[:first], *own.values[first:after], *raw.values[after:]),
    )


def judged(
    target: LanguageModel, live: Int[Tensor, "1 s"], made: dict[str, KVCache]
) -> dict[str, dict[str, float]]:
    """NLL of what follows, and KL from the predictions after the model's own cache."""
    logits = {name: score(target, live, cache)[0] for name, cache in made.items()}
    logits["none"] = score(target, live)[0]
    return {
        name: {
            "nll": float(nll(row[:-1], live[0, 1:]).mean()),
            "kl_to_own": float(kl(logits["own"], row).mean()),
        }
        for name, row in logits.items()
    }


def main() -> None:
    """Profile, judge, and write both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sibling", choices=NAMES, default=NAMES[0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--calibration", type=int, default=4, help="items to profile on")
    parser.add_argument("--items", type=int, default=24, help="items to judge on")
    parser.add_argument("--tokens", type=int, default=10_000, help="to fit the maps on")
    parser.add_argument("--prefix", type=int, default=96)
    parser.add_argument("--live", type=int, default=32)
    asked = parser.parse_args()
    source, target = taught(asked.sibling, asked.dtype), load("smollm2-135m", dtype=asked.dtype)
    length = asked.prefix + asked.live
    found = profile_groups(
        source,
        target,
        islice(items(target, "fit", length), asked.calibration),
        prefix=asked.prefix,
        progress=lambda: print("profiled an item", flush=True),
    )
    Console(width=120).print(found)
    settings = {
        "source": source.spec.name,
        "target": target.spec.name,
        "dtype": asked.dtype,
        "prefix": asked.prefix,
        "live": asked.live,
        "map_tokens": asked.tokens,
        "profile": found.to_dict(),
    }
    mappings = maps(source, target, asked.tokens)
    size = int(found.share * found.depth + 1e-9)
    tried = [Group(first, first + size - 1) for first in range(0, found.depth - size + 1, STEP)]
    curve, ceiling = Curve(worst="raw"), Curve(worst="raw")
    for ids in islice(items(target, "heldout", length), asked.items):
        hidden, live = ids[None, : asked.prefix], ids[None, asked.prefix :]
        made = arms(source, target, hidden, found, mappings)
        curve.add(judged(target, live, made))
        own, raw = made["own"], made["raw"]
        every = {str(group): exact(raw, own, group) for group in tried}
        ceiling.add(judged(target, live, {"own": own, "raw": raw, **every}))
        settings["exact_groups"] = ceiling.to_dict()
        save(Path(f"{asked.sibling}.json"), curve, settings)
        print(len(curve.items["own"]["nll"]), flush=True)
    show(curve)
    show(ceiling)


if __name__ == "__main__":
    with torch.no_grad():
        main()
