"""The problem of one map: what it is fitted to, what judges it, and what has been solved of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Protocol, runtime_checkable

from jaxtyping import Int
from torch import Tensor

from kvtransfer.fitting.affine import Linear, r2
from kvtransfer.fitting.capture import Capture, First
from kvtransfer.fitting.columns import Columns, Heads
from kvtransfer.fitting.features import Kind
from kvtransfer.fitting.moments import Moments
from kvtransfer.fitting.pairs import PairMoments


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
