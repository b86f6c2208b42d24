"""The map that is chosen is the best of those that were tried and may be had."""

import json
import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from kvtransfer.errors import BudgetError, UnderdeterminedFit
from kvtransfer.fitting.auto import choose_map
from kvtransfer.fitting.capture import Capture, Sample, capture
from kvtransfer.fitting.choice import choose
from kvtransfer.fitting.chunks import chunks
from kvtransfer.fitting.columns import Columns
from kvtransfer.fitting.layers import greedy, rank_layers
from kvtransfer.fitting.moments import Moments
from kvtransfer.fitting.report import FitReport
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.storage import Dtype
from kvtransfer.fitting.texts import builtin
from kvtransfer.fitting.tried import AutoReport, Budget, Candidate, Tried
from kvtransfer.hf.model import LanguageModel

from .test_layers import DEPTH, FEATURES, HEADS, WIDTH, spec

SETTINGS = FitSettings(tokens=1024, chunk=64, batch=16)


def take(source: LanguageModel, target: LanguageModel, tokens: int) -> Capture:
    sequences = chunks(
        builtin("fit"), source.encode, length=64, separator=source.tokenizer.eos_token_id
    )
    found = capture(
        source,
        target,
        sequences,
        tokens=tokens,
        batch=16,
        features="both",
        before=(0, 2),
        attention=True,
    )
    return replace(found, windows=found.windows[:1])  # what is tried takes the time


@pytest.fixture(scope="module")
def captured(source: LanguageModel, target: LanguageModel) -> Capture:
    return take(source, target, 1024)


@pytest.fixture(scope="module")
def chosen(captured: Capture, source: LanguageModel, target: LanguageModel) -> FitReport:
    return choose_map(captured, source, target, SETTINGS)


def auto_of(report: FitReport) -> AutoReport:
    assert report.auto is not None
    return report.auto


def test_the_least_attention_error_is_taken_and_of_close_ones_the_least_kl(
    chosen: FitReport,
) -> None:
    auto = auto_of(chosen)

    errors = {each.name: each.tried.attention_error for each in auto.candidates}
    close = {name for name, error in errors.items() if error <= 1.1 * min(errors.values())}
    assert auto
    assert auto.best.name in close < set(errors)
    assert auto.best.tried.kl == min(
        each.tried.kl for each in auto.candidates if each.name in close
    )
    assert len(errors) == len(auto.candidates) > 8
    assert auto.candidates[0].name.startswith("paper, ")
    for solver in ("both", "before", "headwise", "procrustes", "lowrank", "attention"):
        assert any(solver in name for name in errors)
    assert auto.best.nbytes == chosen.mapping.nbytes()
    assert chosen.mapping.shuffled


def test_its_json_says_what_was_tried_and_what_was_taken(chosen: FitReport) -> None:
    found = json.loads(chosen.to_json())["auto"]

    assert found["budget"] == {"bytes": None, "microseconds": None}
    assert (found["storage"], found["windows"]) == ("float32", 1)
    for each in found["candidates"]:
        assert set(each) == {
            "name", "bytes", "attention_error", "kl_to_own", "microseconds", "taken",
        }  # fmt: skip
        assert each["microseconds"] > 0
        assert each["kl_to_own"] > 0
    (taken,) = [each["name"] for each in found["candidates"] if each["taken"]]
    assert taken == auto_of(chosen).best.name


def test_its_table_has_a_row_for_each_map(chosen: FitReport) -> None:
    console = Console(width=160, record=True, file=StringIO())
    console.print(auto_of(chosen))

    text = console.export_text()

    for each in auto_of(chosen).candidates:
        named = f"→ {each.name}" if each is auto_of(chosen).best else each.name
        (row,) = [line for line in text.splitlines() if f"│ {named} " in line]
        assert f"{each.tried.attention_error:.4f}" in row
    assert "tried on 1 held-out windows, stored in float32" in text


@pytest.mark.parametrize("storage", ["float32", "int8"])
def test_a_budget_of_bytes_is_kept_by_the_file(
    captured: Capture,
    chosen: FitReport,
    source: LanguageModel,
    target: LanguageModel,
    storage: Dtype,
    tmp_path: Path,
) -> None:
    limit = chosen.mapping.nbytes(storage) * 2 // 3
    budget = Budget(nbytes=limit)

    small = choose_map(captured, source, target, SETTINGS, budget=budget, storage=storage)

    small.mapping.save_pretrained(tmp_path / "m", dtype=storage)
    tensors = load_file(tmp_path / "m" / "tensors.safetensors")
    size = sum(
        each.numel() * each.element_size()
        for name, each in tensors.items()
        if name.startswith("maps.")
    )
    auto = auto_of(small)
    assert size == auto.best.nbytes <= limit
    assert max(each.nbytes for each in auto.candidates) > limit
    # A rank was cut to the budget: one more would not fit.
    within = [each.nbytes for each in auto.candidates if each.name.startswith("lowrank")]
    per_rank = small.mapping.layers[0].keys.parameters  # of a whole map: more than of one rank
    assert any(limit - 4 * per_rank < each <= limit for each in within)
    least = min(each.tried.attention_error for each in auto_of(chosen).candidates)
    assert auto.best.tried.attention_error >= least


def test_an_absurd_budget_is_refused_with_the_smallest_named(
    captured: Capture, source: LanguageModel, target: LanguageModel
) -> None:
    with pytest.raises(
        BudgetError, match=r"no map fits 1e-05 MB: the smallest is .* MB, the quick"
    ):
        choose_map(captured, source, target, SETTINGS, budget=Budget(nbytes=10))


