"""A vector is the mean difference of its pairs, and says whether they have one."""

import json
from collections.abc import Iterator
from copy import copy, deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from kvtransfer.errors import SteeringError, TextError
from kvtransfer.fitting.texts import builtin
from kvtransfer.hf.model import LanguageModel, load
from kvtransfer.hf.run import prefill
from kvtransfer.steering.contrast import Contrast, doubts
from kvtransfer.steering.extract import extract
from kvtransfer.steering.pairs import Pair, prompt_ids, read_pairs

from .conftest import PAIRS


def test_it_is_the_mean_of_the_differences(model: LanguageModel) -> None:
    found = extract(model, PAIRS).vector

    for layer in range(4):
        for kind in ("keys", "values"):
            sides = [
                torch.stack(
                    [
                        getattr(prefill(model, model.encode(text)[None]).content(), kind)[layer][
                            0, :, -1
                        ]
                        for text in texts
                    ]
                )
                for texts in zip(*PAIRS, strict=True)
            ]
            wanted = (sides[0] - sides[1]).mean(0)
            torch.testing.assert_close(getattr(found, kind)[layer], wanted, atol=1e-5, rtol=1e-5)


def test_the_other_way_round_is_the_negative_and_the_order_is_nothing(model: LanguageModel) -> None:
    found = extract(model, PAIRS).vector
    turned = extract(model, [(n, p) for p, n in PAIRS]).vector
    backwards = extract(model, PAIRS[::-1]).vector

    for new, old in zip((*turned.keys, *turned.values), (*found.keys, *found.values), strict=True):
        assert torch.equal(new, -old)
    for new, old in zip(backwards.values, found.values, strict=True):
        torch.testing.assert_close(new, old)


def test_positions_are_no_difference(model: LanguageModel) -> None:
    """Layer 0 sees a token and its place; the place is taken out."""
    found = extract(model, PAIRS).vector
    short, long = (prefill(model, model.encode(text)[None]) for text in PAIRS[0])

    assert short.tokens != long.tokens
    torch.testing.assert_close(found.keys[0], torch.zeros(2, 16), atol=1e-5, rtol=0)
    assert not torch.allclose(short.keys[0][:, :, -1], long.keys[0][:, :, -1], atol=0.1)
    assert found.keys[1].norm() > 0.1


def test_one_pair_is_held_at_a_time(model: LanguageModel) -> None:
    handed: list[str] = []
    read: list[int] = []

    def pairs() -> Iterator[Pair]:
        for positive, negative in PAIRS[:4]:
            assert len(handed) == len(read)
            handed.append(positive)
            yield Pair(positive, negative)

    extract(model, pairs(), progress=read.append)

    assert read == [1, 1, 1, 1]


def test_another_token_can_be_looked_at(model: LanguageModel) -> None:
    found = extract(model, [("a tide and the", "b tide and the")], at=-2).vector
    cut = extract(model, [("a tide and", "b tide and")]).vector

    assert (found.at, cut.at) == (-2, -1)
    for new, old in zip(found.values, cut.values, strict=True):
        torch.testing.assert_close(new, old, atol=1e-5, rtol=1e-5)


# Do they differ?


def test_pairs_that_share_a_direction_are_trusted(model: LanguageModel) -> None:
    report = extract(model, PAIRS)

    assert report
    assert report.notes == ()
    assert 1.5 * report.values.chance < report.values.agreement <= 1
    assert report.flipped.norms[1] < report.vector.norms[1] / 2  # what they share is gone


def test_one_pair_again_and_again_agrees_with_itself(model: LanguageModel) -> None:
    report = extract(model, PAIRS[:1] * 6)

    assert report.keys.agreement == pytest.approx(1)
    assert report.keys.chance == pytest.approx(6**-0.5)
    assert report.flipped.norms == pytest.approx((0, 0), abs=1e-5)


def test_pairs_that_have_nothing_in_common_are_not(model: LanguageModel) -> None:
    texts = [text[:80].rstrip() for text in builtin("fit")[:32]]

    report = extract(model, list(zip(texts[::2], texts[1::2], strict=True)))

    assert not report
    assert any("do not differ in one direction" in note for note in report.notes)
    assert report.vector.notes == report.notes  # whoever loads it is told, too
    assert any("is not the same on both sides" in note for note in report.notes)


def test_pairs_that_hardly_differ_are_not() -> None:
    """One word, far away, is something that a trained model has nearly forgotten at the end."""
    model = load("tiny-4l", dtype="float32")
    behind = " ".join(builtin("fit"))[:1500] + " and the"

    report = extract(model, [(f"{word} {behind}", f"The {behind}") for word in "ABCDEF"])

    assert not report
    assert any("the keys of two prompts of a pair hardly differ" in note for note in report.notes)


def test_few_pairs_are_too_few_to_say(model: LanguageModel) -> None:
    report = extract(model, PAIRS[:3])

    assert not report
    assert report.notes == ("3 pairs are too few to say whether they agree: give 4 or more",)


