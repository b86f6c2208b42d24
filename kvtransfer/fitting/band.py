"""Which source layers a target layer may be read from: all, or those about its own depth.

Layers of two models do alike work at a like depth, so what lies far from it is seldom chosen; and
what is never chosen need not be gathered, nor looked at.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Band:
    """The source layers within ``width`` of a target layer's proportional depth.

    Attributes:
        width: How far from it; None for all source layers.
        source: How many layers the source has.
        target: How many the target has.
    """

    width: int | None
    source: int
    target: int

    def __post_init__(self) -> None:
        if self.width is not None and self.width < 0:
            raise ValueError(f"band must be ≥ 0 source layers to either side, got {self.width}")

    def depth(self, layer: int) -> int:
        """The source layer that stands where target layer ``layer`` stands, t·(S − 1)/(T − 1)."""
        # In whole numbers, so that halves go the same way everywhere: up.
        steps = max(1, self.target - 1)
        return (2 * layer * (self.source - 1) + steps) // (2 * steps)

    def candidates(self, layer: int) -> range:
        """The source layers that target layer ``layer`` may be read from."""
        if self.width is None:
            return range(self.source)
        depth = self.depth(layer)
        return range(max(0, depth - self.width), min(self.source, depth + self.width + 1))

    def readers(self, layer: int) -> range:
        """The target layers that source layer ``layer`` may feed, which are neighbours."""
        found = [t for t in range(self.target) if layer in self.candidates(t)]
        return range(found[0], found[-1] + 1) if found else range(0)

    def narrowest(self, first: int = 0) -> int:
        """The fewest candidates that any target layer from ``first`` on has."""
        return min(len(self.candidates(t)) for t in range(first, self.target))

    def widest(self, first: int = 0) -> int:
        """The most candidates that any target layer from ``first`` on has."""
        return max(len(self.candidates(t)) for t in range(first, self.target))

    def require(self, layers: int, first: int = 0) -> None:
        """Raise ValueError unless every target layer from ``first`` on has so many candidates."""
        held = self.narrowest(first)
        if layers > held:
            widths = range(self.source)
            fits = (w for w in widths if Band(w, *self.ends).narrowest(first) >= layers)
            raise ValueError(
                f"{layers} source layers, and a band of {self.width} leaves some target layer "
                f"{held}: give a band of {next(fits, self.source)} or more, or none"
            )

    @property
    def ends(self) -> tuple[int, int]:
        """How many layers the source has, and how many the target."""
        return self.source, self.target

    def __str__(self) -> str:
        return "no band" if self.width is None else f"a band of {self.width}"
