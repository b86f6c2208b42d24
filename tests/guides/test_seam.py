"""However a text is cut, hidden and live ids are the ids of the joint text."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvtransfer.errors import SeamError
from kvtransfer.guides.seam import split


class Encode:
    """Text to ids, by a real tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def __call__(self, text: str) -> Tensor:
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return torch.tensor(ids, dtype=torch.long)


@pytest.fixture(scope="module")
def encode(tokenizer: PreTrainedTokenizerBase) -> Encode:
    return Encode(tokenizer)


PIECES = st.text(max_size=20) | st.lists(
    st.sampled_from(
        ["the", " the", "n", "ing", " ", "\n", "function", "é", "漢", "\u0301", "👩‍🚀"]
    ),
    max_size=8,
).map("".join)


@given(prefix=PIECES, live=PIECES)
def test_hidden_and_live_together_are_the_joint_text(
    encode: Encode, prefix: str, live: str
) -> None:
    joint = encode(prefix + live)
    try:
        parts = split(encode, prefix, live)
    except SeamError:
        alone = encode(prefix)
        assert len(joint) < 2 or not len(alone) or joint[0] != alone[0]
        return

    assert torch.equal(torch.cat((parts.hidden, parts.live)), joint)
    assert len(parts.hidden) >= 1
    assert len(parts.live) >= 1
    # Hidden ids are ids of the prefix alone, so its cache can be made without knowing what follows.
    assert torch.equal(parts.hidden, encode(prefix)[: len(parts.hidden)])


def test_tokenizing_the_parts_apart_would_give_other_ids(encode: Encode) -> None:
    prefix, live = "Return the fun", "ction object"

    apart = torch.cat((encode(prefix), encode(live)))
    parts = split(encode, prefix, live)

    assert not torch.equal(apart, encode(prefix + live))
    assert len(parts.hidden) < len(encode(prefix))  # the seam moved back before the merged token


def test_where_tokens_end_together_the_seam_is_at_the_end_of_the_prefix(encode: Encode) -> None:
    parts = split(encode, "One sentence.", "\nAnother sentence.")

    assert torch.equal(parts.hidden, encode("One sentence."))


def test_with_nothing_to_follow_the_last_token_stays_live(encode: Encode) -> None:
    parts = split(encode, "One sentence.", "")

    assert len(parts.live) == 1


@pytest.mark.parametrize(("prefix", "live"), [("", "alone"), ("", ""), ("a", "")])
def test_where_nothing_can_be_hidden_it_says_so(encode: Encode, prefix: str, live: str) -> None:
    with pytest.raises(SeamError, match="no token boundary") as caught:
        split(encode, prefix, live)

    assert "line break" in str(caught.value.hint)
