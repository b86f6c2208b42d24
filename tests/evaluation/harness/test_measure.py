"""The table is of the same items under every condition, and of nothing but their answers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from kvtransfer.errors import IncompatibleModels, TaskError
from kvtransfer.evaluation.evaluate import bare
from kvtransfer.evaluation.harness.measure import measure_tasks
from kvtransfer.evaluation.harness.retention import TaskReport, TaskResult, estimates, lead
from kvtransfer.evaluation.part import Part
from kvtransfer.hf.model import LanguageModel
from kvtransfer.report import to_json

from ..conftest import identity

OURS = ("kvtransfer_guides", "kvtransfer_prose")
LIMIT = 3


@pytest.fixture(scope="module")
def itself(model: LanguageModel) -> TaskReport:
    return measure_tasks(model, model, identity(model), OURS, limit=LIMIT, batch_size=4)


def test_a_model_mapped_to_itself_answers_as_itself(itself: TaskReport) -> None:
    for task in itself.tasks:
        assert list(task.right) == ["none", "own", "mapped", "source", "raw"]
        for name in ("mapped", "source", "raw"):
            assert task.right[name].tolist() == task.right["own"].tolist()
        assert task.n == LIMIT
        assert task.chance.tolist() == [1 / 4] * LIMIT
    assert not itself  # raw is as good here


def test_neither_the_order_of_conditions_nor_that_of_tasks_changes_a_thing(
    model: LanguageModel, itself: TaskReport
) -> None:
    again = measure_tasks(
        model,
        model,
        identity(model),
        OURS[::-1],
        conditions=["raw", "source", "own", "mapped"],
        limit=LIMIT,
        batch_size=1,
    )

    assert again.to_dict() == itself.to_dict()


def test_the_callers_random_numbers_are_left_alone(model: LanguageModel) -> None:
    # Not those of ``random``: what checks types in these tests draws from it.
    before = torch.get_rng_state(), repr(np.random.get_state())

    measure_tasks(model, model, None, OURS[:1], conditions=["own"], limit=1)

    assert torch.equal(torch.get_rng_state(), before[0])
    assert repr(np.random.get_state()) == before[1]


def test_examples_are_the_same_under_every_condition_and_change_what_is_asked(
    model: LanguageModel, itself: TaskReport
) -> None:
    shown = measure_tasks(model, model, identity(model), OURS[1:], limit=LIMIT, shots=1)

    right = shown.tasks[0].right
    assert right["mapped"].tolist() == right["own"].tolist()


def test_what_a_pair_does_not_allow_is_left_out_with_the_reason(
    model: LanguageModel, sibling: LanguageModel
) -> None:
    report = measure_tasks(model, sibling, None, OURS[:1], limit=1)

    assert set(report.missing) == {"mapped", "raw"}
    assert "heads" in report.missing["raw"]
    assert report.conditions == ("none", "own", "source")
    assert not report
    assert report.sentence() == ""


def result(n: int = 40, *, chance: float = 0.25, **shares: float) -> TaskResult:
    """A task of which these shares of the items are right; the same items are right first."""
    right = {
        name: (np.arange(n) < round(share * n)).astype(float) for name, share in shares.items()
    }
    return TaskResult("task", "acc", right, np.full(n, chance))


def report(*tasks: TaskResult) -> TaskReport:
    return TaskReport(source="small", target="large", tasks=tasks, missing={})


def test_the_shares_are_of_what_lies_above_chance_and_above_the_floor() -> None:
    task = result(none=0.3, own=0.8, mapped=0.7, source=0.6)

    found = estimates((task,), "mapped")

    assert found["accuracy"] is not None
    assert found["accuracy"].value == pytest.approx(0.7)
    assert found["floor_normalised"] is not None
    assert found["floor_normalised"].value == pytest.approx((0.7 - 0.25) / (0.8 - 0.25))
    assert found["gap_recovered"] is not None
    assert found["gap_recovered"].value == pytest.approx(0.4 / 0.5)
    assert found["gap_to_source"] is not None
    assert found["gap_to_source"].value == pytest.approx(0.1)
    assert found["gap_to_source"].low is not None
    assert found["gap_to_source"].low < 0.1 < (found["gap_to_source"].high or 0)


def test_intervals_are_paired_over_items() -> None:
    rng = np.random.default_rng(0)
    base = rng.integers(2, size=60).astype(float)
    gain = np.zeros(60)
    gain[np.flatnonzero(base == 0)[:6]] = 1
    apart = {"none": base * 0, "own": base + gain, "source": base, "mapped": base + gain}
    paired = TaskResult("task", "acc", apart, np.zeros(60))
    shuffled = TaskResult("task", "acc", apart | {"source": rng.permutation(base)}, np.zeros(60))

    widths = []
    for task in (paired, shuffled):
        found = estimates((task,), "mapped")["gap_to_source"]
        assert found is not None
        assert found.value == pytest.approx(0.1)
        widths.append((found.high or 0) - (found.low or 0))

    assert widths[0] < widths[1]


def test_tasks_count_alike_whatever_their_size() -> None:
    small, large = result(10, none=0.0, own=1.0, mapped=1.0), result(90, none=0, own=1, mapped=0)

    found = estimates((small, large), "mapped")["accuracy"]

    assert found is not None
    assert found.value == pytest.approx(0.5)
    assert found.n == 100
    assert (found.low, found.high) == (0.5, 0.5)  # within either, all items are alike
    assert lead((small, large), "none").value == pytest.approx(0.5)


def test_a_share_of_nothing_is_none() -> None:
    found = estimates((result(none=0.5, own=0.5, mapped=0.6),), "mapped")
    below = estimates((result(none=0.1, own=0.2, mapped=0.6),), "mapped")

    assert found["gap_recovered"] is None
    assert found["floor_normalised"] is not None
    assert below["floor_normalised"] is None


def test_it_is_true_where_mapped_beats_the_floor_and_the_cache_as_it_is() -> None:
    assert report(result(none=0.2, own=0.9, mapped=0.7))
    assert report(result(none=0.2, own=0.9, mapped=0.7, raw=0.3))
    assert not report(result(none=0.2, own=0.9, mapped=0.7, raw=0.7))
    assert not report(result(none=0.2, own=0.9, mapped=0.21))


def test_it_is_a_part_and_says_itself_in_all_three_ways(
    itself: TaskReport, model: LanguageModel
) -> None:
    assert isinstance(itself, Part)
    good = report(result(none=0.2, own=0.9, mapped=0.75, source=0.7))
    document = json.loads(to_json(bare(model, model, None).with_part("tasks", good).to_dict()))

    part = document["tasks"]
    assert set(part["tasks"]["task"]["conditions"]) == {"none", "own", "mapped", "source"}
    assert part["overall"]["conditions"]["mapped"]["accuracy"]["n"] == 40
    assert part["tasks"]["task"]["items"]["own"][:36] == [1.0] * 36
    console = Console(width=120, record=True)
    console.print(good)
    text = console.export_text()
    assert "n = 40" in text and "chance 25%" in text
    assert "mean of" not in text
    assert "75%" in good.sentence() and "small alone is 70%" in good.sentence()
    assert not good.sentence().endswith(".")


PERPLEXITY = """
task: perplexed
custom_dataset: !function kvtransfer.evaluation.harness.rows.prose
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: context
metric_list: [{metric: word_perplexity}]
"""
WRITTEN = """
task: written
custom_dataset: !function kvtransfer.evaluation.harness.rows.guides
output_type: generate_until
test_split: test
doc_to_text: context
doc_to_target: guide
generation_kwargs: {until: ["\\n"], max_gen_toks: 4}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""


