"""Where each layer's features stand in the moments of a pair, and the problem of one map."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvtransfer.fitting.affine import Linear, r2
from kvtransfer.fitting.capture import Capture, First
from kvtransfer.fitting.features import (
    GROUPS,
    Features,
    Kind,
    before_size,
    read_by,
    size,
    widths,
)
from kvtransfer.fitting.moments import Moments
from kvtransfer.fitting.pairs import PairMoments
from kvtransfer.geometry.spec import ModelSpec

EVERY_HEAD = -1
"""The head of a column that is no head's own: each may read it."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Heads:
    """How the columns of a problem fall into heads."""

    target: int
    """Heads of the target layer; its columns fall into as many equal parts."""
    source: Int[Tensor, " p"]
    """The source head of each column, or EVERY_HEAD."""
    count: Int[Tensor, " p"]
    """How many heads the source layer of each column has."""
    sees: Float[Tensor, "h d d"] | None = None
    """How much an error along each direction of each target head matters; None for alike."""


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Where each layer's features stand in the moments of a pair."""

    source: ModelSpec
    target: ModelSpec
    features: Features = "same"
    """What maps are to read."""
    gathered: Features = "same"
    """What the moments hold; where they hold both, ``same`` is a choice of columns."""
    offered: tuple[int, ...] = ()
    """Source layers whose features of the token before the moments hold too."""
    starts: tuple[int, ...] = ()
    state_width: int = 0
    start: int | None = None
    """Which of ``starts`` maps are to read; None for none."""

    @classmethod
    def of(
        cls,
        capture: Capture,
        source: ModelSpec,
        target: ModelSpec,
        *,
        features: Features | None = None,
        start: int | None = None,
    ) -> "Columns":
        """The columns of what was captured, to be read as asked.

        Raises:
            ValueError: that was not captured.
        """
        wanted = capture.features if features is None else features
        if wanted == "both" and capture.features == "same":
            raise ValueError("features 'both' asked of a capture of 'same'")
        if start is not None and start not in capture.starts:
            raise ValueError(f"a start of {start} asked of a capture of starts {capture.starts}")
        return cls(
            source,
            target,
            wanted,
            capture.features,
            capture.before,
            capture.starts,
            capture.state_width,
            start,
        )

    def reads(
        self, kind: Kind, sources: Sequence[int], before: Sequence[int] = ()
    ) -> Int[Tensor, " p"]:
        """Source features of some layers, in the order given, from which ``kind`` is read.

        Those of the token before come after them, and the state at the start last.
        """
        kinds = read_by(self.features, kind)
        parts = [self.reads_of(each, s) for s in sources for each in kinds]
        parts += [self.before_of(each, s) for s in before for each in kinds]
        return torch.cat([*parts, *self._state(kind)])

    def reads_of(self, kind: Kind, layer: int) -> Int[Tensor, " p"]:
        """Features of this kind of one source layer."""
        starts = list(accumulate(widths(self.source, kind), initial=0))
        after = size(self.source, "keys") if (self.gathered, kind) == ("both", "values") else 0
        return torch.arange(starts[layer], starts[layer + 1]) + after

    def before_of(self, kind: Kind, layer: int) -> Int[Tensor, " p"]:
        """Features of this kind of one source layer, of the token before.

        Raises:
            ValueError: they were not captured.
        """
        if layer not in self.offered:
            raise ValueError(f"layer {layer} at the token before, of a capture of {self.offered}")
        group = self._group(kind)
        at = sum(size(self.source, each) for each in group)
        at += sum(
            before_size(self.source, each, self.offered) for each in group[: group.index(kind)]
        )
        at += before_size(self.source, kind, self.offered[: self.offered.index(layer)])
        return torch.arange(at, at + widths(self.source, kind)[layer])

    def heads(
        self, kind: Kind, sources: Sequence[int], layer: int, before: Sequence[int] = ()
    ) -> Heads:
        """How the columns of :meth:`reads` and :meth:`writes` fall into heads."""
        owners, counts = [], []
        for s in (*sources, *before):
            heads = self.source.layers[s].kv_heads
            for each in read_by(self.features, kind):
                width = widths(self.source, each)[s]
                owners.append(torch.arange(heads).repeat_interleave(width // heads))
                counts.append(torch.full((width,), heads))
        if self.start is not None:
            owners.append(torch.full((self.state_width,), EVERY_HEAD))
            counts.append(torch.ones(self.state_width, dtype=torch.long))
        return Heads(
            target=self.target.layers[layer].kv_heads,
            source=torch.cat(owners),
            count=torch.cat(counts),
        )

    def writes(self, kind: Kind, layer: int, *, shuffled: bool = False) -> Int[Tensor, " q"]:
        """Target features of one layer, or their permuted twins."""
        starts = list(accumulate(widths(self.target, kind), initial=0))
        columns = torch.arange(starts[layer], starts[layer + 1])
        return columns + starts[-1] if shuffled else columns

    def _state(self, kind: Kind) -> list[Int[Tensor, " e"]]:
        if self.start is None:
            return []
        group = self._group(kind)
        at = sum(
            size(self.source, each) + before_size(self.source, each, self.offered) for each in group
        )
        at += self.starts.index(self.start) * self.state_width
        return [torch.arange(at, at + self.state_width)]

    def _group(self, kind: Kind) -> tuple[Kind, ...]:
        """The kinds whose rows were gathered beside this one's."""
        return next(group for group in GROUPS[self.gathered] if kind in group)


@runtime_checkable
class Solver(Protocol):
    """Anything that turns moments into a map: a frozen dataclass, whose fields are its settings.

    Of its fields, ``strength``, ``scale`` and ``rank`` are filled from those of
    :class:`~kvtransfer.fitting.settings.FitSettings`; others keep their defaults. Where it says
    ``weighs = True``, the capture gathers the target's queries too, for ``heads.sees``.
    """

    name: ClassVar[str]
    """What ``--solver`` calls it."""

    def solve(self, moments: Moments, heads: Heads) -> Linear:
        """The fitted map."""
        ...


Judged = dict[Solver, tuple[Linear, float]]
"""Maps of one problem that were solved, by solver, and their held-out R²."""


@dataclass(frozen=True, eq=False, kw_only=True)  # no slots: what is made is kept
class Problem:
    """What one map is fitted to, and what it is judged by. Each is made when it is asked for."""

    whole_fit: Moments | PairMoments
    whole_heldout: Moments | PairMoments
    weighted: Moments | PairMoments | None
    """What is fitted in place of the fit's."""
    opening: First | None
    """First tokens, where they may count for more."""
    first: int
    """How much more, at most."""
    x: Int[Tensor, " p"]
    y: Int[Tensor, " q"]
    twin: Int[Tensor, " q"]
    """Where the permuted target rows stand."""
    heads: Heads
    judged: Judged

    @cached_property
    def fit(self) -> Moments:
        """Of the rows to fit."""
        if self.weighted is not None:
            return self.weighted.select(self.x, self.y)
        chosen = self.whole_fit.select(self.x, self.y)
        if self.opening is None:
            return chosen
        varied = self.opening.moments(self.x[:1], self.y)  # of the targets: one feature will do
        times = min(self.first, chosen.more_varied_than(varied)) - 1
        if times == 0:
            return chosen
        opening = self.opening.moments(self.x, self.y)
        more = opening.n * times
        # However much some count for, there are no more rows than were read.
        return (chosen + opening.counted_as(more)).counted_as(chosen.n)

    @cached_property
    def heldout(self) -> Moments:
        """Of the rows that judge."""
        return self.whole_heldout.select(self.x, self.y)

    @cached_property
    def shuffled(self) -> Moments:
        """The fit's, with permuted target rows."""
        return self.whole_fit.select(self.x, self.twin)

    def score(self, fitted: Linear) -> float:
        """Held-out R², mean over heads."""
        return float(r2(fitted, self.heldout, heads=self.heads.target).mean())

    def judge(self, solver: Solver) -> tuple[Linear, float]:
        """The map that a solver finds, and its held-out R²; no solver is asked twice.

        Raises:
            UnderdeterminedFit: it finds none.
        """
        if solver not in self.judged:
            fitted = solver.solve(self.fit, self.heads)
            self.judged[solver] = fitted, self.score(fitted)
        return self.judged[solver]


class Known:
    """Maps of one target layer that were solved already: choosing them is solving them."""

    def __init__(self) -> None:
        self._layer: int | None = None
        self._judged: dict[object, Judged] = {}

    def of(self, layer: int, *which: object) -> Judged:
        """Those of one problem; those of another layer are forgotten."""
        if layer != self._layer:
            self._layer, self._judged = layer, {}
        return self._judged.setdefault(which, {})


def problem(
    capture: Capture,
    columns: Columns,
    kind: Kind,
    sources: Sequence[int],
    layer: int,
    *,
    before: Sequence[int] = (),
    first: int = 1,
    attention: bool = False,
    known: Known | None = None,
) -> Problem:
    """The map of one target layer and kind, read from some source layers in ascending order.

    ``before`` are source layers that are read at the token before, too. The first token of a chunk
    counts for as many rows as first tokens are more alike than others are, at most ``first``: where
    all lean on it (an attention sink), all of them are nearly the same.

    With ``attention``, rows are weighted by the attention they are paid, and errors of keys by what
    queries see of them. ``known`` holds maps that were solved for the same columns' sake.

    Raises:
        ValueError: neither was captured.
    """
    sources, before = sorted(sources), sorted(before)
    heads = columns.heads(kind, sources, layer, before)
    weighted: Moments | PairMoments | None = None
    if attention:
        if capture.weighted is None:
            raise ValueError("the attention solver, of a capture without attention")
        weighted = getattr(capture.weighted, kind)
        heads = replace(heads, sees=capture.sees[layer] if kind == "keys" else None)
    # With a start it is not mapped, so it counts for no more than any other.
    counts = first > 1 and columns.start is None
    which = (kind, tuple(sources), tuple(before), first, attention)
    return Problem(
        whole_fit=getattr(capture.fit, kind),
        whole_heldout=getattr(capture.heldout, kind),
        weighted=weighted,
        opening=capture.first.get(kind) if counts else None,
        first=first,
        x=columns.reads(kind, sources, before),
        y=columns.writes(kind, layer),
        twin=columns.writes(kind, layer, shuffled=True),
        heads=heads,
        judged={} if known is None else known.of(layer, *which),
    )
