"""Which products of a pair's features are kept, and where they lie. From specs alone: no tensors.

Columns fall into pieces, one a source layer and kind. Of two source pieces, one product is kept
(the scatter is symmetric), and only where some target layer may read both; of a source and a target
piece, only where the one may feed the other. What is kept lies row-piece by row-piece in runs of
neighbouring columns, so that a whole run is one matrix product.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod

from kvtransfer.fitting.band import Band
from kvtransfer.fitting.features import GROUPS, Features, Kind, widths
from kvtransfer.geometry.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Piece:
    """Columns that stand together."""

    start: int
    stop: int
    layer: int | None
    """Whose they are; None for what every target layer may read."""

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Run:
    """The products of one piece's columns with a run of columns, as they lie in a flat buffer."""

    rows: Piece
    start: int
    stop: int
    at: int
    """Where they begin in the buffer, row by row."""

    @property
    def shape(self) -> tuple[int, int]:
        """Of the matrix."""
        return len(self.rows), self.stop - self.start

    @property
    def end(self) -> int:
        """Where they end in the buffer."""
        return self.at + prod(self.shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each product of one group of features is kept."""

    sources: tuple[Piece, ...]
    targets: tuple[Piece, ...]
    band: Band
    gram: tuple[tuple[Run, ...], ...]
    """By source piece, its products with itself and with pieces after it."""
    cross: tuple[tuple[Run, ...], ...]
    """By source piece, its products with target pieces."""

    @classmethod
    def over(cls, sources: Sequence[Piece], targets: Sequence[Piece], band: Band) -> "Layout":
        """The layout of these pieces, with all that ``band`` needs and no more."""
        reach = {piece: _reach(piece, band) for piece in sources}
        gram = [
            [other for other in sources[i:] if reach[piece] & reach[other]]
            for i, piece in enumerate(sources)
        ]
        cross = [[goal for goal in targets if goal.layer in reach[piece]] for piece in sources]
        return cls(
            tuple(sources), tuple(targets), band, _placed(sources, gram), _placed(sources, cross)
        )

    @classmethod
    def of(
        cls,
        source: ModelSpec,
        target: ModelSpec,
        group: Sequence[Kind],
        band: Band,
        *,
        before: Sequence[int] = (),
        states: Sequence[int] = (),
    ) -> "Layout":
        """That of what :func:`kvtransfer.fitting.features.gathered` gathers.

        Args:
            source: Makes the cache.
            target: Is to read it.
            group: Kinds whose rows stand side by side.
            band: Which source layers may feed which target layers.
            before: Source layers whose features of the token before are offered too.
            states: The width of each of the target's states that are.
        """
        reads: list[tuple[int, int | None]] = []
        for layers in (range(len(source.layers)), before):
            reads += [(widths(source, kind)[s], s) for kind in group for s in layers]
        reads += [(width, None) for width in states]
        writes = [(w, t) for kind in group for t, w in enumerate(widths(target, kind))]
        return cls.over(_pieces(reads), _pieces(writes), band)

    @property
    def p(self) -> int:
        """Source features."""
        return self.sources[-1].stop

    @property
    def q(self) -> int:
        """Target features."""
        return self.targets[-1].stop

    @property
    def gram_numbers(self) -> int:
        """Products of source features that are kept."""
        return _numbers(self.gram)

    @property
    def cross_numbers(self) -> int:
        """Products of source and target features that are kept."""
        return _numbers(self.cross)


def moments_bytes(
    source: ModelSpec,
    target: ModelSpec,
    *,
    features: Features = "same",
    before: Sequence[int] = (),
    states: Sequence[int] = (),
    band: int | None = None,
    attention: bool = False,
    itemsize: int = 8,
) -> dict[str, dict[str, int]]:
    """Bytes of the moments of a pair, by kind; of both together where features are ``both``.

    ``gram``: products of source features that one set of moments keeps, about half of
    ``gram_full``, all of them. ``cross``: products of source and target features of one set.
    ``held``: what a fit holds: its own set with the shuffled twin's cross products, the held-out
    set, and with ``attention`` the weighted one.

    Args:
        source: Makes the cache.
        target: Is to read it.
        features: What maps may read.
        before: Source layers whose features of the token before are offered too.
        states: The width of each of the target's states that are.
        band: See :class:`Band`; None for all source layers.
        attention: Whether a weighted set is gathered, too.
        itemsize: Bytes of one number; sums are in float64.
    """
    limits = Band(band, len(source.layers), len(target.layers))
    sets = 3 if attention else 2
    found = {}
    for group in GROUPS[features]:
        layout = Layout.of(source, target, group, limits, before=before, states=states)
        gram, cross = layout.gram_numbers, layout.cross_numbers
        sizes = {
            "gram": gram,
            "gram_full": layout.p**2,
            "cross": cross,
            "held": sets * (gram + cross) + cross,
        }
        found[" and ".join(group)] = {name: itemsize * size for name, size in sizes.items()}
    return found


def _reach(piece: Piece, band: Band) -> frozenset[int]:
    """The target layers that may read a piece."""
    return frozenset(range(band.target) if piece.layer is None else band.readers(piece.layer))


def _pieces(sizes: Sequence[tuple[int, int | None]]) -> list[Piece]:
    ends = pairwise(accumulate((width for width, _ in sizes), initial=0))
    return [Piece(*at, layer) for at, (_, layer) in zip(ends, sizes, strict=True)]


def _placed(
    rows: Sequence[Piece], columns: Sequence[Sequence[Piece]]
) -> tuple[tuple[Run, ...], ...]:
    """For each row piece, the runs that its column pieces make, one behind the other."""
    placed, at = [], 0
    for row, beside in zip(rows, columns, strict=True):
        runs = []
        for start, stop in _joined(beside):
            runs.append(Run(row, start, stop, at))
            at = runs[-1].end
        placed.append(tuple(runs))
    return tuple(placed)


def _joined(pieces: Sequence[Piece]) -> Iterator[tuple[int, int]]:
    """Columns of neighbouring pieces, taken together."""
    held: tuple[int, int] | None = None
    for piece in pieces:
        if held is not None and held[1] == piece.start:
            held = held[0], piece.stop
            continue
        if held is not None:
            yield held
        held = piece.start, piece.stop
    if held is not None:
        yield held


def _numbers(placed: Sequence[Sequence[Run]]) -> int:
    return max((runs[-1].end for runs in placed if runs), default=0)
