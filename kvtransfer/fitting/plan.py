"""The maps that are worth trying for a pair: from one capture, the paper's first.

Layers and strengths are chosen by held-out R², which moments give for next to nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvtransfer.fitting.affine import LowRank
from kvtransfer.fitting.capture import Capture
from kvtransfer.fitting.choice import Choice, choose
from kvtransfer.fitting.columns import Columns
from kvtransfer.fitting.features import KINDS, Features, widths
from kvtransfer.fitting.layers import (
    GREEDY_STRENGTH,
    Selection,
    by_score,
    greedy,
    needed_rows,
)
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.storage import Dtype, nbytes
from kvtransfer.geometry.spec import ModelSpec

PAPER: dict[str, Any] = {
    "solver": "ridge",
    "strength": 0.01,
    "scale": "absolute",
    "features": "same",
    "selection": "top",
    "first": 1,
}
"""The recipe of Heo et al. (arXiv:2608.03893), §3."""

PAPER_LAYERS = 8
"""Source layers at which they report their best pair."""

BEFORE = 6
"""Source layers that are offered at the token before."""

FEW, MANY = 4, 8
"""Source layers that a map reads, where the rows suffice."""


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """One map to try: how it is to be fitted, and the layers and strengths that were chosen."""

    name: str
    how: FitSettings
    choices: tuple[Choice, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What to try, in order. Choices are made as they are come to."""

    captured: Capture
    source: ModelSpec
    target: ModelSpec
    settings: FitSettings
    """Chunk, start and seed are taken from here."""
    ranking: Float[Tensor, "target source"]
    """As :func:`kvtransfer.fitting.layers.rank_layers` finds it."""
    nbytes: int | None = None
    """What a map may take at most, which decides one of the ranks that are tried."""
    storage: Dtype = "float32"
    """How maps are stored."""

    def __iter__(self) -> Iterator[Planned]:
        """Every map that the rows suffice for."""
        yield self.paper(PAPER_LAYERS)
        for k in self._usable("same", FEW):
            how = self._how("same", "top", k)
            yield Planned(f"keys from keys, top {k}", how, self._choices(how))
        few, many = (self._usable("both", k) for k in (FEW, MANY))
        if not few:
            return
        (k,) = few
        many = [each for each in many if each > k]
        orders = self._orders((many or few)[0])
        plain = self._how("both", "greedy", k)
        yield Planned(f"both, greedy {k}", plain, self._choices(plain, orders))
        how, best = plain, ""
        if self.captured.before:
            how, best = replace(plain, before=len(self.captured.before)), " and before"
        base = self._choices(how, orders)
        if best:
            yield Planned(f"both{best}, greedy {k}", how, base)
        top = replace(how, selection="top")
        yield Planned(f"both{best}, top {k}", top, self._choices(top))
        for k in many:
            # Strengths are those of the few: within a thousandth of the best at more.
            how = replace(how, layers=k, strength=GREEDY_STRENGTH)
            base = _with_strengths(self._choices(how, orders), base)
            how = replace(how, strength=None)
            yield Planned(f"both{best}, greedy {k}", how, base)
        yield from self._other_solvers(f"both{best}, greedy {k}", how, base)

    def paper(self, k: int) -> Planned:
        """The recipe of Heo et al. at their number of layers, or as many as the rows allow."""
        k = min(k, self._narrowest)
        while k > 1 and needed_rows(self.source, k, "same") > self.captured.fit.rows:
            k -= 1
        how = replace(self.settings, **PAPER, layers=k, start=None, rank=None, gain=1.0, before=0)
        return Planned(f"paper, top {k}", how, self._choices(how))

    def begun(self, planned: Planned, start: int) -> Planned:
        """The same map with the target's own state after ``start`` layers, and those layers exact.

        Layers and strengths are not chosen again.
        """
        how = replace(planned.how, start=start)
        choices = tuple(each for each in planned.choices if each.target > start)
        return Planned(f"start {start}, {planned.name}", how, choices)

    def _other_solvers(
        self, name: str, how: FitSettings, choices: tuple[Choice, ...]
    ) -> Iterator[Planned]:
        """The same layers and strengths, solved otherwise."""
        weighted = self.captured.weighted is not None
        for solver in ("headwise", "procrustes", *(("attention",) if weighted else ())):
            yield Planned(f"{solver}, {name}", replace(how, solver=solver), choices)
        most = min(min(widths(self.target, kind)) for kind in KINDS)
        ranks = {self._rank_of_a_quarter(choices)}
        if self.nbytes is not None:
            ranks.add(self._rank_within(self.nbytes, choices))
        for rank in sorted(rank for rank in ranks if 0 < rank < most):
            for solver in ("lowrank", *(("attention",) if weighted else ())):
                yield Planned(
                    f"{solver} of rank {rank}, {name}",
                    replace(how, solver=solver, rank=rank),
                    choices,
                )

    def _usable(self, features: Features, k: int) -> list[int]:
        """``k`` or as many as there are, where the rows suffice."""
        k = min(k, self._narrowest)
        state = 0 if self.settings.start is None else self.captured.state_width
        needed = needed_rows(self.source, k, features, state=state)
        return [k] if needed <= self.captured.fit.rows else []

    @property
    def _narrowest(self) -> int:
        """Source layers that every target layer may be read from so many of."""
        first = 0 if self.settings.start is None else self.settings.start + 1
        return self.captured.limits(self.source, self.target).narrowest(first)

    def _how(self, features: Features, selection: Selection, k: int) -> FitSettings:
        return replace(
            self.settings,
            solver="ridge",
            features=features,
            selection=selection,
            layers=k,
            strength=None,
            scale="relative",
            rank=None,
            gain=1.0,
        )

    def _orders(self, k: int) -> list[list[int]]:
        """For every target layer, forward selection of the first layers, and then up to k of
        those that explain most alone: what a layer adds to several others is hardly apart from
        what the next one would.
        """
        columns = Columns.of(self.captured, self.source, self.target)
        orders = []
        for t in range(len(self.target.layers)):
            alone = by_score(self.ranking, t)
            chosen = greedy(self.captured, columns, t, alone, min(k, FEW))
            orders.append([*chosen, *(s for s in alone if s not in chosen)][:k])
        return orders

    def _choices(
        self, how: FitSettings, orders: Sequence[Sequence[int]] | None = None
    ) -> tuple[Choice, ...]:
        return tuple(
            choose(
                self.captured,
                self.source,
                self.target,
                how,
                ranking=self.ranking,
                orders=orders,
            )
        )

    def _rank_of_a_quarter(self, choices: Sequence[Choice]) -> int:
        """The rank at which maps of these layers have a quarter of their numbers."""
        p = max(self._read(choice) for choice in choices)
        q = min(min(widths(self.target, kind)) for kind in KINDS)
        return p * q // (4 * (p + q))

    def _read(self, choice: Choice) -> int:
        """Features of keys and values that a map of this choice reads."""
        state = 0 if self.settings.start is None else self.captured.state_width
        layers = (*choice.sources, *choice.before)
        return state + sum(widths(self.source, each)[s] for s in layers for each in KINDS)

    def _rank_within(self, size: int, choices: Sequence[Choice]) -> int:
        """The largest rank at which low-rank maps of these layers take at most ``size`` bytes."""

        def taken(rank: int) -> int:
            total = 0
            for choice in choices:
                for kind in KINDS:
                    p, q = self._read(choice), widths(self.target, kind)[choice.target]
                    low = LowRank(torch.ones(p, rank), torch.ones(rank, q), torch.ones(q))
                    total += nbytes(low, self.storage)
            return total

        per_rank = taken(2) - taken(1)
        return (size - taken(1)) // per_rank + 1


def _with_strengths(layers: Sequence[Choice], strengths: Sequence[Choice]) -> tuple[Choice, ...]:
    """The choices of layers of one, and the strengths of the other."""
    return tuple(
        replace(one, strength_keys=other.strength_keys, strength_values=other.strength_values)
        for one, other in zip(layers, strengths, strict=True)
    )
