"""Layers by number, by third, and as bands of another model."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.errors import SteeringError
from kvtransfer.steering.layers import THIRDS, which


@pytest.mark.parametrize(
    ("spelling", "depth", "layers"),
    [
        ("all", 3, [0, 1, 2]),
        ("2", 4, [2]),
        ("1-3", 4, [1, 2, 3]),
        ("0, 2-3", 4, [0, 2, 3]),
        ("early", 30, list(range(10))),
        ("mid", 30, list(range(10, 20))),
        ("late", 30, list(range(20, 30))),
        ("9-20/32", 32, list(range(8, 20))),
        ("1-8/32", 30, list(range(8))),
        ("9-20/32", 30, list(range(8, 19))),
        ("21-31/32", 30, list(range(19, 29))),
        ((2, 0, 2), 4, [0, 2]),
        (range(1, 3), 4, [1, 2]),
        ((), 4, []),
    ],
)
def test_what_a_spelling_means(spelling: str, depth: int, layers: list[int]) -> None:
    assert list(which(spelling, depth)) == layers


@given(st.integers(3, 200))
def test_thirds_are_the_whole_depth_each_layer_once(depth: int) -> None:
    parts = [which(third, depth) for third in THIRDS]

    assert sum(parts, ()) == tuple(range(depth))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.integers(1, 200), st.lists(st.integers(1, 31), min_size=1, unique=True))
def test_bands_that_meet_leave_no_layer_out_and_none_twice(depth: int, cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), 32]
    found: list[int] = []
    for before, end in pairwise(ends):
        try:
            found.extend(which(f"{before + 1}-{end}/32", depth))
        except SteeringError as error:
            assert "is empty" in error.message
    assert found == list(range(depth))


@pytest.mark.parametrize(
    ("spelling", "words"),
    [
        ("4", "no layer 4 in a model of 4"),
        ("2-9", "no layer 4, 5"),
        ("3-1", "'3-1' is empty"),
        ("middle", "no layers are called 'middle'"),
        ("", "no layers are called ''"),
        ("-1", "no layers are called '-1'"),
        ("0-8/32", "no band of a model of 32"),
        ("9-40/32", "no band of a model of 32"),
        ((-1,), "no layer -1"),
        ((True,), "no layer True"),
    ],
)
def test_what_is_not_there_is_named(spelling: str, words: str) -> None:
    with pytest.raises(SteeringError, match=words) as caught:
        which(spelling, 4)
    assert caught.value.hint


def test_a_third_of_one_layer_may_be_empty_and_says_so() -> None:
    with pytest.raises(SteeringError, match="the band 'early' is empty"):
        which("early", 1)
