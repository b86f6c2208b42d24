"""How much a text repeats itself."""

from collections.abc import Hashable, Sequence


def repetition(units: Sequence[Hashable], n: int = 3) -> float:
    """The share of a text's n-grams that stand in it before: 0 where none does.

    Args:
        units: Tokens or words; fewer than n repeat nothing.
        n: Units that must come again in a row.
    """
    if n < 1:
        raise ValueError(f"there are no {n}-grams")
    grams = [tuple(units[start : start + n]) for start in range(len(units) - n + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
