"""A sweep begins with the model's own answer, and ends where the text is broken."""

import json
from copy import copy, deepcopy
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from kvtransfer.errors import IncompatibleModels, SteeringError, TextError
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import generate, prefill, score
from kvtransfer.hf.sample import Sampling
from kvtransfer.measures.agreement import nll
from kvtransfer.steering.answers import Start, answer
from kvtransfer.steering.guard import Guard, Matches
from kvtransfer.steering.interventions import Steer
from kvtransfer.steering.sweep import sweep
from kvtransfer.steering.sweep_report import Steered, Strength, SweepReport
from kvtransfer.steering.vector import CacheVector

PROMPTS = ("The tide comes in twice a day, and the", "At low water the boats lie on")


@pytest.fixture(scope="module")
def report(model: LanguageModel, vector: CacheVector) -> SweepReport:
    return sweep(model, vector, PROMPTS, [1.0, -1.0, 30.0], max_new_tokens=12)


def test_without_steering_it_is_the_models_own_answer(
    model: LanguageModel, report: SweepReport
) -> None:
    plain = next(each for each in report.strengths if each.strength == 0)

    for said, found in zip(PROMPTS, plain.answers, strict=True):
        own = list(generate(model, model.encode(said), max_new_tokens=12))
        assert found.text == model.decode(own)
        assert (found.gain, found.broken) == (0, None)
    assert not plain.useful


def test_strengths_are_in_order_with_nothing_added_only_zero(report: SweepReport) -> None:
    assert [each.strength for each in report.strengths] == [-1, 0, 1, 30]
    assert report.prompts == PROMPTS


def test_the_first_word_is_the_prompts_own_and_the_rest_is_steered(report: SweepReport) -> None:
    begun = {each.answers[0].text[:1] for each in report.strengths}
    texts = {each.answers[0].text for each in report.strengths}

    assert len(begun) == 1
    assert len(texts) > 2


def test_nll_is_that_of_the_text_after_the_whole_prompt(
    model: LanguageModel, report: SweepReport
) -> None:
    for each in report.strengths:
        ids, prompt = model.encode(each.answers[0].text), model.encode(PROMPTS[0])
        if len(ids) != each.answers[0].tokens:  # other tokens may make the same text
            continue
        whole = torch.cat((prompt, ids))
        found = nll(score(model, whole[None])[0, len(prompt) : -1], ids[1:]).mean()
        assert each.answers[0].nll == pytest.approx(float(found), abs=1e-4)


def test_what_is_likelier_when_steered_is_the_effect_if_nobody_names_one(
    report: SweepReport,
) -> None:
    by_strength = {each.strength: each for each in report.strengths}

    assert by_strength[30].gain.value > by_strength[1].gain.value > 0
    assert report.effect.startswith("nats")


def test_half_of_it_is_the_sum_of_its_parts(model: LanguageModel, vector: CacheVector) -> None:
    """Strengths of keys and values reach the cache."""
    keys, values, both = (
        sweep(model, vector, PROMPTS[:1], [3.0], key_strength=k, value_strength=v, max_new_tokens=8)
        for k, v in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0))
    )

    texts = {each.strengths[1].answers[0].text for each in (keys, values, both)}
    assert len(texts) > 1
    assert keys.steered["value_strength"] == 0


def test_draws_are_the_same_for_the_same_seed(model: LanguageModel, vector: CacheVector) -> None:
    one, again, other = (
        sweep(
            model,
            vector,
            PROMPTS[:1],
            [1.0],
            max_new_tokens=12,
            sampling=Sampling(floor=0.0),
            seed=seed,
        ).strengths[1].answers[0].text
        for seed in (1, 1, 2)
    )  # fmt: skip

    assert one == again != other


# Where the steered token is not the last


def test_a_token_before_the_last_leaves_the_rest_to_be_read(model: LanguageModel) -> None:
    ids = model.encode(PROMPTS[0])

    start = Start.of(model, PROMPTS[0], at=-2)
    later = Start.of(model, PROMPTS[0], after=" boats")

    assert torch.equal(start.live, ids[-1:])
    assert (start.prefix.tokens, start.answered) == (len(ids) - 1, 0)
    assert torch.equal(later.live, model.encode(" boats"))
    (found,) = answer(model, start, [start.prefix], max_new_tokens=6)
    assert found.tolist() == list(generate(model, ids, max_new_tokens=6))


def test_an_end_ends_a_row_and_not_the_others(model: LanguageModel, vector: CacheVector) -> None:
    start = Start.of(model, PROMPTS[0])
    caches = [Steer(vector, strength)(start.prefix) for strength in (0.0, 20.0)]
    rows = answer(model, start, caches, max_new_tokens=10)
    ending = next(t for t in rows[0].tolist()[1:] if t not in rows[1].tolist())
    module = copy(model.module)
    module.generation_config = deepcopy(model.module.generation_config)
    module.generation_config.eos_token_id = ending

    cut = answer(replace(model, module=module), start, caches, max_new_tokens=10)

    assert torch.equal(cut[0], rows[0][: rows[0].tolist().index(ending)])
    assert torch.equal(cut[1], rows[1])


