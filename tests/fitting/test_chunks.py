"""Chunks are the joined documents, cut."""

from collections.abc import Iterator
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from kvtransfer.errors import TextError
from kvtransfer.fitting.chunks import chunks, one_stream

SEPARATOR = 0


def encode(text: str) -> Tensor:
    """A token a letter."""
    return torch.tensor([ord(letter) for letter in text], dtype=torch.long)


DOCUMENTS = st.lists(st.text("abcdefghij", max_size=20), max_size=8)


@given(texts=DOCUMENTS, length=st.integers(2, 9))
def test_chunks_put_end_to_end_are_the_documents_put_end_to_end(
    texts: list[str], length: int
) -> None:
    joined = [ord(letter) for letter in "".join(texts)]
    if len(joined) < length:
        return

    cut = [chunk.tolist() for chunk in chunks(texts, encode, length=length)]

    assert all(len(chunk) == length for chunk in cut)
    assert list(chain.from_iterable(cut)) == joined[: len(joined) // length * length]


@given(texts=DOCUMENTS, length=st.integers(2, 9))
def test_a_separator_stands_between_documents_and_nowhere_else(
    texts: list[str], length: int
) -> None:
    joined = "\0".join(text for text in texts if text)
    if len(joined) < length:
        return

    found = chunks(texts, encode, length=length, separator=SEPARATOR)

    cut = list(chain.from_iterable(chunk.tolist() for chunk in found))

    assert cut == [ord(letter) for letter in joined][: len(cut)]
    assert len(joined) - len(cut) < length


@given(texts=DOCUMENTS, length=st.integers(2, 200))
def test_a_text_shorter_than_a_chunk_is_refused_with_both_numbers(
    texts: list[str], length: int
) -> None:
    letters = len("".join(texts))
    if letters >= length:
        return

    with pytest.raises(
        TextError, match=f"holds {letters} tokens, fewer than one chunk of {length}"
    ):
        list(chunks(texts, encode, length=length))


def test_documents_are_read_no_further_than_chunks_are_taken() -> None:
    read = []

    def texts() -> Iterator[str]:
        for text in ("abcd", "efgh", "ijkl"):
            read.append(text)
            yield text

    next(chunks(texts(), encode, length=4))

    assert read == ["abcd"]


@pytest.mark.parametrize("length", [1, 0, -3])
def test_a_chunk_of_less_than_two_tokens_is_a_mistake(length: int) -> None:
    with pytest.raises(ValueError, match="at least 2 tokens"):
        list(chunks(["abc"], encode, length=length))


def test_one_stream_is_the_documents_with_a_blank_line_between() -> None:
    assert "".join(one_stream(["ab", "cd", "ef"])) == "ab\n\ncd\n\nef"
    assert list(one_stream([])) == []
