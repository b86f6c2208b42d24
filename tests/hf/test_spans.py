"""Two tokenizers of one text: every token knows its characters, and its partner in the other."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import normalizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvtransfer.errors import SeamError, UnsupportedModel
from kvtransfer.fitting.chunks import chunks
from kvtransfer.fitting.texts import builtin
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill
from kvtransfer.hf.spans import encode_spans, paired_ids, text_of
from tests.hf.trained import gemma, trimming, unigram

Reader = Callable[[str], LanguageModel]


@pytest.fixture(scope="module")
def reading(model: LanguageModel, tokenizer: PreTrainedTokenizerBase) -> Reader:
    """Gives the tiny model one of the tokenizers, by name."""
    made = {each.__name__: each() for each in (trimming, gemma, unigram)} | {"bytes": tokenizer}
    return lambda name: replace(model, tokenizer=made[name])


NAMES = ["bytes", "trimming", "gemma", "unigram"]

# fmt: off
PIECES = [
    "the", " the", "function", " ", "  ", "\n", "\n    ", "\t", "3.14", " 2026", "x=1", ",", "é",
    "e\u0301", "漢", "字。", "ß", "😀", "👩‍🚀", "🇫🇷", "ﬁ", "\u00a0", "\u200b", "<0x41>", "▁",
]
# fmt: on
TEXTS = st.text(max_size=12) | st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


def spells_pieces(text: str) -> bool:
    """SentencePiece reads these as a space, and as a byte, and decodes them to that."""
    return "▁" in text or "<0x" in text


@pytest.mark.parametrize("name", NAMES)
@given(text=TEXTS)
def test_spans_tile_the_text(reading: Reader, name: str, text: str) -> None:
    model = reading(name)
    ids, spans = encode_spans(model, text)
    starts, ends = spans[:, 0], spans[:, 1]

    assert torch.equal(ids, model.encode(text))
    assert ends[-1:].tolist() == ([len(text)] if text else [])
    assert (starts <= ends).all()
    assert (ends.diff() >= 0).all()
    assert starts[:1].tolist() in ([], [0])
    assert (starts[1:] <= ends[:-1]).all()


@pytest.mark.parametrize("name", NAMES)
@given(text=TEXTS)
def test_a_token_ends_with_the_characters_that_it_spells(
    reading: Reader, name: str, text: str
) -> None:
    """Up to a token at the end of a character, the ids decode to the text up to its end."""
    if spells_pieces(text) and name in ("gemma", "unigram"):
        return
    model = reading(name)
    ids, spans = encode_spans(model, text)
    ends = spans[:, 1].tolist()
    for token, end in enumerate(ends):
        if end not in ends[token + 1 :]:
            spelt = model.tokenizer.decode(ids[: token + 1], clean_up_tokenization_spaces=False)
            # Unigram's decoder takes off the space that was put before the text, or the text's own.
            assert spelt == text[:end] or (name == "unigram" and f" {spelt}" == text[:end])


def test_a_tokenizers_own_offsets_would_not_do(reading: Reader) -> None:
    """GPT-2's last step has a line break end before its indent, and a space nowhere at all."""
    text, model = "a:\n    b  c", reading("trimming")
    offsets = model.tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    ends = encode_spans(model, text)[1][:, 1].tolist()

    assert [end for _, end in offsets] != ends
    spelt = [model.tokenizer.decode(model.encode(text)[: i + 1]) for i in range(len(ends))]
    assert ends == [len(each) for each in spelt]


def test_bytes_of_several_characters_in_a_row_are_told_apart(reading: Reader) -> None:
    """Unigram gives one span to all of them, which would have every byte end with the last."""
    model = reading("unigram")
    offsets = model.tokenizer("x漢é", return_offsets_mapping=True)["offset_mapping"]
    _, spans = encode_spans(model, "x漢é")

    assert offsets[-5:] == [(1, 3)] * 5
    assert spans[-5:].tolist() == [[1, 2]] * 3 + [[2, 3]] * 2


def test_a_space_put_before_a_text_ends_before_it(reading: Reader) -> None:
    """Its offset is the first character, which it has not read."""
    model = reading("unigram")
    for text, first in (("com", [0, 0]), ("é", [0, 0]), ("\nthe", [0, 0]), (" é", [0, 1])):
        ids, spans = encode_spans(model, text)

        assert model.tokenizer.convert_ids_to_tokens(ids.tolist())[0] == "▁"
        assert spans[0].tolist() == first


def test_characters_that_a_tokenizer_drops_go_to_a_neighbour(model: LanguageModel) -> None:
    bpe = trimming().backend_tokenizer
    bpe.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace("\u200b", "")])
    lossy = replace(model, tokenizer=PreTrainedTokenizerFast(tokenizer_object=bpe))

    assert encode_spans(lossy, "x\u200b2\u200b")[1].tolist() == [[0, 1], [1, 4]]
    # One character that is two after normalising: both tokens of it end with it.
    assert encode_spans(lossy, "ﬁ")[1][:, 1].tolist() == [1] * len(lossy.encode("ﬁ"))
    with pytest.raises(SeamError, match=r"makes no token of '\\u200b'"):
        encode_spans(lossy, "\u200b")


def test_a_tokenizer_without_offsets_is_refused(model: LanguageModel) -> None:
    slow = replace(model, tokenizer=ByT5Tokenizer())

    with pytest.raises(UnsupportedModel, match=r"ByT5Tokenizer .* does not say which") as caught:
        encode_spans(slow, "text")

    assert "fast tokenizer" in str(caught.value.hint)


