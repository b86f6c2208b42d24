"""The moments of all features of a pair of models, of which every problem is a small part."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvtransfer.fitting.layout import Layout, Piece, Run
from kvtransfer.fitting.moments import Moments

Flat = Float[Tensor, " _numbers"]
"""What a layout's runs lie in, one behind the other."""


@dataclass(frozen=True, slots=True, eq=False)
class PairMoments:
    """As :class:`Moments`, with only those products that a layout keeps.

    Target features may stand twice: as they are, and as the shuffled twin's, which come after.
    """

    n: int
    mean_x: Float[Tensor, " p"]
    mean_y: Float[Tensor, " q"]
    yy: Float[Tensor, " q"]
    layout: Layout
    gram: Flat
    cross: Flat
    twin: Flat | None = None
    """The shuffled twin's ``cross``."""
    offered: Int[Tensor, " q"] | None = None
    """Which target features of the layout these are; None for all."""

    @property
    def diagonal(self) -> Float[Tensor, " p"]:
        """The scatter of each source feature; none of what no target layer may read."""
        squares = [
            _view(self.gram, runs[0], piece, piece).diagonal()
            if runs
            else self.gram.new_zeros(len(piece))
            for piece, runs in zip(self.layout.sources, self.layout.gram, strict=True)
        ]
        return torch.cat(squares)

    def select(self, x: Int[Tensor, " p_"], y: Int[Tensor, " q_"]) -> Moments:
        """The moments of some features only, in the order given.

        Raises:
            ValueError: some of their products were not gathered, as no map was to read them.
        """
        xx = self.gram.new_empty(len(x), len(x))
        spans = _spans(x, self.layout.sources)
        for i, a in enumerate(spans):
            for b in spans[i:]:
                xx[a.to, b.to] = block = self._gram(a, b)
                xx[b.to, a.to] = block.mT
        mean_x, mean_y, yy = self.mean_x[x], self.mean_y[y], self.yy[y]
        return Moments(self.n, mean_x, mean_y, xx, self._products(x, y), yy)

    def targets(self, y: Int[Tensor, " q_"]) -> "PairMoments":
        """The moments of some target features only; the products are shared, not copied."""
        offered = y if self.offered is None else self.offered[y]
        return replace(self, mean_y=self.mean_y[y], yy=self.yy[y], offered=offered)

    def dense(self) -> Moments:
        """All of them.

        Raises:
            ValueError: some were not gathered.
        """
        return self.select(torch.arange(len(self.mean_x)), torch.arange(len(self.mean_y)))

    def _products(self, x: Int[Tensor, " p_"], y: Int[Tensor, " q_"]) -> Float[Tensor, "p_ q_"]:
        """The scatter of some source features with some target features."""
        found = self.cross.new_empty(len(x), len(y))
        q, goals = self.layout.q, self.layout.targets
        twins = (Piece(each.start + q, each.stop + q, each.layer) for each in goals)
        chosen = y if self.offered is None else self.offered[y]
        rows = _spans(x, self.layout.sources)
        for b in _spans(chosen, goals if self.twin is None else (*goals, *twins)):
            for a in rows:
                found[a.to, b.to] = self._cross(a, b)
        return found

    def _gram(self, a: "_Span", b: "_Span") -> Tensor:
        if a.of > b.of:
            return self._gram(b, a).mT
        run = _holding(self.layout.gram[a.of], b)
        if run is None:
            first, second = (self.layout.sources[each.of].layer for each in (a, b))
            raise ValueError(
                f"source layers {first} and {second} together, and under {self.layout.band} no "
                "target layer may read both: their products were not gathered"
            )
        return _view(self.gram, run, a, b)

    def _cross(self, a: "_Span", b: "_Span") -> Tensor:
        flat, q = self.cross, self.layout.q
        if b.start >= q:
            assert self.twin is not None
            flat, b = (
                self.twin,
                _Span(b.of - len(self.layout.targets), b.start - q, b.stop - q, b.to),
            )
        run = _holding(self.layout.cross[a.of], b)
        if run is None:
            goal, read = self.layout.targets[b.of].layer, self.layout.sources[a.of].layer
            raise ValueError(
                f"target layer {goal} from source layer {read}, and {self.layout.band} leaves "
                "that out: their products were not gathered"
            )
        return _view(flat, run, a, b)


@dataclass(frozen=True, slots=True)
class _Span:
    """Neighbouring columns of one piece, and where they go."""

    of: int
    """Which piece."""
    start: int
    stop: int
    to: slice


def view(flat: Flat, run: Run) -> Float[Tensor, "_p _q"]:
    """The products of one run."""
    return flat[run.at : run.end].view(run.shape)


def _view(flat: Flat, run: Run, rows: Piece | _Span, columns: Piece | _Span) -> Tensor:
    """Some rows and columns of a run."""
    down, along = run.rows.start, run.start
    return view(flat, run)[
        rows.start - down : rows.stop - down, columns.start - along : columns.stop - along
    ]


def _holding(runs: Sequence[Run], columns: _Span) -> Run | None:
    found = (run for run in runs if run.start <= columns.start and columns.stop <= run.stop)
    return next(found, None)


def _spans(columns: Int[Tensor, " n"], pieces: Sequence[Piece]) -> list[_Span]:
    """Columns cut where they are no neighbours, and where a piece ends."""
    ends = torch.tensor([piece.stop for piece in pieces])
    inside = torch.bucketize(columns, ends, right=True)
    cut = (columns.diff() != 1) | (inside.diff() != 0)
    cuts = [0, *(torch.nonzero(cut).flatten() + 1).tolist(), len(columns)]
    firsts, of = columns.tolist(), inside.tolist()
    return [
        _Span(of[a], firsts[a], firsts[a] + b - a, slice(a, b)) for a, b in pairwise(cuts) if b > a
    ]
