"""What is timed is what it says it is, and its figures are ratios within a round. No clock here."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from torch import Tensor, equal

from kvtransfer.errors import CacheLayoutError, TextError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.guides.bench import _case, _costs, _round, _text, bench
from kvtransfer.guides.ways import SHARES, STEPS, WAYS, Case, Way
from kvtransfer.hf.model import LanguageModel
from kvtransfer.report import Estimate

from ..theorems.compare import cache_error


@pytest.fixture(scope="module")
def model(tiny: Callable[..., LanguageModel]) -> LanguageModel:
    return tiny("llama", num_hidden_layers=2, max_position_embeddings=128)


@pytest.fixture
def case(model: LanguageModel, tmp_path: Path) -> Case:
    text, ids = _text(model, 24)
    return _case(model, None, None, text, ids, tmp_path / "pack")


def ways(case: Case) -> dict[str, Way]:
    return {way.name: way for make in WAYS for way in make(case)}


def test_only_prefilling_reads_the_prefix(case: Case) -> None:
    read: list[int] = []

    def count(module: object, given: object, named: dict[str, Tensor]) -> None:
        read.append(named["input_ids"].shape[1])

    hook = case.model.module.base_model.register_forward_pre_hook(count, with_kwargs=True)
    found = {}
    try:
        for name, way in ways(case).items():
            read.clear()
            way.run()
            found[name] = list(read)
    finally:
        hook.remove()

    steps = [1] * STEPS
    assert found == {
        "prefill": [24],
        "restore": [],
        "restore + graft": [],
        # All tokens through the first two layers, and those that were chosen through all.
        **{f"recompute {share:.0%}": [24, max(1, round(24 * share))] for share in SHARES},
        "decode on its own cache": steps,
        "decode after nothing": steps,
        "decode on a graft": steps,
    }


def test_what_was_restored_and_what_was_written_are_right(case: Case) -> None:
    found = {name: way.run() for name, way in ways(case).items()}

    restored = found["restore"]
    assert isinstance(restored, KVCache)
    assert all(map(equal, restored.keys, case.prefix.keys))
    for share in SHARES:  # of an exact cache nothing changes but what rounds otherwise
        repaired = found[f"recompute {share:.0%}"]
        assert isinstance(repaired, KVCache)
        assert cache_error(repaired, case.prefix) < 1e-5
    written = [found[f"decode {where}"] for where in ("on a graft", "on its own cache")]
    for each in (*written, found["decode after nothing"]):
        assert isinstance(each, Tensor)
        assert each.shape == (1, 1 + STEPS)
    assert written[0].tolist() == written[1].tolist()  # type: ignore[attr-defined]


def test_every_way_is_run_once_a_round_and_divided_by_its_own_round(model: LanguageModel) -> None:
    done: list[str] = []
    listed = [
        Way(name="slow", run=lambda: done.append("slow")),
        Way(name="quick", run=lambda: done.append("quick"), against="slow", tokens=2),
        Way(name="quick", run=lambda: done.append("never"), against="quick"),
    ]

    assert set(_round(model, listed)) == {"slow", "quick"}
    assert done == ["slow", "quick"]
    rounds = [{"slow": 10.0, "quick": 1.0}, {"slow": 40.0, "quick": 2.0}, {"slow": 8, "quick": 4.0}]
    slow, quick, itself = _costs(64, listed, rounds)
    assert (slow.seconds, slow.ratio) == (10.0, None)
    assert quick.seconds == 2.0
    assert quick.ratio is not None
    # The median of 0.1, 0.05 and 0.5: not the ratio of the medians, which is 0.2.
    assert (quick.ratio.value, quick.ratio.low, quick.ratio.high) == (0.1, 0.05, 0.5)
    assert itself.ratio is not None
    assert itself.ratio.value == 1.0


def test_a_report_tells_what_it_measured_and_what_it_left_out(model: LanguageModel) -> None:
    rounds: list[None] = []

    report = bench(model, tokens=(500, 16, 40), repeats=1, progress=lambda: rounds.append(None))

    assert len(rounds) == 3
    found = json.loads(report.to_json())
    assert {each["tokens"] for each in found["costs"]} == {16, 40}
    seconds = {(each["tokens"], each["name"]): each["seconds"] for each in found["costs"]}
    for each in found["costs"]:
        assert each["seconds"] > 0
        if each["against"] is not None:
            against = seconds[each["tokens"], each["against"]]
            assert each["ratio"]["value"] == pytest.approx(each["seconds"] / against)
            assert each["ratio"] == each["ratio"] | {"low": None, "high": None, "n": 1}
    (why,) = found["left_out"]
    assert why == "500 tokens: LlamaForCausalLM reads at most 128"
    console = Console(width=120)
    with console.capture() as capture:
        console.print(report)
    shown = capture.get()
    for words in ("restore ÷ prefill", "16 tokens", "prefill, seconds", "Left out: 500 tokens"):
        assert words in shown
    assert "map + graft" not in shown


def test_a_report_without_a_restored_prefix_is_not_true(model: LanguageModel) -> None:
    report = bench(model, tokens=(16,), repeats=1)
    (restored,) = (each for each in report.costs if each.name == "restore")
    quick = replace(restored, ratio=Estimate(0.1, None, None, 1))

    assert replace(report, costs=(quick,))
    assert not replace(report, costs=())
    assert not replace(report, costs=tuple(c for c in report.costs if c.name != "restore"))


def test_nothing_to_measure_is_an_error_that_says_why(model: LanguageModel) -> None:
    with pytest.raises(CacheLayoutError, match=r"500 tokens: .* at most 128; 600 tokens") as caught:
        bench(model, tokens=(500, 600))
    assert "--tokens" in str(caught.value.hint)
    for tokens, repeats in (((), 1), ((0,), 1), ((8,), 0)):
        with pytest.raises(ValueError, match="must be positive"):
            bench(model, tokens=tokens, repeats=repeats)
    with pytest.raises(ValueError, match="go together"):
        bench(model, source=model)


def test_what_has_no_room_is_refused_before_any_text_is_cut(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: list[int] = []
    encode = LanguageModel.encode

    def counting(self: LanguageModel, text: str) -> Tensor:
        ids = encode(self, text)
        cut.append(len(ids))
        return ids

    monkeypatch.setattr(LanguageModel, "encode", counting)
    with pytest.raises(CacheLayoutError) as caught:
        bench(model, tokens=(10**12, 120), repeats=1)

    assert not cut
    # 120 alone would fit: so it says what does not.
    assert "120 tokens: LlamaForCausalLM reads at most 128, and 16 tokens are decoded after" in (
        caught.value.message
    )
    assert caught.value.message.endswith(
        "1,000,000,000,000 tokens: LlamaForCausalLM reads at most 128"
    )
    bench(model, tokens=(128 - STEPS,), repeats=1)  # the longest that has room
    assert cut


def test_more_text_than_there_is_is_looked_for_once(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut: list[int] = []
    encode = LanguageModel.encode

    def counting(self: LanguageModel, text: str) -> Tensor:
        cut.append(len(text))
        return encode(self, text)

    monkeypatch.setattr(LanguageModel, "encode", counting)

    with pytest.raises(TextError, match=r"exactly 1000000000 tokens"):
        _text(model, 10**9)

    assert len(cut) == 1


def test_the_text_has_exactly_as_many_tokens_as_was_asked(model: LanguageModel) -> None:
    for length in (1, 2, 17, 90):
        text, ids = _text(model, length)
        assert ids.shape == (1, length)
        assert equal(model.encode(text), ids[0])
