"""The ways to a prefix, and on from one, whose cost ``bench`` compares.

A way is something to do, and what its time is a share of. To add one, write a function from a case
to its ways, and name it in ``WAYS``; what it raises for a model that cannot do it, is reported.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.prepared import PreparedMapping, Weights
from kvtransfer.fitting.transfer import mapped
from kvtransfer.geometry.cache import KVCache
from kvtransfer.guides.pack import GuidePack
from kvtransfer.guides.recompute import recompute
from kvtransfer.hf.cache import write
from kvtransfer.hf.graft import grafted
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import fill

GUIDE = "guide"
"""Name of the guide in the pack."""

STEPS = 16
"""Tokens that are written after a prefix."""

PREPARED: tuple[Weights, ...] = ("bfloat16", "int8")
"""What maps that lie ready are held in."""

SHARES = (0.05, 0.15, 0.5, 1.0)
"""Of tokens, that are read again."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Case:
    """A prefix of one length, and all that is there before any clock runs."""

    model: LanguageModel
    """Reads the prefix, and reads on."""
    ids: Int[Tensor, "1 t"]
    prefix: KVCache
    """The model's own cache of ``ids``."""
    folder: Path
    """A pack with this one guide."""
    mapping: KVMapping | None
    found: KVCache | None
    """The source's cache of the same tokens, where there is a mapping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """Something to do, and what its time is to be divided by."""

    name: str
    run: Callable[[], object]
    against: str | None = None
    """Name of another way; None for a way that others are divided by."""
    tokens: int = 1
    """That one run makes, where time is of a token."""


def prefill(case: Case) -> Iterator[Way]:
    """The forward pass of the prefix, all layers and no language-model head."""
    positions = torch.arange(case.ids.shape[1])[None]
    yield Way(name="prefill", run=lambda: fill(case.model, case.ids, positions))


def restore(case: Case) -> Iterator[Way]:
    """Open the pack and read its guide, its checksum compared; and copy it into a cache that the
    model reads on from."""

    def read() -> KVCache:
        return GuidePack.from_pretrained(case.folder)[GUIDE].restore(case.model)

    yield Way(name="restore", against="prefill", run=read)
    yield Way(name="restore + graft", against="prefill", run=lambda: write(read()))


def map_across(case: Case) -> Iterator[Way]:
    """Map a cache that the source has in memory, and copy it likewise."""
    mapping, found = case.mapping, case.found
    if mapping is not None and found is not None:
        yield Way(
            name="map + graft",
            against="prefill",
            run=lambda: write(mapped(mapping, found, case.model, case.ids)),
        )


def map_prepared(case: Case) -> Iterator[Way]:
    """The same with maps that lie ready, in fewer bytes; and beside it the floor under any map:
    its bytes, the source's cache and the target's, moved once through memory."""
    if case.mapping is None or case.found is None:
        return
    model, found, ids = case.model, case.found, case.ids
    for weights in PREPARED:
        mapping = PreparedMapping.of(case.mapping, weights, device=model.device)
        map_it = partial(mapped, mapping, found, model, ids)
        yield Way(
            name=f"map in {weights} + graft",
            against="prefill",
            run=lambda map_it=map_it: write(map_it()),  # type: ignore[misc]
        )
        floor = f"move the bytes of {weights}"
        moved = mapping.nbytes + found.nbytes + case.prefix.nbytes
        # A copy reads and writes each byte.
        bytes_ = torch.zeros(moved // 2, dtype=torch.uint8, device=model.device)
        yield Way(name=floor, run=bytes_.clone)
        yield Way(name=f"map in {weights}", against=floor, run=map_it)


def repair(case: Case) -> Iterator[Way]:
    """Read a share of the tokens again in the midst of the others. What the cache holds, and so
    which tokens are chosen, makes no difference to the cost."""
    few = min(8, case.prefix.tokens)
    recompute(case.model, case.ids[:, :few], case.prefix.prefix(few), 0.5)  # or say why not
    for share in SHARES:
        yield Way(
            name=f"recompute {share:.0%}",
            against="prefill",
            run=partial(recompute, case.model, case.ids, case.prefix, share),
        )


def decode(case: Case) -> Iterator[Way]:
    """Write tokens with transformers' ``generate``: on a graft, on the same cache without one, and
    after nothing."""
    model, prefix = case.model, case.prefix
    module: Any = model.module
    live = case.ids[:, -1:].to(model.device)
    mask = torch.cat((prefix.mask, torch.ones_like(live)), dim=1)
    tokens: dict[str, Any] = {
        "do_sample": False,
        "min_new_tokens": STEPS,
        "max_new_tokens": STEPS,
        "pad_token_id": 0,
    }

    def on_graft() -> Any:
        with grafted(model, prefix) as cache:
            return module.generate(live, cache=cache, attention_mask=mask, **tokens)

    def on_cache() -> Any:
        return module.generate(live, cache=write(prefix), attention_mask=mask, **tokens)

    def alone() -> Any:
        return module.generate(live, attention_mask=torch.ones_like(live), **tokens)

    yield Way(name="decode on its own cache", run=on_cache, tokens=STEPS)
    yield Way(name="decode after nothing", run=alone, tokens=STEPS)
    for against in ("decode on its own cache", "decode after nothing"):
        yield Way(name="decode on a graft", run=on_graft, against=against, tokens=STEPS)


WAYS: tuple[Callable[[Case], Iterator[Way]], ...] = (
    prefill,
    restore,
    map_across,
    map_prepared,
    repair,
    decode,
)
"""All of them, in the order of the table."""
