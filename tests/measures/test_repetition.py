"""Repetition is a share that can be counted by hand."""

import pytest

from kvtransfer.measures.repetition import repetition


@pytest.mark.parametrize(
    ("text", "n", "share"),
    [
        ("a b c d", 3, 0.0),
        ("a b c a b c", 3, 1 / 4),  # abc bca cab abc
        ("a a a a a", 3, 2 / 3),
        ("a a a a a", 1, 4 / 5),
        ("a b", 3, 0.0),
        ("", 3, 0.0),
    ],
)
def test_it_is_what_one_counts_by_hand(text: str, n: int, share: float) -> None:
    assert repetition(text.split(), n) == pytest.approx(share)


def test_saying_it_all_again_repeats_more_than_saying_something_else() -> None:
    once, other = (
        ["the", "tide", "comes", "in", "twice", "a", "day"],
        ["and", "the", "harbour", "empties", "as", "often"],
    )

    assert repetition(once + other) == 0 < repetition(once + once)


def test_grams_of_nothing_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="no 0-grams"):
        repetition(["a", "b", "c"], 0)
