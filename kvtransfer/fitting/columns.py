"""Where each layer's features stand in the moments of a pair, and whose head they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvtransfer.fitting.capture import Capture
from kvtransfer.fitting.features import (
    GROUPS,
    Features,
    Kind,
    before_size,
    read_by,
    size,
    widths,
)
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