def test_too_few_rows_are_refused_with_the_number_needed(
    source: LanguageModel, target: LanguageModel
) -> None:
    layer = source.spec.layers[0]
    needed = layer.kv_heads * max(layer.key_dim, layer.value_dim) + 1
    few = take(source, target, 1)

    for n in (needed - 1, 3):
        short = replace(
            few,
            fit=Sample(keys=replace(few.fit.keys, n=n), values=replace(few.fit.values, n=n)),
        )
        with pytest.raises(UnderdeterminedFit, match=rf"\b{n} rows") as caught:
            choose_map(short, source, target, SETTINGS)
        assert f"at least {needed} rows" in str(caught.value.hint)


# What a budget says


def candidate(
    name: str, *, nbytes: int, error: float, kl: float = 0.0, us: float = 1.0
) -> Candidate:
    tried = Tried(attention_error=error, kl=kl, microseconds=us)
    return Candidate(name=name, nbytes=nbytes, tried=tried)


def report(budget: Budget, *candidates: Candidate) -> AutoReport:
    return AutoReport(candidates=candidates, budget=budget, storage="float32", windows=1)


def test_of_those_within_both_bounds_the_best_is_taken() -> None:
    all_of_them = (
        candidate("good and large", nbytes=100, error=0.1, us=1.0),
        candidate("good and slow", nbytes=10, error=0.2, us=9.0),
        candidate("fair", nbytes=20, error=0.3, us=2.0),
        candidate("poor", nbytes=5, error=0.9, us=0.5),
    )

    def taken(**bounds: float) -> str:
        return report(Budget(**bounds), *all_of_them).best.name  # type: ignore[arg-type]

    assert taken() == "good and large"
    assert taken(nbytes=50) == "good and slow"
    assert taken(nbytes=50, microseconds=2.0) == "fair"
    assert taken(nbytes=19, microseconds=2.0) == "poor"
    none = report(Budget(nbytes=1), *all_of_them)
    assert not none
    with pytest.raises(BudgetError, match=re.escape("the smallest is poor with 5e-06 MB")):
        _ = none.best
    assert not any(each["taken"] for each in none.to_dict()["candidates"])


def test_attention_errors_that_are_close_are_told_apart_by_kl() -> None:
    found = report(
        Budget(),
        candidate("least", nbytes=1, error=0.100, kl=0.5),
        candidate("close", nbytes=1, error=0.109, kl=0.1),
        candidate("next", nbytes=1, error=0.111, kl=0.0),
        candidate("last", nbytes=1, error=0.900, kl=0.0),
    )

    assert [each.name for each in found.allowed] == ["close", "least", "next", "last"]


def test_where_no_attention_is_seen_kl_decides() -> None:
    unseen = float("nan")
    found = report(
        Budget(),
        candidate("far", nbytes=1, error=unseen, kl=0.5),
        candidate("near", nbytes=1, error=unseen, kl=0.1),
        candidate("further", nbytes=1, error=unseen, kl=0.7),
    )

    assert [each.name for each in found.allowed] == ["near", "far", "further"]
    assert json.loads(found.to_json())["candidates"][0]["attention_error"] is None


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("9.6MB", Budget(nbytes=9_600_000)),
        ("500 KB", Budget(nbytes=500_000)),
        ("12B", Budget(nbytes=12)),
        ("2GB", Budget(nbytes=2_000_000_000)),
        ("40us", Budget(microseconds=40.0)),
        (".5µs", Budget(microseconds=0.5)),
    ],
)
def test_a_budget_is_a_size_or_a_time(text: str, budget: Budget) -> None:
    assert Budget.parse(text) == budget
    assert str(budget) != "no bound" == str(Budget())


@pytest.mark.parametrize("text", ["", "9.6", "MB", "-3MB", "0MB", "3MiB", "1 2KB", "40ms", "nanus"])
def test_a_budget_that_is_neither_is_a_mistake(text: str) -> None:
    with pytest.raises(ValueError, match=r"a size such as 9\.6MB or a time"):
        Budget.parse(text)


# Layers that add, and layers that explain


def copied() -> Capture:
    """Layer 3 is nearly layer 2; the target is layer 2 with some of layer 0 in it."""

    def sample(n: int, seed: int, *, twin: bool) -> Sample:
        random = torch.Generator().manual_seed(seed)
        x = torch.randn(n, DEPTH, FEATURES, generator=random, dtype=torch.float64)
        x[:, 3] = x[:, 2] + 0.1 * x[:, 3]
        noise = torch.randn(n, FEATURES, generator=random, dtype=torch.float64)
        y = x[:, 2] + 0.4 * x[:, 0].flip(-1) + 0.1 * noise
        moments = Moments.of(x.flatten(1), torch.cat((y, y.flip(0)), dim=1) if twin else y)
        return Sample(keys=moments, values=moments)

    return Capture(fit=sample(400, 0, twin=True), heldout=sample(200, 1, twin=False), seconds={})


def test_greedy_selection_sees_through_a_copy_of_the_best_layer() -> None:
    taken, source, target = copied(), spec(DEPTH), spec(1)
    assert FEATURES == HEADS * WIDTH

    top, chosen = (
        next(choose(taken, source, target, FitSettings(layers=2, selection=selection)))
        for selection in ("top", "greedy")
    )

    assert top.sources == (2, 3)
    assert chosen.sources == (0, 2)
    assert chosen.r2_keys > top.r2_keys + 0.1
    assert chosen.r2_values > top.r2_values + 0.1
    order = rank_layers(taken, source, target)[0].argsort(descending=True).tolist()
    columns = Columns.of(taken, source, target)
    assert greedy(taken, columns, 0, order, 1) == [2]
    assert greedy(taken, columns, 0, order, DEPTH)[:2] == [2, 0]
    assert sorted(greedy(taken, columns, 0, order, DEPTH)) == list(range(DEPTH))
