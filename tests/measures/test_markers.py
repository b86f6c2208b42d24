"""Marker matching: counted by hand, ordered always."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.measures.diversity import type_token_ratio
from kvtransfer.measures.markers import count_markers

NESTED = "Start the art now. I'm so sorry, so sorry!"
MARKERS = ("sorry", "I'm so sorry", "so sorry", "art")

WORDS = st.sampled_from(["sorry", "so", "i'm", "art", "start", "a", "SORRY", "I’m", ",", "-"])
TEXTS = st.lists(WORDS, max_size=25).map(" ".join) | st.text(max_size=40)


def test_nested_markers_as_counted_by_hand() -> None:
    """By hand. Substrings: sorry 2, I'm so sorry 1, so sorry 2, art 2 (one in "Start"): 7.
    Whole words: the same without "Start": 6. Longest first: I'm so sorry, so sorry, art: 3."""
    found = count_markers(NESTED, MARKERS)

    assert (found.naive, found.boundary, found.deduplicated) == (7, 6, 3)
    assert found.words == 9
    assert found.density("deduplicated") == pytest.approx(100 * 3 / 9)


def test_sorry_nests_in_im_so_sorry() -> None:
    found = count_markers("I'm so sorry.", ("sorry", "I'm so sorry"))

    assert (found.naive, found.boundary, found.deduplicated) == (2, 2, 1)


def test_art_is_not_in_start_as_a_word() -> None:
    found = count_markers("A start, a fresh start: art.", ("art",))

    assert (found.naive, found.boundary, found.deduplicated) == (3, 1, 1)


def test_what_only_overlaps_is_counted_once() -> None:
    found = count_markers("good day to you", ("good day", "day to you"))

    assert (found.naive, found.boundary, found.deduplicated) == (2, 2, 1)


@pytest.mark.parametrize(
    ("text", "marker"),
    [
        ("SORRY", "sorry"),
        ("I’m here", "I'm"),
        ("so\n  sorry", "so sorry"),
        ("STRASSE", "straße"),
        ("Arr! Arr!", "arr!"),
    ],
)
def test_case_apostrophes_and_spaces_make_no_difference(text: str, marker: str) -> None:
    assert count_markers(text, (marker,)).deduplicated >= 1


def test_a_marker_given_twice_is_one() -> None:
    assert count_markers("sorry", ("sorry", "Sorry")) == count_markers("sorry", ("sorry",))


def test_an_empty_marker_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        count_markers("text", (" ",))


def test_a_text_without_words_has_no_density() -> None:
    found = count_markers("… !", ("!",))

    assert found.naive == 1
    assert found.density("naive") == 0


@given(TEXTS, st.lists(WORDS.filter(lambda word: word.strip()), min_size=1, max_size=3), st.data())
def test_the_three_counts_are_ordered(text: str, phrase: list[str], data: st.DataObject) -> None:
    other = data.draw(st.text(min_size=1, max_size=3).filter(lambda marker: marker.strip()))
    found = count_markers(text, (" ".join(phrase), phrase[0], other, "sorry", "a"))

    assert 0 <= found.deduplicated <= found.boundary <= found.naive


def test_type_token_ratio_by_hand() -> None:
    assert type_token_ratio("The cat, the dog; THE end.") == pytest.approx(4 / 6)
    assert type_token_ratio("one two three") == 1
