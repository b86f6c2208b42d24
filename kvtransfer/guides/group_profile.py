"""Which layers of a sibling's cache to compute anew: measured once a pair.

Every contiguous group up to a share of the layers is tried on calibration text: how near is what
the target predicts after it to what it predicts after its own cache? The state that enters layer i
makes the keys and values of all groups that begin there, so each first layer is run once.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from rich.console import Group as Lines
from rich.table import Table
from rich.text import Text
from torch import Tensor

from kvtransfer.errors import TextError, require
from kvtransfer.geometry.cache import KVCache
from kvtransfer.guides.reuse import Group, lend
from kvtransfer.hf.group import read_group
from kvtransfer.hf.model import LanguageModel, require_model
from kvtransfer.hf.run import prefill, score
from kvtransfer.measures.agreement import kl
from kvtransfer.measures.intervals import SEED, Column, mean, mean_ratio
from kvtransfer.report import Estimate, Provenance, plain, to_json

SHARE = 1 / 3
SHOWN = 8


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GroupProfile:
    """What recomputing each group is worth. True where the best one is nearer than plain reuse.

    Chosen on these very items: what the best group is worth elsewhere, other text has to say.
    """

    source: str
    target: str
    depth: int
    share: float
    reused: Column
    """KL from the target's own predictions after plain reuse, in nats a token; one an item."""
    groups: dict[Group, Column]
    """The same with a group recomputed."""
    provenance: Provenance

    @property
    def best(self) -> Group:
        """The group with the least KL; of equals, the smallest."""
        return min(self.groups, key=lambda group: (self.groups[group].mean(), len(group)))

    def of_size(self, size: int) -> Group:
        """The best group of so many layers."""
        these = [group for group in self.groups if len(group) == size]
        if not these:
            raise ValueError(f"no group of {size} layers was tried")
        return min(these, key=lambda group: self.groups[group].mean())

    def recovered(self, group: Group) -> Estimate | None:
        """The share of the KL of plain reuse that is gone, paired over items."""
        return mean_ratio(self.reused - self.groups[group], self.reused)

    def __bool__(self) -> bool:
        return bool(self.groups[self.best].mean() < self.reused.mean())

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape that scripts rely on."""
        return {
            "source": self.source,
            "target": self.target,
            "depth": self.depth,
            "share": self.share,
            "best": [self.best.first, self.best.last],
            "reused_kl": mean(self.reused).to_dict(),
            "groups": [
                {
                    "first": group.first,
                    "last": group.last,
                    "kl": mean(column).to_dict(),
                    "recovered": plain(self.recovered(group)),
                }
                for group, column in sorted(self.groups.items())
            ],
            "provenance": self.provenance.to_dict(),
        }

    def to_json(self) -> str:
        """Stable text."""
        return to_json(self.to_dict())

    def __rich__(self) -> Lines:
        table = Table(
            "layers",
            "recomputed",
            "KL to own",
            "recovered",
            title=f"{self.target} on the cache of {self.source}: the best group of each size",
            caption=f"n = {len(self.reused)} items; plain reuse: KL {mean(self.reused):.4f}",
        )
        sizes = sorted({len(group) for group in self.groups}, reverse=True)
        for size in reversed(sizes[:: -(-len(sizes) // SHOWN)]):
            group = self.of_size(size)
            recovered = self.recovered(group)
            table.add_row(
                str(group),
                f"{size} of {self.depth}",
                f"{mean(self.groups[group]):.4f}",
                "–" if recovered is None else f"{recovered:.0%}",
            )
        best = self.recovered(self.best)
        worth = "nothing measurable" if best is None else f"{best.value:.0%}"
        return Lines(
            table,
            Text(
                f"Recomputing layers {self.best} wins back {worth} of what plain reuse loses.",
                style="bold",
            ),
        )


def profile_groups(
    source: LanguageModel,
    target: LanguageModel,
    items: Iterable[Int[Tensor, " t"]],
    *,
    prefix: int,
    share: float = SHARE,
    progress: Callable[[], None] = lambda: None,
) -> GroupProfile:
    """Try every group of layers on calibration text.

    Args:
        source: Reads prefixes.
        target: Its sibling, that goes on from them.
        items: Token ids, of the tokens that both models share.
        prefix: Tokens of each that are read by ``source``; the rest is scored by ``target``.
        share: Of the layers, at most, that a group may take.
        progress: Called after each item.

    Raises:
        TextError: there are no items, or one ends before there is something to score.
        ValueError: no group is that small.
        CacheLayoutError, IncompatibleModels, UnsupportedModel: the two are no siblings, or their
            layers cannot be told apart.
    """
    require_model(source, "source")
    require_model(target, "target")
    require("share", share, Real, "a number", hint="1/3 is a third of the layers")
    depth = len(target.spec.layers)
    size = int(share * depth + 1e-9)
    if not 1 <= size <= depth:
        raise ValueError(f"a share of {share} of {depth} layers is no group")
    reused: list[float] = []
    groups: dict[Group, list[float]] = {}
    for ids in items:
        if len(ids) <= prefix:
            raise TextError(
                f"an item of {len(ids)} tokens, of which {prefix} are the prefix",
                hint="give longer items, or a shorter prefix",
            )
        for group, found in _measured(source, target, ids[None], prefix, size).items():
            if group is None:
                reused.append(found)
            else:
                groups.setdefault(group, []).append(found)
        progress()
    if not reused:
        raise TextError("there is no text to try groups on", hint="give a text with prose in it")
    return GroupProfile(
        source=source.spec.name,
        target=target.spec.name,
        depth=depth,
        share=share,
        reused=np.array(reused),
        groups={group: np.array(column) for group, column in groups.items()},
        provenance=Provenance.here(seed=SEED),
    )


def _measured(
    source: LanguageModel, target: LanguageModel, ids: Int[Tensor, "1 t"], prefix: int, size: int
) -> dict[Group | None, float]:
    """KL to own after plain reuse (None) and after every group, on one item."""
    hidden, live = ids[:, :prefix], ids[:, prefix:]
    depth = len(target.spec.layers)
    own = score(target, live, prefill(target, hidden))[0]
    cache, states = lend(source, target, hidden, layers=range(depth))
    found: dict[Group | None, float] = {None: float(kl(own, score(target, live, cache)[0]).mean())}
    for first in range(depth):
        last = min(first + size, depth) - 1
        made = read_group(target, hidden, states[first], first=first, last=last)
        groups = [Group(first, end) for end in range(first, last + 1)]
        rows = [_with(cache, made[: len(group)], first) for group in groups]
        logits = score(target, live.expand(len(rows), -1), _batched(rows))
        found |= {
            group: float(kl(own, row).mean()) for group, row in zip(groups, logits, strict=True)
        }
    return found


def _with(cache: KVCache, made: list[tuple[Tensor, Tensor]], first: int) -> KVCache:
    """The cache with some layers replaced."""
    blocks = [*cache]
    blocks[first : first + len(made)] = made
    keys, values = zip(*blocks, strict=True)
    return replace(cache, keys=keys, values=values)


def _batched(rows: list[KVCache]) -> KVCache:
    """Caches of the same tokens as one batch."""
    wide = rows[0].expand(len(rows))
    return replace(
        wide,
        keys=tuple(map(torch.cat, zip(*(row.keys for row in rows), strict=True))),
        values=tuple(map(torch.cat, zip(*(row.values for row in rows), strict=True))),
    )