def test_what_counts_no_right_answers_is_refused_and_what_is_written_has_no_chance(
    model: LanguageModel, tmp_path: Path
) -> None:
    (tmp_path / "perplexed.yaml").write_text(PERPLEXITY)
    (tmp_path / "written.yaml").write_text(WRITTEN)

    with pytest.raises(TaskError, match="perplexed counts no right answers"):
        measure_tasks(model, model, None, ["perplexed"], include_path=tmp_path, limit=1)
    found = measure_tasks(
        model, model, identity(model), ["written"], include_path=tmp_path, limit=2, batch_size=2
    )

    assert found.tasks[0].chance.tolist() == [0.0, 0.0]
    assert found.tasks[0].metric == "exact_match"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"conditions": ["magic"]}, "no condition magic"),
        ({"limit": 0}, "limit is 0"),
        ({"shots": -1}, "shots is -1"),
        ({"batch_size": "x"}, "positive number or auto"),
    ],
    ids=str,
)
def test_what_measures_nothing_is_a_mistake(
    model: LanguageModel, asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        measure_tasks(model, model, identity(model), OURS[:1], **asked)


def test_a_mapping_for_another_pair_is_refused_before_anything_runs(
    model: LanguageModel, sibling: LanguageModel
) -> None:
    with pytest.raises(IncompatibleModels):
        measure_tasks(sibling, model, identity(model), ["no_such_task"])
