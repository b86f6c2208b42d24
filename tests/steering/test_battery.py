"""The persona battery on tiny models: what it transplants, and what that does to the cache."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

from kvtransfer.errors import PersonaError, SteeringError
from kvtransfer.hf.model import LanguageModel
from kvtransfer.report import Estimate
from kvtransfer.steering.battery import (
    Stage,
    battery,
    is_own,
    require_same_tokens,
    steps,
)
from kvtransfer.steering.battery_report import BatteryReport
from kvtransfer.steering.configurations import CONFIGURATIONS, PARTS_OF_MID
from kvtransfer.steering.frame import openings
from kvtransfer.steering.persona import Persona
from kvtransfer.steering.trajectory import write
from tests.hf.architectures import MODELS

SHORT = Persona(
    name="clerk",
    prompt="Be a clerk.",
    markers=("form", "a"),
    texts=("Sign the form here.", "The form is green.", "Form nine, please.", "No form, no dog."),
)
LONG = Persona(
    name="sailor",
    prompt="You are a sailor and tell of storms and ships.",
    markers=("ship", "e"),
    texts=("The ship went down.", "What a storm it was!", "We sailed at dawn.", "A dog on a ship."),
)
TOPIC = "Say what you did today."
BY_NAME = {each.name: each for each in CONFIGURATIONS}

Tiny = Callable[..., LanguageModel]


@pytest.fixture(scope="module")
def deep(tiny: Tiny) -> LanguageModel:
    """With layers for every band."""
    return tiny("llama", num_hidden_layers=8)


@pytest.fixture(scope="module")
def report(deep: LanguageModel) -> BatteryReport:
    return battery(deep, SHORT, LONG, topic=TOPIC, samples=24, tokens=8, persistence=16)


def stage(model: LanguageModel, source: Persona, target: Persona, **more: Any) -> Stage:
    settings: dict[str, Any] = {"samples": 3, "tokens": 6} | more
    return Stage(
        model,
        *openings(model, source, target, TOPIC),
        **settings,
        temperature=0.7,
        seed=0,
        watch=(),
        progress=lambda: None,
    )


@pytest.mark.parametrize("pair", [(SHORT, LONG), (LONG, SHORT)], ids=["longer", "shorter"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_replacing_everything_is_the_targets_own_run(
    deep: LanguageModel, pair: tuple[Persona, Persona], attention: str
) -> None:
    """Bit for bit: tokens, keys and values. A band alone, or nothing, is another run."""
    before = deep.module.config._attn_implementation
    deep.module.set_attn_implementation(attention)
    try:
        ours = stage(deep, *pair)
        own = ours.run(ours.target)
        runs = {name: ours.cell(BY_NAME[name], own) for name in ("full", "mid", "none")}
    finally:
        deep.module.set_attn_implementation(before)

    assert is_own(runs["full"], own)
    assert not is_own(runs["mid"], own)
    assert not is_own(runs["none"], own)


@pytest.mark.parametrize(("architecture", "config"), MODELS.values(), ids=MODELS)
def test_it_runs_on_any_model(tiny: Tiny, architecture: str, config: dict[str, Any]) -> None:
    ours = stage(tiny(architecture, **config), SHORT, LONG, samples=2, tokens=3)
    own = ours.run(ours.target)

    assert is_own(ours.cell(BY_NAME["full"], own), own)


@pytest.mark.parametrize(("architecture", "movable"), [("llama", True), ("gpt2", False)])
def test_a_prompt_that_cannot_stand_further_on_is_filled_up(
    tiny: Tiny, architecture: str, movable: bool
) -> None:
    short, long = openings(tiny(architecture), SHORT, LONG, TOPIC)

    assert short.width == long.width == len(long.ids)
    assert long.filled == 0
    assert (short.filled == 0) == movable
    assert (short.prefix.hidden is None) != movable
    assert len(short.ids) == len(long.ids) - (0 if not movable else 16)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt_neox"])
def test_the_frame_leaves_a_run_as_it_is(tiny: Tiny, architecture: str) -> None:
    """The shorter prompt, further on and behind hidden columns, writes what it writes at 0."""
    model = tiny(architecture)
    short, _ = openings(model, SHORT, LONG, TOPIC)
    alone, _ = openings(model, SHORT, replace(SHORT, prompt="Be a guard."), TOPIC)
    uniforms = torch.rand(4, 8, generator=torch.Generator().manual_seed(1))
    assert short.width > alone.width

    in_frame, at_start = (write(model, each, uniforms, temperature=0.7) for each in (short, alone))

    assert torch.equal(in_frame.ids, at_start.ids)
    for layer in range(len(in_frame.cache)):
        torch.testing.assert_close(
            in_frame.written(layer)[1], at_start.written(layer)[1], atol=1e-4, rtol=1e-4
        )


def test_gaps_are_high_in_the_band_that_is_replaced_and_near_zero_elsewhere(
    report: BatteryReport,
) -> None:
    for name in report.bands:
        cell = report.cell(name)
        for band in report.bands:
            gap = cell.v_gap[band].value
            assert gap > 0.8 if band == name else abs(gap) < 0.15, (name, band, gap)
    for band in report.bands:
        assert abs(report.cell("none").v_gap[band].value) < 0.15, band
        assert report.cell("full").v_gap[band].value > 0.8, band


def test_a_mixture_is_partly_aligned_and_wrong_steps_are_not(report: BatteryReport) -> None:
    here = {cell.name: cell.v_here.value for cell in report.cells}

    assert here["none"] < here["α 0.25"] < here["α 0.5"] < here["mid"]
    assert max(here["lag"], here["shuffle"]) < 0.4 * here["mid"]


def test_the_control_has_the_same_tokens_under_another_prompt(deep: LanguageModel) -> None:
    ours = stage(deep, SHORT, LONG)
    own = ours.run(ours.target)

    run = ours.cell(BY_NAME["same tokens"], own)

    assert torch.equal(run.ids, own.ids)
    assert not torch.equal(ours.source.ids, ours.target.ids)
    assert not torch.equal(run.written(1)[1], own.written(1)[1])
    # Layer 0 sees tokens and positions alone, and they are the same.
    torch.testing.assert_close(run.written(0)[1], own.written(0)[1])
    assert run.read is run.cache


def test_a_control_of_other_tokens_is_refused(deep: LanguageModel) -> None:
    ours = stage(deep, SHORT, LONG)
    own = ours.run(ours.target)
    ids = own.ids.clone()
    ids[0, 4] += 1
    other = ours.run(ours.source, seed=7)

    with pytest.raises(SteeringError, match="18 in all, from step 4 on"):
        require_same_tokens(replace(own, ids=ids), own)
    with pytest.raises(SteeringError, match="layer 0"):
        require_same_tokens(replace(other, ids=own.ids), own)


def test_rows_draw_by_numbers_of_their_own(deep: LanguageModel) -> None:
    few, many = stage(deep, SHORT, LONG, samples=2), stage(deep, SHORT, LONG, samples=4)

    assert torch.equal(many.uniforms(0)[:2], few.uniforms(0))
    assert len(many.uniforms(0).unique()) == many.uniforms(0).numel()


def test_a_run_leaves_the_model_and_the_trajectory_as_they_were(deep: LanguageModel) -> None:
    ours = stage(deep, SHORT, LONG)
    own = ours.run(ours.target)
    kept = [block.clone() for block in (*own.cache.keys, *own.cache.values)]

    ours.cell(BY_NAME["mid"], own)
    again = ours.run(ours.target)

    assert all(map(torch.equal, (*own.cache.keys, *own.cache.values), kept))
    assert is_own(again, own)


def test_a_shallow_model_goes_without_parts_of_mid(tiny: Tiny) -> None:
    found = battery(tiny("llama"), SHORT, LONG, topic=TOPIC, samples=2, tokens=2, persistence=0)

    left = {cell.name for cell in found.cells}
    missing = set(BY_NAME) - left
    assert missing
    assert missing < set(PARTS_OF_MID)
    assert all(any(name in note for note in found.notes) for name in missing)


def test_progress_is_told_as_often_as_announced(deep: LanguageModel) -> None:
    told: list[None] = []

    battery(
        *(deep, SHORT, LONG),
        topic=TOPIC,
        samples=1,
        tokens=2,
        persistence=4,
        progress=lambda: told.append(None),
    )

    assert len(told) == steps(deep, tokens=2, persistence=4)


def test_the_report_says_the_same_in_json_and_as_a_table(report: BatteryReport) -> None:
    console = Console(width=120, record=True)
    with console.capture() as capture:
        console.print(report)
    shown = capture.get()
    document = json.loads(report.to_json())

    assert list(document["configurations"]) == sorted(BY_NAME)
    assert all(name in shown for name in BY_NAME)
    assert "…" not in shown  # nothing is cut off
    assert document["full_is_target"] is True
    assert document["configurations"]["same tokens"]["forced"] is True
    cell = document["configurations"]["mid"]
    assert cell["v_gap"].keys() == {"early", "mid", "late", "edited"}
    assert cell["v_gap"]["mid"] == cell["v_gap"]["edited"]
    assert len(cell["persistence"]) == 2
    assert len(cell["texts"]) == 24
    counts = [cell["markers"][way]["value"] for way in ("deduplicated", "boundary", "naive")]
    assert counts == sorted(counts)


def test_a_report_is_true_only_if_the_personas_are_apart_and_everything_is_all(
    report: BatteryReport,
) -> None:
    def gaining(value: float, low: float | None) -> BatteryReport:
        gain = Estimate(value, low, None if low is None else 2 * value - low, 24)
        cells = (replace(cell, gain=gain) if cell.name == "full" else cell for cell in report.cells)
        return replace(report, cells=tuple(cells))

    apart = gaining(9.0, 4.0)

    assert apart
    assert "markers in 100 words" in apart.sentence()
    assert not gaining(9.0, -1.0)
    assert not gaining(9.0, None)
    assert not replace(apart, exact=False)
    assert "no other figure" in replace(apart, exact=False).sentence()


def test_what_cannot_be_put_in_one_frame_is_refused(deep: LanguageModel, tiny: Tiny) -> None:
    with pytest.raises(SteeringError, match="the same prompt"):
        openings(deep, SHORT, SHORT, TOPIC)
    with pytest.raises(SteeringError, match="topic is empty"):
        openings(deep, SHORT, LONG, " ")
    with pytest.raises(SteeringError, match="is empty"):
        battery(tiny("llama", num_hidden_layers=1), SHORT, LONG, topic=TOPIC, samples=1)
    with pytest.raises(PersonaError, match="3 example texts"):
        battery(deep, SHORT, replace(LONG, texts=LONG.texts[:3]), topic=TOPIC, samples=1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"samples": 0},
        {"tokens": 1},
        {"persistence": 75},
        {"persistence": -50},
        {"temperature": 0.0},
        {"temperature": float("nan")},
    ],
    ids=str,
)
def test_settings_that_mean_nothing_are_refused(deep: LanguageModel, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"needed|multiple|temperature"):
        battery(deep, SHORT, LONG, topic=TOPIC, **wrong)


def test_a_chat_template_is_used_where_there_is_one(deep: LanguageModel) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<answer>"
    deep.tokenizer.chat_template = template
    try:
        short, long = openings(deep, SHORT, LONG, TOPIC)
    finally:
        deep.tokenizer.chat_template = None

    assert deep.decode(long.ids) == f"<system>{LONG.prompt}\n<user>{TOPIC}\n<answer>"
    assert torch.equal(short.ids[-5:], long.ids[-5:])