@pytest.mark.parametrize(
    ("size", "agreement", "said"),
    [(0.5, 0.9, None), (0.01, 0.9, "hardly differ: by 1.0%"), (0.5, 0.3, "agreement 0.30")],
)
def test_doubts_are_of_size_and_of_direction(
    size: float, agreement: float, said: str | None
) -> None:
    found = Contrast(size=size, agreement=agreement, chance=0.25, length=1.0)

    told = list(doubts({"keys": found}, 16))

    assert [said in each for each in told if said] == ([True] if said else [])
    assert bool(told) == (said is not None)


def test_the_report_prints_and_is_json(model: LanguageModel) -> None:
    report = extract(model, PAIRS[:3])
    console = Console(width=120)

    with console.capture() as printed:
        console.print(report)

    for said in ("3 pairs, token -1", "keys", "values", "Note: 3 pairs are too few"):
        assert said in printed.get()
    document = json.loads(report.to_json())
    assert document["agree"] is False
    assert document["values"]["agreement"] == report.values.agreement


# What cannot be read


def test_no_pairs_are_refused(model: LanguageModel) -> None:
    with pytest.raises(SteeringError, match="no pairs"):
        extract(model, [])


@pytest.mark.parametrize(
    ("pair", "at", "said"),
    [
        (("The tide", "The tide"), -1, "pair 1: both prompts are the same"),
        (("tide a", "tide b"), -2, "pair 1: both prompts are the same"),
        (("a", "b"), -2, "pair 1: a prompt of 1 tokens has no token -2"),
    ],
)
def test_a_pair_without_a_difference_is_refused(
    model: LanguageModel, pair: tuple[str, str], at: int, said: str
) -> None:
    with pytest.raises(SteeringError, match=said):
        extract(model, [pair], at=at)


def test_a_token_from_the_start_is_a_mistake(model: LanguageModel) -> None:
    with pytest.raises(ValueError, match="counts from a prompt's end"):
        extract(model, PAIRS, at=3)


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def talking(model: LanguageModel) -> LanguageModel:
    tokenizer = deepcopy(model.tokenizer)
    tokenizer.chat_template = TEMPLATE
    return replace(copy(model), tokenizer=tokenizer)


def test_conversations_are_rendered_up_to_the_answer(talking: LanguageModel) -> None:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

    assert talking.decode(prompt_ids(talking, "How?", chat=True)) == "<user>How?\n<assistant>"
    assert talking.decode(prompt_ids(talking, said)) == "<user>a\n<assistant>b\n<assistant>"
    assert talking.decode(prompt_ids(talking, "How?")) == "How?"


def test_a_conversation_without_a_template_is_refused(
    model: LanguageModel, talking: LanguageModel
) -> None:
    with pytest.raises(SteeringError, match="no chat template"):
        extract(model, PAIRS, chat=True)
    with pytest.raises(SteeringError, match="refuses the conversation: no system"):
        prompt_ids(talking, [{"role": "system", "content": "a"}])
    with pytest.raises(TextError, match="an empty prompt"):
        prompt_ids(talking, " ", chat=True)
    for chat in (False, True):
        with pytest.raises(TextError, match="half a character"):
            prompt_ids(talking, "a \ud83d b", chat=chat)


# Files of pairs


def test_a_file_of_pairs_holds_texts_or_conversations(tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    turns = [{"role": "user", "content": "Why?"}]
    rows = [{"positive": "a", "negative": "b"}, {"positive": turns, "negative": "b"}]
    path.write_text("\n\n".join(map(json.dumps, rows)), encoding="utf-8")

    assert read_pairs(path) == (Pair("a", "b"), Pair(tuple(turns), "b"))
    path.write_text(path.read_text(encoding="utf-8"), encoding="utf-8-sig")
    assert read_pairs(path) == (Pair("a", "b"), Pair(tuple(turns), "b"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no pairs"),
        ('{"positive": "a"}', "line 1: 'negative' is 'None'"),
        ('{"positive": "a", "negative": " "}', "line 1: 'negative'"),
        ('{"positive": [], "negative": "b"}', "line 1: 'positive'"),
        ('{"positive": [{"role": "user"}], "negative": "b"}', "line 1: 'positive'"),
        ("[1]", "line 1 holds a list"),
        ('{"positive": "a", "negative": "b"}\n{', "line 2 is not JSON"),
    ],
)
def test_a_broken_file_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(TextError, match=said):
        read_pairs(path)


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")

    with pytest.raises(TextError, match="no file of pairs"):
        read_pairs(tmp_path / "missing.jsonl")
    assert len(read_pairs("steps")) == len(read_pairs("pirate")) == 24
    with pytest.raises(TextError, match="cannot be read as UTF-8"):
        read_pairs(tmp_path / "binary")
