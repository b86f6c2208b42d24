"""A curve for a terminal: estimates as characters."""

from collections.abc import Mapping, Sequence

from kvtransfer.report import Estimate

ROWS = 12
"""Lines of the curve."""


def plot(series: Mapping[str, Sequence[Estimate]], *, first: int) -> list[str]:
    """Estimates as lines of characters: a letter for each value, a bar for each interval.

    Args:
        series: By letter, an estimate a place; all of one length.
        first: Number of the first place.
    """
    everything = [each for column in series.values() for each in column]
    top = max((each.value if each.high is None else each.high) for each in everything) or 1.0

    def row(value: float) -> int:
        return round(min(max(value, 0.0), top) / top * (ROWS - 1))

    width = len(series) + 2
    places = max(map(len, series.values()))
    grid = [[" "] * (places * width) for _ in range(ROWS)]
    for offset, (letter, column) in enumerate(series.items()):
        for place, each in enumerate(column):
            at = place * width + 1 + offset
            if each.low is not None and each.high is not None:
                for line in range(row(each.low), row(each.high) + 1):
                    grid[line][at] = "│"
            grid[row(each.value)][at] = letter
    lines = [
        f"{top * line / (ROWS - 1):8.3f} ┤{''.join(grid[line])}".rstrip()
        for line in reversed(range(ROWS))
    ]
    numbers = "".join(str(first + place).center(width) for place in range(places))
    return [*lines, f"{'turn':>8}  {numbers}".rstrip()]
