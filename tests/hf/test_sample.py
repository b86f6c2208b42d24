"""A model writes what its own distribution says, and nothing else has a say in it."""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from kvtransfer.errors import UnsupportedModel
from kvtransfer.hf.model import LanguageModel, wrap
from kvtransfer.hf.run import generate, score
from kvtransfer.hf.sample import Sampling, sample, start_token

OWN = Sampling(first_temperature=1.0, floor=0.0)
"""The model's own distribution, as it is."""

ARCHITECTURES = [
    ("llama", {}),
    ("gpt2", {}),
    ("mistral", {"sliding_window": 8}),
    ("gemma3_text", {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}),
]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ending(model: LanguageModel, ends: int) -> LanguageModel:
    """The same model, where the first ``ends`` ids end a text: documents of many lengths."""
    model.module.generation_config.eos_token_id = list(range(ends))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_seed_gives_one_text_and_another_seed_another(
    tiny: Callable[..., LanguageModel], dtype: torch.dtype
) -> None:
    made = tiny("llama", num_hidden_layers=2)
    module: Any = made.module
    model = wrap(module.to(dtype), made.tokenizer)

    first, again, other = (
        [ids.tolist() for ids in sample(model, 4, length=24, random=seeded(seed))]
        for seed in (3, 3, 4)
    )

    assert first == again
    assert first != other
    assert len({tuple(ids) for ids in first}) == 4


def test_the_callers_random_numbers_and_screen_are_left_alone(
    model: LanguageModel, capfd: pytest.CaptureFixture[str]
) -> None:
    before = torch.get_rng_state()

    sample(model, 2, length=8, random=seeded())

    assert torch.equal(torch.get_rng_state(), before)
    assert capfd.readouterr() == ("", "")


def test_tokens_come_as_often_as_the_model_says(tiny: Callable[..., LanguageModel]) -> None:
    """First tokens, and second ones after the commonest first; an end is an outcome too."""
    model = ending(tiny("llama", num_hidden_layers=2), 60)
    start = start_token(model)
    texts = [ids.tolist() for ids in sample(model, 4000, length=2, random=seeded(), sampling=OWN)]
    common, _ = Counter(ids[0] for ids in texts).most_common(1)[0]

    firsts = score(model, torch.tensor([[start]]))[0, -1]
    firsts[:60] = -torch.inf
    seconds = score(model, torch.tensor([[start, common]]))[0, -1].softmax(-1)
    seconds = torch.cat((seconds[60:], seconds[:60].sum()[None]))  # all ends are one outcome

    after = [(ids[1:] or [512])[0] - 60 for ids in texts if ids[0] == common]
    assert len(after) > 100
    assert surprise([ids[0] for ids in texts], firsts.softmax(-1)) > 1e-3
    assert surprise(after, seconds) > 1e-3
    # The twin: the test does tell one distribution from a flatter one.
    assert surprise([ids[0] for ids in texts], (firsts / 1.3).softmax(-1)) < 1e-9


def surprise(drawn: list[int], chances: torch.Tensor) -> float:
    """p-value of Pearson's χ², where outcomes expected less than five times are one outcome."""
    expected = chances.double() * len(drawn)
    counts = torch.bincount(torch.tensor(drawn), minlength=len(chances)).double()
    rare = expected < 5
    pooled = [torch.cat((x[~rare], x[rare].sum()[None])) for x in (counts, expected)]
    return float(chisquare(pooled[0], pooled[1] * pooled[0].sum() / pooled[1].sum()).pvalue)


