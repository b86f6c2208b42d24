"""Interventions as text: what is written is what is made, and nothing is ever evaluated."""

import pytest
import torch

from kvtransfer.errors import SteeringError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.steering.chain import chain
from kvtransfer.steering.expression import entries, parse, terms
from kvtransfer.steering.interventions import Ablate, Bank, Lag, Replace, Scale, Shuffle

BANDS = chain(Ablate("keys", layers="9-20/32"), Bank("3-7"), Bank((2,)))


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("Ablate(removed, layers=mid)", chain(Ablate("removed", layers="mid"))),
        ("Ablate()", chain(Ablate())),
        ("Scale(-0.5, values, tokens=(-1, None))", chain(Scale(-0.5, "values", tokens=(-1, None)))),
        (" Scale( 0.5 ) + Lag(2) ", chain(Scale(0.5), Lag(2))),
        ("Bank('9-20/32')", chain(Bank("9-20/32"))),
        ("Ablate(keys, layers=9-20/32)+Bank(3-7)+Bank(2)", BANDS),
        ("Bank(())+Shuffle(3, heads=(0, 1))", chain(Bank(()), Shuffle(3, heads=(0, 1)))),
    ],
)
def test_what_is_written_is_what_is_made(text: str, made: object) -> None:
    assert parse(text) == made
    assert parse(str(parse(text))) == made


def test_bound_names_are_what_they_are_bound_to() -> None:
    blocks = (torch.ones(1, 1, 3, 2),)
    donor = KVCache(keys=blocks, values=blocks, positions=torch.arange(3)[None], keys_are="content")

    made = parse("Replace(other)+halve", {"other": donor, "halve": Scale(0.5)})

    assert str(made) == "Replace(3 tokens, both)+Scale(0.5, both)"
    first = made.steps[0]  # type: ignore[attr-defined]
    assert isinstance(first, Replace)
    assert first.donor is donor


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Rotate(0.5)", "no intervention is called 'Rotate'"),
        ("Scale", "'Scale' is no intervention"),
        ("mid", "'mid' is no intervention"),
        ("Scale()", "missing a required argument: 'factor'"),
        ("Scale(1, 2, 3, 4)", "too many positional"),
        ("Scale(0.5, strength=2)", "unexpected keyword argument 'strength'"),
        ("Scale(0.5", "was never closed"),
        ("Scale(0.5)-Lag(2)", "is no intervention"),
        ("Scale(nan)", "factor is nan"),
        ("Scale(-inf)", "'-inf' is no number"),
        ("Lag(-1)", "a lag of -1"),
        ("Scale(__import__('os').getcwd())", "is no number, word or tuple"),
        ("__import__('os').getcwd()", "is no intervention"),
        ("Scale(**given)", "missing a required argument"),
        ("", "cannot read the intervention ''"),
        ("+".join(["Lag(1)"] * 3000), "it goes too deep"),
        ("Ablate(part=keys, part=values)", "part is given twice"),
        ("number", "number is a float and edits no cache alone"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, words: str) -> None:
    with pytest.raises(SteeringError) as caught:
        parse(text, {"number": 0.5})
    assert words in caught.value.message
    assert caught.value.hint


def test_lists_are_cut_outside_of_brackets_alone() -> None:
    listed = "own, mapped+Ablate(removed, layers=(1, 2))+Lag(2),raw"

    assert entries(listed) == ["own", "mapped+Ablate(removed, layers=(1, 2))+Lag(2)", "raw"]
    assert terms(entries(listed)[1]) == ["mapped", "Ablate(removed, layers=(1, 2))", "Lag(2)"]