def test_a_prompt_that_is_over_says_nothing(model: LanguageModel, vector: CacheVector) -> None:
    own = next(generate(model, model.encode(PROMPTS[0]), max_new_tokens=1))
    module = copy(model.module)
    module.generation_config = deepcopy(model.module.generation_config)
    module.generation_config.eos_token_id = own

    found = sweep(replace(model, module=module), vector, PROMPTS[:1], [1.0], max_new_tokens=4)

    assert [each.answers[0].broken for each in found.strengths] == ["says nothing"] * 2
    assert [each.nll for each in found.strengths] == [None, None]
    assert not found
    json.loads(found.to_json())


# The guard


@pytest.mark.parametrize(
    ("repetition", "nll", "why"),
    [
        (0.0, 0.0, None),
        (0.25, 1.0, None),
        (0.26, 0.0, "repeats itself"),
        (0.0, 1.01, "is unlikely"),
        (0.0, None, "says nothing"),
        (-0.5, -0.5, None),
    ],
)
def test_a_text_is_broken_beyond_a_bound(
    repetition: float, nll: float | None, why: str | None
) -> None:
    assert Guard(repetition=0.25, nll=1.0).breaks(repetition=repetition, nll=nll) == why


def steered(gain: float, broken: str | None = None) -> Steered:
    return Steered(text="a", tokens=1, repetition=0, nll=1.0, effect=gain, gain=gain, broken=broken)


@pytest.mark.parametrize(
    ("answers", "shows", "holds"),
    [
        ([steered(1.0)], True, True),
        ([steered(0.0)], False, True),
        ([steered(2.0), steered(2.1), steered(1.9), steered(2.0)], True, True),
        ([steered(3.0), steered(-1.0), steered(-1.5), steered(0.5)], False, True),  # not surely
        ([steered(2.0), steered(2.0, "is unlikely")], True, False),
        ([steered(2.0), steered(2.0), steered(2.0), steered(2.0, "is unlikely")], True, True),
    ],
)
def test_a_strength_is_useful_where_the_effect_shows_and_the_guard_holds(
    answers: list[Steered], shows: bool, holds: bool
) -> None:
    found = Strength.of(1.0, answers, Guard())

    assert (found.shows, found.holds, found.useful) == (shows, holds, shows and holds)


def test_too_much_breaks_the_text_and_a_stricter_guard_breaks_more(
    model: LanguageModel, vector: CacheVector, report: SweepReport
) -> None:
    strict = sweep(
        model, vector, PROMPTS, [1.0], max_new_tokens=12, guard=Guard(nll=-100.0, effect=-1.0)
    )

    assert report.strengths[-1].broken > 0
    assert all(each.broken == 1 for each in strict.strengths)
    assert not strict.window
    loose = sweep(
        model, vector, PROMPTS, [1.0], max_new_tokens=12,
        guard=Guard(nll=100.0, repetition=1.0, effect=-1.0),
    )  # fmt: skip
    assert list(loose.window) == [1]
    assert loose


def test_matches_are_counted_per_hundred_words() -> None:
    count = Matches(r"(?m)^\d+\.")

    assert count("1. Boil it.\n2. Eat it.") == pytest.approx(100 * 2 / 6)
    assert count("Version 1. of it") == 0
    assert count("") == 0


# The report


def test_it_prints_and_is_json(report: SweepReport) -> None:
    console = Console(width=120)

    with console.capture() as printed:
        console.print(report)

    for said in ("2 prompts, 12 tokens each", "as it is", "Useful strengths:", PROMPTS[0]):
        assert said in printed.get()
    document = json.loads(report.to_json())
    assert document["window"] == list(report.window)
    assert [len(each["answers"]) for each in document["strengths"]] == [2, 2, 2, 2]
    assert document["guard"]["nll"] == report.guard.nll


# What cannot be swept


@pytest.mark.parametrize(
    ("prompts", "strengths", "said"),
    [
        ((), [1.0], "0 prompts at 1 strengths"),
        (PROMPTS, [], "2 prompts at 0 strengths"),
        (PROMPTS, [1.0, float("nan")], "a strength is nan"),
    ],
)
def test_nothing_to_sweep_is_refused(
    model: LanguageModel,
    vector: CacheVector,
    prompts: tuple[str, ...],
    strengths: list[float],
    said: str,
) -> None:
    with pytest.raises(SteeringError, match=said):
        sweep(model, vector, prompts, strengths)


def test_another_models_vector_is_refused(other: LanguageModel, vector: CacheVector) -> None:
    with pytest.raises(IncompatibleModels, match="this vector is for"):
        sweep(other, vector, PROMPTS[:1], [1.0])


def test_prompts_that_cannot_be_steered_are_refused(
    model: LanguageModel, vector: CacheVector
) -> None:
    with pytest.raises(TextError, match="an empty prompt"):
        sweep(model, vector, [" "], [1.0])
    with pytest.raises(SteeringError, match="has no token -5"):
        sweep(model, replace(vector, at=-5), ["a"], [1.0])


def test_bounds_and_expressions_that_mean_nothing_are_refused() -> None:
    with pytest.raises(SteeringError, match="nll is nan"):
        Guard(nll=float("nan"))
    with pytest.raises(SteeringError, match="no regular expression"):
        Matches("(")


def test_the_callers_cache_stays_as_it_is(model: LanguageModel, vector: CacheVector) -> None:
    start = Start.of(model, PROMPTS[0])
    own = prefill(model, model.encode(PROMPTS[0])[None])

    answer(model, start, [Steer(vector, 3.0)(start.prefix), start.prefix], max_new_tokens=4)

    assert all(map(torch.equal, start.prefix.keys, own.keys))
    assert all(map(torch.equal, start.prefix.values, own.values))
