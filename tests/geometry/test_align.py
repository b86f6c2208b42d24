"""Each token of one tokenization has a token of another that has read as far."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvtransfer.errors import CacheLayoutError, RotationError, SeamError
from kvtransfer.geometry.align import align
from tests.geometry.test_cache import blocks, cache


def spans(*pairs: tuple[int, int]) -> Tensor:
    return torch.tensor(pairs, dtype=torch.long).view(-1, 2)


def pieces(*lengths: int) -> Tensor:
    """Spans of tokens that lie end to end."""
    ends = torch.tensor(lengths, dtype=torch.long).cumsum(0)
    return torch.stack((ends - torch.tensor(lengths), ends), dim=1)


@st.composite
def tokenizations(draw: st.DrawFn, length: int) -> Tensor:
    """Any spans over ``length`` characters: several tokens may share an end, and some be empty."""
    cuts = draw(st.lists(st.integers(0, length), max_size=12))
    ends = sorted([*cuts, length])
    starts = [draw(st.integers(0, end)) for end in ends]
    return spans(*zip(starts, ends, strict=True))


PAIRS: st.SearchStrategy[tuple[Tensor, Tensor]] = st.integers(0, 12).flatmap(
    lambda length: st.tuples(tokenizations(length), tokenizations(length))
)


@given(pair=PAIRS)
def test_every_target_token_has_a_source_token_that_read_as_far(
    pair: tuple[Tensor, Tensor],
) -> None:
    source, target = pair
    index = align(source, target)
    ends, wanted = source[index, 1], target[:, 1]

    assert (ends >= wanted).all()
    # And no further than it must: one of the same end where there is one, else the next.
    for end, given_ in zip(wanted.tolist(), ends.tolist(), strict=True):
        assert given_ == min(each for each in source[:, 1].tolist() if each >= end)


@given(pair=PAIRS)
def test_order_is_kept_and_last_goes_with_last(pair: tuple[Tensor, Tensor]) -> None:
    source, target = pair
    index = align(source, target)

    assert (index.diff() >= 0).all()
    assert index[-1] == len(source) - 1


@given(spans=st.integers(0, 12).flatmap(tokenizations))
def test_a_tokenization_is_aligned_with_itself_token_by_token(spans: Tensor) -> None:
    assert torch.equal(align(spans, spans), torch.arange(len(spans)))


def test_a_longer_source_token_covers_what_ends_within_it() -> None:
    together, apart = pieces(5, 6), pieces(5, 1, 2, 3)

    assert align(together, apart).tolist() == [0, 1, 1, 1]
    assert align(apart, together).tolist() == [0, 3]


def test_pieces_of_one_character_go_together_from_the_last() -> None:
    """A character of four pieces here, of two or of one there, after and before a letter."""
    four = spans((0, 1), (1, 2), (1, 2), (1, 2), (1, 2), (2, 3))
    two = spans((0, 1), (1, 2), (1, 2), (2, 3))
    whole = pieces(1, 1, 1)

    assert align(four, whole).tolist() == [0, 4, 5]
    assert align(four, two).tolist() == [0, 3, 4, 5]
    assert align(two, four).tolist() == [0, 1, 1, 1, 2, 3]
    assert align(whole, four).tolist() == [0, 1, 1, 1, 1, 2]


def test_a_target_token_before_all_source_tokens_takes_the_first() -> None:
    """The empty token that SentencePiece puts before a text that begins with an odd character."""
    assert align(pieces(2, 1), spans((0, 0), (0, 2), (2, 3))).tolist() == [0, 0, 1]


def test_no_tokens_have_none() -> None:
    assert align(spans(), spans()).shape == (0,)


@pytest.mark.parametrize(
    ("source", "target", "says"),
    [
        (pieces(3, 4), pieces(3, 5), "source's tokens span 7 characters, the target's 8 char"),
        (spans(), pieces(2), "span no tokens, the target's 2 characters"),
        (pieces(2), spans(), "span 2 characters, the target's no tokens"),
    ],
)
def test_spans_of_two_texts_are_refused(source: Tensor, target: Tensor, says: str) -> None:
    with pytest.raises(SeamError, match=says) as caught:
        align(source, target)

    assert "same text" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (spans((0, 3), (3, 2)), r"token 1 of the source spans characters \(3, 2\) after one.* 3"),
        (spans((0, 3), (0, 2)), r"token 1 of the source spans characters \(0, 2\) after one.* 3"),
        (spans((2, 1), (0, 2)), r"token 0 of the source spans characters \(2, 1\)"),
    ],
)
def test_spans_out_of_order_are_refused(wrong: Tensor, says: str) -> None:
    with pytest.raises(CacheLayoutError, match=says):
        align(wrong, pieces(2))


def test_tokens_are_taken_whole_with_new_positions() -> None:
    given_ = cache(keys_are="content", rotations=None, note="dequantised", batch=2)
    index, positions = torch.tensor([[0, 0, 3], [4, 1, 2]]), torch.tensor([[7, 8, 9]] * 2)

    taken = given_.take(index, positions)

    for before, after in zip(
        (*given_.keys, *given_.values), (*taken.keys, *taken.values), strict=True
    ):
        for row in range(2):
            assert torch.equal(after[row], before[row][:, index[row]])
    assert torch.equal(taken.positions, positions)
    assert (taken.model, taken.note, taken.keys_are) == ("abc", "dequantised", "content")


def test_all_tokens_in_their_order_are_the_same_cache() -> None:
    given_ = cache(keys_are="content", rotations=None)
    taken = given_.take(torch.arange(5)[None], given_.positions)

    assert all(map(torch.equal, (*taken.keys, *taken.values), (*given_.keys, *given_.values)))


def test_turned_keys_stay_where_they_are() -> None:
    """Gathered turned keys would carry two positions at once: the one they had, and the new one."""
    with pytest.raises(RotationError, match="turned to the positions they have") as caught:
        cache().take(torch.arange(5)[None], torch.arange(5)[None])

    assert "content()" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (torch.tensor([[0, 5]]), "tokens 0 to 5 of 1 sequences, in a cache of 5 tokens and 1 "),
        (torch.tensor([[-1, 2]]), "tokens -1 to 2 of 1 sequences"),
        (torch.tensor([[0, 1], [0, 1]]), "of 2 sequences, in a cache of 5 tokens and 1 sequences"),
        (torch.empty(2, 0, dtype=torch.long), "tokens none of 2 sequences"),
    ],
)
def test_a_token_that_is_not_there_is_refused(index: Tensor, says: str) -> None:
    with pytest.raises(CacheLayoutError, match=says):
        cache(keys_are="content", rotations=None).take(index, torch.zeros_like(index))


def test_a_cache_written_to_in_place_is_refused() -> None:
    keys = blocks([(1, 2, 5, 8)] * 2)
    given_ = cache(keys=keys, keys_are="content", rotations=None)
    keys[1].zero_()

    with pytest.raises(CacheLayoutError, match="keys of layer 1 were written to in place"):
        given_.take(torch.arange(5)[None], torch.arange(5)[None])