@pytest.mark.parametrize(("architecture", "config"), ARCHITECTURES)
def test_the_cache_changes_nothing(
    tiny: Callable[..., LanguageModel], architecture: str, config: dict[str, Any]
) -> None:
    """The same random numbers, over the logits of each text read anew from its start and alone."""
    model = ending(tiny(architecture, num_hidden_layers=2, **config), 20)
    sampling = Sampling()

    texts = [ids.tolist() for ids in sample(model, 6, length=20, random=seeded(1))]

    numbers, random = [], seeded(1)
    for _ in range(20):
        numbers.append(torch.rand(6, generator=random))
    for row, text in enumerate(texts):
        ids = [start_token(model)]
        for position, uniform in enumerate(numbers):
            logits = score(model, torch.tensor([ids]))[:, -1]
            logits[:, len(model.tokenizer) :] = -torch.inf
            if position == 0:
                logits[:, :20] = -torch.inf
            token = sampling.choose(logits, uniform[row : row + 1], first=position == 0)
            if int(token) < 20:
                break
            ids.append(int(token))
        assert ids[1:] == text
    assert len({len(text) for text in texts}) > 1  # rows did leave the batch on the way


def test_a_floor_of_one_is_the_best_token_again_and_again(model: LanguageModel) -> None:
    (written,) = sample(model, 1, length=12, random=seeded(), sampling=Sampling(floor=1.0))

    start = torch.tensor([start_token(model)])
    assert written.tolist() == list(generate(model, start, max_new_tokens=12))


def test_below_the_floor_no_token_is_drawn_and_above_it_every_one() -> None:
    chances = torch.tensor([0.5, 0.04, 0.06, 0.0, 0.4])
    logits = chances.log().expand(1000, -1)
    uniform = torch.arange(1000) / 1000

    drawn = Sampling(floor=0.1).choose(logits, uniform)

    share = torch.bincount(drawn, minlength=5) / 1000
    torch.testing.assert_close(
        share, torch.tensor([0.5, 0, 0.06, 0, 0.4]) / 0.96, atol=2e-3, rtol=0
    )


def test_the_ends_of_the_unit_interval_draw_tokens_that_have_a_chance() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]])

    for number, token in ((0.0, 1), (1 - 2**-24, 2)):
        assert Sampling().choose(logits, torch.tensor([number])).tolist() == [token]


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("gpt2", {}),
        ("llama", {}),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}}),
    ],
    ids=["learned", "rotary", "dynamic"],
)
def test_no_text_outgrows_the_models_positions(
    tiny: Callable[..., LanguageModel], architecture: str, config: dict[str, Any]
) -> None:
    model = tiny(architecture, num_hidden_layers=1, max_position_embeddings=16, **config)

    texts = sample(model, 4, length=100, random=seeded())

    assert max(map(len, texts)) == 16
    assert all(score(model, ids[None]).isfinite().all() for ids in texts)


def test_no_text_is_empty_or_holds_its_end(tiny: Callable[..., LanguageModel]) -> None:
    model = ending(tiny("llama", num_hidden_layers=1), 300)

    texts = sample(model, 50, length=30, random=seeded())

    assert min(map(len, texts)) == 1
    assert all(bool((ids >= 300).all()) for ids in texts)


def test_a_tokenizer_without_a_start_or_an_end_is_refused(model: LanguageModel) -> None:
    nameless = replace(model, tokenizer=deepcopy(model.tokenizer))
    nameless.tokenizer.eos_token = None

    with pytest.raises(UnsupportedModel, match="neither the start nor the end") as caught:
        sample(nameless, 1, length=1, random=seeded())

    assert caught.value.hint


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_refused(
    tiny: Callable[..., LanguageModel], wrong: float
) -> None:
    model = tiny("llama", num_hidden_layers=1)
    head: Any = model.module.get_output_embeddings()
    with torch.no_grad():
        head.weight[300] = wrong

    with pytest.raises(UnsupportedModel, match="float32 has logits that are not finite") as caught:
        sample(model, 1, length=1, random=seeded())

    assert "--dtype" in str(caught.value.hint)


@pytest.mark.parametrize(
    "wrong", [{"temperature": 0.0}, {"first_temperature": -1.0}, {"floor": 1.5}], ids=str
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"not .*{next(iter(wrong.values()))}"):
        Sampling(**wrong)
