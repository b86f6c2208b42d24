"""A probe knows a good pair from a hopeless one, and its shortcut from the long way round."""

import io
import json
import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from kvtransfer.errors import DeviceError, IncompatibleModels, TextError, UnsupportedModel
from kvtransfer.fitting.affine import Affine
from kvtransfer.fitting.dual import STRENGTHS, leave_out
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.probe import WINDOWS, probe
from kvtransfer.fitting.probe_report import ENOUGH, FALLEN, ProbeReport
from kvtransfer.fitting.texts import builtin
from kvtransfer.hf.model import LanguageModel, load, wrap
from kvtransfer.report import Estimate

from ..theorems.twins import attentions, twin_of

RUSSIAN = (
    "Старый мельник жил на краю деревни, где река поворачивала к лесу. Каждое утро он открывал "
    "ставни, слушал, как шумит вода, и считал мешки с зерном, которые привезли накануне. Соседи "
    "говорили, что он никогда не ошибается в счёте, но сам он только улыбался и отвечал, что "
    "ошибается чаще других, просто замечает это раньше. Однажды осенью к мельнице подъехала "
    "телега, а на ней сидела девочка лет десяти с большой корзиной яблок. Она сказала, что её дед "
    "заболел и просил обменять яблоки на муку, потому что денег в доме не осталось."
)
"""Written for this test."""

JAPANESE = (
    "むかしむかし、山のふもとの小さな村に、年老いた時計職人が住んでいました。彼は毎朝、川で顔を洗い、"
    "工房の窓を開け、壁にかけられた古い時計を一つずつ巻いていきました。ある冬の夜、雪が静かに降りつもる"
    "ころ、見知らぬ旅人が戸をたたきました。旅人は手のひらほどの懐中時計を差し出し、「これは私の祖父のもの"
    "ですが、もう三十年も止まったままなのです」と言いました。職人は眼鏡をかけ、ふたを開け、しばらく黙って"
    "中をのぞきこみました。歯車はさびておらず、ぜんまいも折れていません。それなのに針は動かないのです。"
)
"""Written for this test."""


@pytest.fixture(scope="module")
def small() -> LanguageModel:
    return load("tiny-4l")


@pytest.fixture(scope="module")
def large() -> LanguageModel:
    return load("tiny-6l")


@pytest.fixture(scope="module")
def shipped() -> KVMapping:
    return KVMapping.from_pretrained("tiny-4l-to-tiny-6l")


@pytest.fixture(scope="module")
def good(small: LanguageModel, large: LanguageModel) -> ProbeReport:
    return probe(small, large, builtin("heldout"))


