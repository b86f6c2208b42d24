"""Text in pieces is the text of all tokens, and none of it is decoded again and again."""

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from kvtransfer.hf.locate import locate
from kvtransfer.hf.pieces import HALF, pieces
from kvtransfer.hf.spec import load_tokenizer
from tests.hf.trained import gemma, unigram

PARTS = (
    "the", " the", "don", "'t", " .", " ,", " ", "  ", "\n", "\n\n", "\r\n", "\t", "\u00a0",
    "\u3000",
    "Ünder", "e\u0301", "漢字", "か\u3099", "ไทย", "नमस्ते", "שלום", "مرحبا", "👩\u200d🚀", "👍🏽",
    "🇩🇪", "❤\ufe0f", "🦜", "\ufffd", "\x00", "\U0010ffff", "def f(x):", "0", "12",
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(PARTS), max_size=12).map("".join) | st.text(max_size=30)
NAMES = ("trained here", "tiny-4l", "smollm2-135m", "gemma", "unigram")
"""Byte-level ones, SentencePiece with bytes for letters that it lacks, and without."""


@pytest.fixture(scope="module")
def tokenizers(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, PreTrainedTokenizerBase]:
    return {
        "trained here": tokenizer,
        "tiny-4l": load_tokenizer(locate("tiny-4l")),
        "smollm2-135m": load_tokenizer(locate("smollm2-135m")),
        "gemma": gemma(),
        "unigram": unigram(),
    }


def decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[list[int]], str]:
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))


@pytest.mark.parametrize("name", NAMES)
@given(text=TEXTS)
@settings(max_examples=150)
def test_pieces_of_a_text_are_the_text(
    tokenizers: Mapping[str, PreTrainedTokenizerBase], name: str, text: str
) -> None:
    decode = decoder(tokenizers[name])
    ids = tokenizers[name](text, add_special_tokens=False, verbose=False)["input_ids"]

    found = list(pieces(decode, ids))

    assert "".join(found) == decode(ids)
    assert all(found)
    # Only what ends the text, or a letter that the text itself has, may end in half a character.
    assert HALF in text or not any(piece.endswith(HALF) for piece in found[:-1])


@pytest.mark.parametrize("name", ("trained here", "tiny-4l", "smollm2-135m"))
@given(data=st.data())
@settings(max_examples=150)
def test_so_are_those_of_any_tokens_of_bytes(
    tokenizers: Mapping[str, PreTrainedTokenizerBase], name: str, data: st.DataObject
) -> None:
    """Also where the bytes are no text, or special tokens, which are not shown, stand between."""
    ids = data.draw(st.lists(st.integers(0, 300), max_size=20))
    decode = decoder(tokenizers[name])

    assert "".join(pieces(decode, ids)) == decode(ids)


def test_tokens_decoded_one_by_one_are_another_text(
    tokenizers: Mapping[str, PreTrainedTokenizerBase],
) -> None:
    """What the pieces are for: letters of several tokens, and spaces before a first one."""
    for name, text in (("trained here", "A 🦜."), ("unigram", "one two")):
        decode = decoder(tokenizers[name])
        ids = tokenizers[name](text, add_special_tokens=False)["input_ids"]
        assert "".join(decode([token]) for token in ids) != decode(ids)
        assert "".join(pieces(decode, ids)) == decode(ids)


def test_the_work_grows_with_the_text_and_not_with_its_square(
    tokenizers: Mapping[str, PreTrainedTokenizerBase],
) -> None:
    decode = decoder(tokenizers["tiny-4l"])
    decoded: list[int] = []

    def counting(ids: list[int]) -> str:
        decoded.append(len(ids))
        return decode(ids)

    for copies in (10, 100):
        decoded.clear()
        ids = tokenizers["tiny-4l"]("The tide 🦜 e\u0301 漢字.\n" * copies)["input_ids"]
        assert "".join(pieces(counting, ids)) == decode(ids)
        assert sum(decoded) < 12 * len(ids)
