"""A target writes as much as it is asked for, and what is no prose is left out."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvtransfer.errors import TextError
from kvtransfer.fitting import selftext
from kvtransfer.fitting.selftext import (
    SHORTEST,
    is_prose,
    read_all_with,
    self_texts,
    self_tokens,
)
from kvtransfer.fitting.surface import spaced
from kvtransfer.fitting.texts import builtin, read_all
from kvtransfer.hf.model import LanguageModel


def count(model: LanguageModel, texts: list[str]) -> int:
    return sum(len(model.encode(text)) for text in texts)


def test_a_name_says_how_many_tokens() -> None:
    assert self_tokens("self:4096") == self_tokens("spaced:self:4096") == 4096
    for other in ("builtin", "selfish:3", "a.txt", "./self", "owner/self:3", "-"):
        assert self_tokens(other) is None


@pytest.mark.parametrize(
    "name", ["self", "self:", "self:0", "self:-3", "self:x", "self:1e4", "self: 4", "self:٣"]
)
def test_a_name_that_does_not_is_refused_with_a_way_out(target: LanguageModel, name: str) -> None:
    for read in (self_tokens, lambda each: read_all_with(["builtin", each], target)):
        with pytest.raises(TextError) as caught:
            read(name)

        assert repr(name) in caught.value.message
        assert "self:40000" in str(caught.value.hint)


@pytest.mark.parametrize("tokens", [1, 300, 700])
def test_as_many_tokens_come_as_were_asked_for(target: LanguageModel, tokens: int) -> None:
    texts = list(self_texts(target, tokens))

    assert count(target, texts[:-1]) < tokens <= count(target, texts)
    assert all(is_prose(text, target.encode(text)) for text in texts)
    assert all(text == text.strip("\ufffd") for text in texts)  # nor half a character at an end


def test_a_seed_gives_one_text_and_another_seed_another(target: LanguageModel) -> None:
    first, again, other = (list(self_texts(target, 300, seed=seed)) for seed in (0, 0, 1))

    assert first == again
    assert not set(first) & set(other)


def test_a_second_text_by_the_same_name_is_another(target: LanguageModel) -> None:
    texts = list(read_all_with(["self:100", "self:100"], target))
    apart = list(read_all_with(["spaced:self:100"], target))
    assert apart == list(map(spaced, read_all_with(["self:100"], target)))

    assert len(set(texts)) == len(texts) >= 2


def test_own_text_is_read_by_turns_with_the_others(target: LanguageModel, tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("A short text, read first.", encoding="utf-8")

    mixed = list(read_all_with(["self:600", str(path), "builtin"], target))

    own = list(self_texts(target, 600))
    assert mixed[0] == path.read_text()
    assert [text for text in mixed if text in own] == own
    # By turns: all of it comes within the first few of the many documents of the other.
    assert mixed.index(own[-1]) < len(builtin("fit")) / 10
    assert sorted(mixed) == sorted([*own, *read_all([str(path), "builtin"])])


def test_a_missing_file_is_known_before_anything_is_written(
    target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(selftext, "sample")

    with pytest.raises(TextError, match="no text file at"):
        read_all_with(["self:100", str(tmp_path / "missing.txt")], target)


def test_prose_is_long_enough_and_goes_on(target: LanguageModel) -> None:
    documents = (text for text in builtin("heldout") if ">>>" not in text)  # sessions repeat
    prose = [text for text in documents if len(text) > 2 * SHORTEST][:50]
    loop = prose[0][:SHORTEST] + " and so on" * 100

    assert all(is_prose(text, target.encode(text)) for text in prose)
    for text in ("", prose[0][: SHORTEST - 1], loop):
        assert not is_prose(text, target.encode(text))


def test_a_model_that_writes_no_prose_is_given_up(tiny: Callable[..., LanguageModel]) -> None:
    stuck = tiny("llama", num_hidden_layers=1)
    with torch.no_grad():
        stuck.module.get_output_embeddings().weight.zero_()
        stuck.module.get_output_embeddings().weight[300] = 1.0
        stuck.module.model.norm.weight.fill_(0.0)
    stuck.module.generation_config.eos_token_id = list(range(500))  # any of the rest ends a text

    with pytest.raises(TextError, match=r"of 40 documents .* wrote, 40 are shorter") as caught:
        list(self_texts(stuck, 10_000))

    assert "builtin" in str(caught.value.hint)
