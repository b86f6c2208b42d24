"""However a text is cut, its parts are the ids of the joint text, and no character is cut."""

from collections.abc import Mapping

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase

from kvtransfer.errors import SeamError, UnsupportedModel
from kvtransfer.guides.character import inside_character
from kvtransfer.guides.seam import SEAMS, split
from kvtransfer.hf.locate import locate
from kvtransfer.hf.spec import load_tokenizer
from tests.hf.trained import gemma, trimming, unigram

BYTES = ("trained here", "tiny-4l", "smollm2-135m", "trimming")
"""Byte-level tokenizers: their tokens decode to the text. (SmolLM2 has none for a few bytes.)"""

OTHERS = ("gemma", "unigram")
"""They put spaces before a text, or have no piece for a letter and no bytes for it."""


@pytest.fixture(scope="module")
def tokenizers(tokenizer: PreTrainedTokenizerBase) -> Mapping[str, PreTrainedTokenizerBase]:
    return {
        "trained here": tokenizer,
        "tiny-4l": load_tokenizer(locate("tiny-4l")),
        "smollm2-135m": load_tokenizer(locate("smollm2-135m")),
        "trimming": trimming(),
        "gemma": gemma(),
        "unigram": unigram(),
    }


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.long)


def decode(tokenizer: PreTrainedTokenizerBase, ids: Tensor) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


PIECES = (
    "the", " the", "n", "ing", "fo", "x", "function", "It's", "don", "'t", "Ünder", "ß", "ſ",
    " ", "  ", "    ", "\n", "\n\n", "\r\n", "\r", "\t", "\u00a0", "\u3000", "\u2028", "\u200b",
    "0", "12", "345", " 7", "3.14", "1,000", "٣", "²", "½",
    "é", "e\u0301", "\u0301", "漢", "字", "か\u3099", "ไทย", "नमस्ते", "שלום", "مرحبا", "\ufeff",
    "👩\u200d🚀", "👩", "\u200d", "🚀", "👍🏽", "🏽", "🇩🇪", "🇩", "❤\ufe0f", "\ufe0f",
    "👨\u200d👩\u200d👧", "def f(x):", "return x", "!=", "->", "{}", "();", "</s>",
    "#include <a.h>", "a_b", "//",
    "\x00", "\x7f", "\U0010ffff", "<|im_end|>",
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), max_size=8).map("".join) | st.text(max_size=20)


def check_parts(
    tokenizer: PreTrainedTokenizerBase, guide: str, live: str, *, lossless: bool
) -> int:
    """What must hold of a split, and how many tokens it hides."""
    joint = encode(tokenizer, guide + live)
    parts = split(tokenizer, guide, live, seam="back-off")
    hidden = len(parts.hidden)

    assert torch.equal(parts.ids, joint)
    assert hidden >= 1
    assert len(parts.live) >= 1
    alone = encode(tokenizer, guide)
    # Hidden ids are ids of the guide alone, and of its shorter text alone: a cache of either holds
    # them, whatever follows.
    assert torch.equal(parts.hidden, alone[:hidden])
    assert torch.equal(parts.hidden, encode(tokenizer, parts.hidden_text))
    assert parts.text == guide + live
    assert parts.moved_tokens == len(alone) - hidden
    assert parts.moved_characters == len(guide) - parts.cut >= 0
    assert (parts.moved is None) == (parts.moved_tokens == 0)
    assert not inside_character(parts.text, parts.cut)
    if lossless:
        assert decode(tokenizer, parts.hidden) == parts.hidden_text
        assert decode(tokenizer, parts.live) == parts.text[parts.cut :]
    return hidden


def cleanly(tokenizer: PreTrainedTokenizerBase, guide: str, live: str) -> list[int]:
    """By decoding, not by offsets: after how many tokens a byte-level text can be cut."""
    joint, alone = encode(tokenizer, guide + live), encode(tokenizer, guide)
    found = []
    for tokens in range(1, min(len(alone) + 1, len(joint))):
        begun = decode(tokenizer, joint[:tokens])
        whole = (guide + live).startswith(begun) and not inside_character(guide + live, len(begun))
        same = torch.equal(joint[:tokens], alone[:tokens])
        if whole and same and torch.equal(encode(tokenizer, begun), joint[:tokens]):
            found.append(tokens)
    return found