def permuted_rows(model: LanguageModel) -> LanguageModel:
    """Every token gets another token's embedding."""
    module: Any = deepcopy(model.module)
    weight = module.get_input_embeddings().weight
    order = torch.randperm(len(weight), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        weight.copy_(weight[order].clone())
    return wrap(module, model.tokenizer)


def untrained(model: LanguageModel) -> LanguageModel:
    """The same architecture with fresh weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module: Any = type(model.module)(model.module.config)
    return wrap(module.to(dtype=model.dtype).eval(), model.tokenizer)


def permuted_heads(model: LanguageModel) -> LanguageModel:
    """KV heads in reverse order within every layer, and whoever reads them in theirs."""
    module = deepcopy(model.module)
    with torch.no_grad():
        for attention in attentions(module, model.spec.layers):
            for heads in (attention.keys, attention.values):
                heads.weight.copy_(heads.weight.flip(0).clone())
            queries = attention.queries.weight.unflatten(0, (-1, attention.group))
            queries.copy_(queries.flip(0).clone())
            output = attention.output.weight
            columns = output.unflatten(1, (-1, attention.group * model.spec.layers[0].value_dim))
            output.copy_(columns.flip(1).flatten(1).clone())
    return wrap(module, model.tokenizer)


def text_of(report: ProbeReport) -> str:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report)
    return console.export_text()


def test_a_trained_pair_transfers(good: ProbeReport) -> None:
    assert good
    assert good.verdict == "transfers"
    assert good.score.low is not None
    assert good.score.low > 0.4
    assert good.prefix_worth.value > 0.2
    assert (good.tokens, good.length, good.score.n) == (1024, 128, 8)
    assert good.score.value == pytest.approx(sum(good.layers) / len(good.layers))


def test_so_does_the_other_direction_and_a_shorter_text(
    small: LanguageModel, large: LanguageModel
) -> None:
    found = probe(large, small, builtin("heldout"), tokens=512)

    assert found
    assert (found.tokens, found.length, found.score.n) == (512, 64, 8)


def test_permuted_heads_are_no_obstacle(small: LanguageModel, large: LanguageModel) -> None:
    turned = permuted_heads(large)

    exact = probe(large, turned, builtin("heldout"), tokens=512)
    from_other = probe(small, turned, builtin("heldout"), tokens=512)

    assert exact
    assert exact.score.value > 0.95
    straight = probe(small, large, builtin("heldout"), tokens=512)
    assert from_other.score.value == pytest.approx(straight.score.value, abs=0.03)


@pytest.mark.parametrize("spoil", [permuted_rows, untrained])
def test_a_spoilt_target_does_not_and_the_words_say_why(
    small: LanguageModel, large: LanguageModel, spoil: Callable[..., LanguageModel]
) -> None:
    found = probe(small, spoil(large), builtin("heldout"), tokens=512)

    assert not found
    assert found.verdict == "does not transfer"
    assert found.score.high is not None
    assert found.score.high < ENOUGH  # its score alone would do
    assert found.blocked is not None
    assert found.blocked in text_of(found)


@pytest.mark.parametrize("spoil", [permuted_rows, untrained])
def test_nor_does_a_spoilt_source_though_nothing_ails_the_target(
    small: LanguageModel, large: LanguageModel, spoil: Callable[..., LanguageModel]
) -> None:
    found = probe(spoil(small), large, builtin("heldout"), tokens=512)

    assert found.verdict == "does not transfer"
    assert found.blocked is None
    assert "says too little" in found.sentence()


def test_a_twin_of_an_untrained_model_has_a_perfect_score_and_is_of_no_use(
    tiny: Callable[..., LanguageModel],
) -> None:
    model = tiny("llama", num_hidden_layers=2)

    found = probe(model, twin_of(model), builtin("heldout"), tokens=512)

    assert found.score.value > 0.95
    assert found.verdict == "does not transfer"
    assert found.blocked is not None


def test_a_mapping_is_judged_as_it_is(
    small: LanguageModel, large: LanguageModel, shipped: KVMapping, good: ProbeReport
) -> None:
    found = probe(small, large, builtin("heldout"), mapping=shipped)

    assert found
    assert found.judged == "mapping"
    assert found.reference == found.score
    assert found.score.value > good.score.value  # it saw a hundred times as much text


@pytest.mark.parametrize("text", [RUSSIAN, JAPANESE], ids=["Cyrillic", "Japanese"])
def test_a_mapping_on_another_script_is_found_out(
    small: LanguageModel, large: LanguageModel, shipped: KVMapping, text: str
) -> None:
    found = probe(small, large, [text], mapping=shipped, tokens=512)

    assert found.verdict == "does not transfer"
    assert found.score.value < 0
    assert found.reference is not None
    assert found.reference.value > 0.6
    assert f"{found.reference:.2f}" in found.sentence()


def test_shuffled_maps_are_worth_nothing(
    small: LanguageModel, large: LanguageModel, shipped: KVMapping
) -> None:
    control = replace(shipped, layers=shipped.shuffled)

    found = probe(small, large, builtin("heldout"), mapping=control, tokens=512)

    assert found.verdict == "does not transfer"
    assert found.score.value < 0.1


def test_a_mapping_of_another_pair_is_refused(
    small: LanguageModel, large: LanguageModel, shipped: KVMapping
) -> None:
    with pytest.raises(IncompatibleModels, match="asked for"):
        probe(large, small, builtin("heldout"), mapping=shipped)


def test_too_little_text_is_refused_and_so_are_too_few_tokens(
    small: LanguageModel, large: LanguageModel
) -> None:
    with pytest.raises(TextError, match="a probe needs 128"):
        probe(small, large, ["The miller counted his sacks. " * 4])
    with pytest.raises(ValueError, match="128 to 4096 tokens, got 100"):
        probe(small, large, builtin("heldout"), tokens=100)


def test_a_target_whose_attention_returns_nothing_from_any_prefix_is_refused(
    tiny: Callable[..., LanguageModel],
) -> None:
    module = deepcopy(tiny("llama", num_hidden_layers=1).module)
    with torch.no_grad():
        for attention in attentions(module, tiny("llama", num_hidden_layers=1).spec.layers):
            attention.values.weight.zero_()
    silent = wrap(module, tiny("llama").tokenizer)

    with pytest.raises(UnsupportedModel, match="none tells one prefix from another"):
        probe(tiny("llama"), silent, builtin("heldout"), tokens=128)


def test_numbers_that_overflow_are_an_error(
    small: LanguageModel, large: LanguageModel, shipped: KVMapping
) -> None:
    first = shipped.layers[0]
    assert isinstance(first.values, Affine)
    huge = replace(first.values, bias=torch.full_like(first.values.bias, 1e30))
    broken = replace(first, values=huge)
    mapping = replace(shipped, layers=(broken, *shipped.layers[1:]))

    with pytest.raises(DeviceError, match="infinite numbers in bfloat16"):
        probe(small, large, builtin("heldout"), mapping=mapping, tokens=128)


def test_json_is_stable_and_says_what_the_report_says(good: ProbeReport) -> None:
    document = json.loads(good.to_json())

    assert document["verdict"] == "transfers"
    assert document["score"] == good.score.to_dict()
    assert document["prefix_worth"] == good.prefix_worth.to_dict()
    assert good.to_json() == good.to_json()
    assert good.sentence() in text_of(good)
    hidden = json.loads(replace(good, layers=(math.nan, *good.layers[1:])).to_json())
    assert hidden["layers"][0] is None


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, "transfers"),
        ({"score": Estimate(0.4, ENOUGH - 0.1, 0.5, 8)}, "doubtful"),
        ({"score": Estimate(0.2, 0.1, ENOUGH - 0.01, 8)}, "does not transfer"),
        ({"score": Estimate(0.4, None, None, 8)}, "doubtful"),
        ({"prefix_worth": Estimate(0.1, -0.1, 0.3, 8)}, "does not transfer"),
        ({"nll": Estimate(7.5, 7.0, 8.0, 8)}, "does not transfer"),
        (
            {"reference": Estimate(0.52 / FALLEN + 0.1, 0.8, 0.9, 8), "judged": "mapping"},
            "doubtful",
        ),
    ],
)
def test_a_verdict_is_what_the_intervals_allow(
    good: ProbeReport, change: dict[str, object], verdict: str
) -> None:
    found = replace(good, **change)  # type: ignore[arg-type]

    assert found.verdict == verdict
    assert bool(found) == (verdict == "transfers")
    assert found.sentence().startswith(verdict.capitalize())


def rows(windows: int, length: int, width: int, *, seed: int) -> Tensor:
    return torch.randn(windows, length, width, generator=torch.Generator().manual_seed(seed))


def test_leaving_a_window_out_in_closed_form_is_leaving_it_out() -> None:
    given = rows(WINDOWS, 6, 90, seed=0)
    wanted = torch.tanh(given @ rows(1, 90, 5, seed=1)[0] / 9) + 3

    (made,) = leave_out([given], [wanted])

    assert made.shape == wanted.shape
    x, y = given[:, 1:].double(), wanted[:, 1:].double()
    flat = x.flatten(0, 1)
    centred = flat - flat.mean(0)
    kernel = centred @ centred.T
    scale = kernel.trace() / len(kernel)
    for window in range(WINDOWS):
        others = [each for each in range(WINDOWS) if each != window]
        a, b = x[others].flatten(0, 1), y[others].flatten(0, 1)
        refits = [refit(a, b, x[window], strength * float(scale)) for strength in STRENGTHS]
        nearest = min(float((each - made[window, 1:]).abs().max()) for each in refits)
        assert nearest < 1e-4  # at one of the strengths it is that refit
    torch.testing.assert_close(made[0, 0], wanted[1:, 0].mean(0))


def refit(a: Tensor, b: Tensor, x: Tensor, strength: float) -> Tensor:
    """Ridge in its primal form, with a constant."""
    centre, mean = a.mean(0), b.mean(0)
    a, b = a - centre, b - mean
    if math.isinf(strength):
        return mean.expand(len(x), -1)
    gram = a.T @ a + strength * torch.eye(a.shape[1], dtype=a.dtype)
    made: Tensor = (x - centre) @ torch.linalg.solve(gram, a.T @ b) + mean
    return made


def test_what_has_nothing_to_do_with_the_source_is_read_as_its_average() -> None:
    given, wanted = rows(WINDOWS, 40, 64, seed=2), rows(WINDOWS, 40, 8, seed=3)

    (made,) = leave_out([given], [wanted])

    lost, whole = (made - wanted).square().mean(), wanted.square().mean()
    assert lost / whole == pytest.approx(1, abs=0.05)


def test_a_row_at_position_0_of_a_thousand_times_the_size_changes_nothing_after_it() -> None:
    given = rows(WINDOWS, 12, 64, seed=4)
    wanted = given[..., :8] * 2
    sunk = given.clone()
    sunk[:, 0] *= 1000

    (made,), (again,) = leave_out([given], [wanted]), leave_out([sunk], [wanted])

    torch.testing.assert_close(made, again)