def test_a_tokenizer_that_never_says_the_same_twice_is_refused(model: LanguageModel) -> None:
    bpe = trimming().backend_tokenizer
    bpe.model.dropout = 0.5
    random = replace(model, tokenizer=PreTrainedTokenizerFast(tokenizer_object=bpe))

    with pytest.raises(UnsupportedModel, match="leaves characters out of its offsets") as caught:
        encode_spans(random, builtin("heldout")[0][:2000])

    assert "dropout" in str(caught.value.hint)


@pytest.mark.parametrize("name", NAMES)
@given(text=TEXTS)
def test_ids_of_a_text_spell_it_again(reading: Reader, name: str, text: str) -> None:
    model = reading(name)
    ids = model.encode(text)
    try:
        again = text_of(model, ids)
    except SeamError:
        assert spells_pieces(text)
        return

    assert torch.equal(model.encode(again), ids)
    if name != "unigram" and not spells_pieces(text):
        assert again == text


def test_ids_that_no_text_has_are_refused_with_the_token(reading: Reader) -> None:
    model = reading("bytes")
    half = model.encode("ab😀")[:-1]  # an emoji without its last byte
    apart = torch.cat((model.encode("the func"), model.encode("tion")))

    with pytest.raises(SeamError, match=f"from token {len(half) - 3} on"):
        text_of(model, half)
    with pytest.raises(SeamError, match=r"no text has these .* tokens") as caught:
        text_of(model, apart)

    assert "between words" in str(caught.value.hint)


@pytest.mark.parametrize("source", NAMES)
@pytest.mark.parametrize("target", NAMES)
@given(text=TEXTS)
def test_pairs_read_as_far_and_in_order(
    reading: Reader, source: str, target: str, text: str
) -> None:
    ours, theirs = reading(target), reading(source)
    wanted = ours.encode(text)
    try:
        ids, index = paired_ids(theirs, ours, wanted)
    except SeamError:
        with pytest.raises(SeamError):
            text_of(ours, wanted)
        return

    spelt = text_of(ours, wanted)
    again, spans = encode_spans(theirs, spelt)
    ends, reached = encode_spans(ours, spelt)[1][:, 1], spans[index, 1]
    assert torch.equal(ids, again)
    assert (reached >= ends).all()
    assert (index.diff() >= 0).all()
    assert index[-1:].tolist() == ([len(ids) - 1] if len(ids) else [])
    if source == target:
        assert torch.equal(ids, wanted)
        assert torch.equal(index, torch.arange(len(ids)))


def test_two_tokenizations_of_prose_differ(reading: Reader) -> None:
    """Else all of the above would hold for nothing."""
    text = builtin("heldout")[0][:500]
    ids, index = paired_ids(reading("trimming"), reading("gemma"), reading("gemma").encode(text))

    assert len(ids) != len(index)
    assert len(index.unique()) < min(len(ids), len(index))


def test_marks_of_the_sequence_go_to_their_own_kind(reading: Reader) -> None:
    source, target = reading("trimming"), reading("gemma")
    text = [target.encode("one"), target.encode("two words")]
    begin, end = (
        torch.tensor([target.tokenizer.convert_tokens_to_ids(each)]) for each in ("<bos>", "<eos>")
    )

    ids, index = paired_ids(source, target, torch.cat((begin, text[0], end, text[1])))

    assert source.tokenizer.decode(ids) == "<s>one</s>two words"
    assert index[0] == 0
    assert ids[index[len(text[0]) + 1]] == source.tokenizer.eos_token_id


def test_a_missing_mark_is_the_other_one_and_without_any_it_is_spelt(reading: Reader) -> None:
    target = reading("trimming")
    ids = torch.cat((torch.tensor([target.tokenizer.bos_token_id]), target.encode("one")))

    with_end, _ = paired_ids(reading("bytes"), target, ids)
    without, index = paired_ids(reading("unigram"), target, ids)

    assert reading("bytes").tokenizer.decode(with_end) == "<|end|>one"
    assert reading("unigram").tokenizer.decode(without) == "<s>one"
    assert index[-1] == len(without) - 1


def test_chunks_of_prose_have_pairs(reading: Reader) -> None:
    source, target = reading("unigram"), reading("trimming")
    cut = chunks(builtin("heldout"), target.encode, length=64, separator=1)

    for ids in islice(cut, 20):
        assert len(paired_ids(source, target, ids)[1]) == 64


def test_a_models_own_cache_aligned_with_itself_is_its_own(model: LanguageModel) -> None:
    ids = model.encode("An own cache, aligned 😀.")
    theirs, index = paired_ids(model, model, ids)
    own = prefill(model, ids[None]).content()

    taken = prefill(model, theirs[None]).content().take(index[None], own.positions)

    for ours, again in zip((*own.keys, *own.values), (*taken.keys, *taken.values), strict=True):
        torch.testing.assert_close(again, ours)


def test_an_aligned_cache_holds_what_the_source_had_read_by_then(
    tiny: Callable[..., LanguageModel], model: LanguageModel, reading: Reader
) -> None:
    """Other text after a token that ends where the source's does leaves its features alone."""
    source = replace(tiny("qwen3", vocab_size=1200), tokenizer=reading("gemma").tokenizer)
    features = []
    for text in ("The same line.\nAnd this", "The same line.\nIs other"):
        ids = model.encode(text)
        theirs, index = paired_ids(source, model, ids)
        cache = prefill(source, theirs[None]).content()
        features.append(cache.take(index[None], torch.arange(len(ids))[None]))
    same = len(model.encode("The same line."))

    for one, other in zip(features[0].keys, features[1].keys, strict=True):
        torch.testing.assert_close(one[:, :, :same], other[:, :, :same])
    assert not torch.allclose(
        features[0].keys[1][:, :, same + 1], features[1].keys[1][:, :, same + 1]
    )