@pytest.mark.parametrize("name", BYTES)
@settings(max_examples=60)
@given(guide=TEXTS, live=TEXTS)
@example(guide="The quick brown fo", live="x jumps")
@example(guide="hi 👩", live="\u200d🚀!")
@example(guide="🇩🇪🇩", live="🇪")
@example(guide="\ufffd\ufffd", live="\ufffd")
def test_the_seam_is_the_last_place_where_the_text_can_be_cut(
    tokenizers: Mapping[str, PreTrainedTokenizerBase], name: str, guide: str, live: str
) -> None:
    tokenizer = tokenizers[name]
    assume(decode(tokenizer, encode(tokenizer, guide + live)) == guide + live)
    places = cleanly(tokenizer, guide, live)
    if not places:
        for seam in SEAMS:
            with pytest.raises(SeamError) as caught:
                split(tokenizer, guide, live, seam=seam)
            assert caught.value.hint
        return

    assert check_parts(tokenizer, guide, live, lossless=True) == places[-1]
    if places[-1] == len(encode(tokenizer, guide)):
        strict = split(tokenizer, guide, live)
        assert len(strict.hidden) == places[-1]
        assert strict.hidden_text == guide
    else:
        with pytest.raises(SeamError, match="no exact token boundary" if live else "is empty"):
            split(tokenizer, guide, live)


@pytest.mark.parametrize("name", [*OTHERS, "smollm2-135m"])
@settings(max_examples=60)
@given(guide=TEXTS, live=TEXTS)
@example(guide="\u200b", live="漢字")
@example(guide="0\x16", live="0")
def test_of_other_tokenizers_the_parts_are_the_joint_ids_too(
    tokenizers: Mapping[str, PreTrainedTokenizerBase], name: str, guide: str, live: str
) -> None:
    try:
        check_parts(tokenizers[name], guide, live, lossless=False)
    except SeamError as error:
        assert error.hint


def test_strict_is_what_is_done_unless_asked(tokenizer: PreTrainedTokenizerBase) -> None:
    guide, live = "Return the fun", "ction object"
    apart = torch.cat((encode(tokenizer, guide), encode(tokenizer, live)))

    moved = split(tokenizer, guide, live, seam="back-off")
    with pytest.raises(SeamError, match="no exact token boundary") as caught:
        split(tokenizer, guide, live)

    assert not torch.equal(apart, moved.ids)  # tokenized apart, the model would read other ids
    assert moved.moved_tokens == len(encode(tokenizer, guide)) - len(moved.hidden) > 0
    assert str(moved.moved_tokens) in str(moved.moved)
    assert repr(guide[moved.cut :]) in str(moved.moved)
    assert repr(live) in caught.value.message  # both texts and the tokens around are named
    assert str(tokenizer.convert_ids_to_tokens(int(encode(tokenizer, guide)[-1]))) in str(
        caught.value
    )
    assert f"{moved.moved_tokens} of the guide's tokens" in str(caught.value.hint)


@pytest.mark.parametrize("seam", SEAMS)
def test_where_tokens_end_with_the_guide_the_seam_is_there(
    tokenizer: PreTrainedTokenizerBase, seam: str
) -> None:
    guide = "One sentence."

    parts = split(tokenizer, guide, "\nAnother sentence.", seam=seam)  # type: ignore[arg-type]

    assert torch.equal(parts.hidden, encode(tokenizer, guide))
    assert (parts.moved, parts.hidden_text) == (None, guide)


def test_with_nothing_to_follow_the_last_token_stays_live(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    parts = split(tokenizer, "One sentence.", "", seam="back-off")
    with pytest.raises(SeamError) as caught:
        split(tokenizer, "One sentence.", "")

    assert len(parts.live) == 1
    assert "the live text is empty" in caught.value.message
    assert "give a prompt" in str(caught.value.hint)
    assert "back-off" in str(caught.value.hint)


@pytest.mark.parametrize("seam", SEAMS)
@pytest.mark.parametrize(
    ("guide", "live", "says"),
    [
        ("", "alone", "guide is empty"),
        ("", "", "guide is empty"),
        ("a", "", "the live text is empty"),
        ("half \ud83d", "\ude80", "guide holds half a character"),
        ("a whole guide", "\ude80", "live text holds half a character"),
    ],
)
def test_where_nothing_can_be_hidden_it_says_so(
    tokenizer: PreTrainedTokenizerBase, seam: str, guide: str, live: str, says: str
) -> None:
    with pytest.raises(SeamError, match=says) as caught:
        split(tokenizer, guide, live, seam=seam)  # type: ignore[arg-type]

    assert caught.value.hint


def test_a_tokenizer_without_offsets_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="does not say which characters"):
        split(ByT5Tokenizer(), "One.", "\nTwo.")


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("ab", []),
        ("e\u0301a", [1]),
        ("\n\u0301", []),
        ("👩\u200d🚀x", [1, 2]),
        ("a\u200db", [1]),
        ("👍🏽", [1]),
        ("❤\ufe0f!", [1]),
        ("🇩🇪🇫🇷", [1, 3]),
        ("a\r\nb", [2]),
        ("\r\r", []),
    ],
    ids=ascii,
)
def test_characters_are_what_a_reader_takes_for_one(text: str, inside: list[int]) -> None:
    assert [at for at in range(len(text) + 1) if inside_character(text, at)] == inside
