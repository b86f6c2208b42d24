"""Run tasks under several conditions, item by item, for a table of what is retained."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvtransfer.errors import KVTransferError, TaskError
from kvtransfer.evaluation.conditions import USUAL
from kvtransfer.evaluation.harness.retention import TaskReport, TaskResult
from kvtransfer.evaluation.harness.tasks import SEEDS, find, hushed, seeded
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.hf.model import LanguageModel

CONDITIONS = ("none", "own", "mapped", "source", "raw")
"""What is measured where nobody says what; the controls of USUAL can be had too."""

PREFERRED = ("acc", "exact_match")
"""The metric that is counted, where a task has it; else its first that is a number an item."""


def measure_tasks(
    source: LanguageModel,
    target: LanguageModel,
    mapping: KVMapping | None,
    tasks: Iterable[str] | Mapping[str, Any],
    *,
    conditions: Iterable[str] = CONDITIONS,
    include_path: str | Path | None = None,
    limit: int | None = None,
    shots: int | None = None,
    batch_size: int | str = 1,
    max_length: int | None = None,
    progress: Callable[[], None] = lambda: None,
) -> TaskReport:
    """Answer every item under every condition.

    Args:
        source: Makes the cache.
        target: Reads it.
        mapping: From the one to the other; None leaves out what needs one.
        tasks: Names, or what :func:`kvtransfer.evaluation.harness.tasks.find` gave for them.
        conditions: Some of those that are usual; ``none`` and ``own`` are always added.
        include_path: A folder with more tasks.
        limit: Items a task at most.
        shots: Examples before each question; as a task says if not given.
        batch_size: Continuations, or texts, that are run at a time, or ``auto``.
        max_length: Tokens of context and continuation at most; earlier ones are cut off.
        progress: Called after each condition.

    Raises:
        KVTransferError: lm-eval is not installed.
        TaskError: no such task, or no data of it, or it counts no right answers.
        IncompatibleModels: the mapping is for another pair.
        ValueError: there is no such condition, or a size that measures nothing.
    """
    names = checked_names(conditions)
    check_sizes(limit, shots)
    if mapping is not None:
        mapping.check_ends(source.spec, target.spec)
    found = tasks if isinstance(tasks, Mapping) else find(tasks, include_path=include_path)
    from kvtransfer.evaluation.harness.lm import KVTransferLM

    metrics = {name: _metric(name, task) for name, task in found.items()}
    answers: dict[str, dict[str, list[dict[str, Any]]]] = {}
    missing: dict[str, str] = {}
    for name in names:
        try:
            lm = KVTransferLM(
                source, target, mapping, name, batch_size=batch_size, max_length=max_length
            )
            answers[name] = _answer(lm, found, limit=limit, shots=shots)
        except (TaskError, ValueError):
            raise
        except KVTransferError as error:
            if name in ("none", "own") or (name == "mapped" and mapping is not None):
                raise
            missing[name] = error.message
        progress()
    return TaskReport(
        source=source.spec.name,
        target=target.spec.name,
        tasks=tuple(_result(name, found[name], metrics[name], answers) for name in found),
        missing=missing,
    )


def check_sizes(limit: int | None, shots: int | None) -> None:
    """Raise ValueError for a size that measures nothing."""
    for what, size, least in (("limit", limit, 1), ("shots", shots, 0)):
        if size is not None and size < least:
            raise ValueError(f"{what} is {size}; at least {least} is needed")


def checked_names(conditions: Iterable[str]) -> tuple[str, ...]:
    """The conditions and those that are always added, in their order.

    Raises:
        ValueError: tasks do not have one.
    """
    asked = {*conditions, "none", "own"}
    if unknown := sorted(asked - {*USUAL}):
        raise ValueError(
            f"tasks have no condition {', '.join(unknown)}; there are {', '.join(USUAL)}"
        )
    return tuple(name for name in USUAL if name in asked)


def _answer(
    lm: Any, tasks: Mapping[str, Any], *, limit: int | None, shots: int | None
) -> dict[str, list[dict[str, Any]]]:
    """Per task, what lm-eval has noted of each item."""
    from lm_eval.evaluator import evaluate

    for task in tasks.values():
        count = task.get_config("num_fewshot") if shots is None else shots
        task.set_config(key="num_fewshot", value=count or 0)
        task.set_fewshot_seed(seed=SEEDS[-1])
    with hushed(), seeded():
        # The intervals are ours: paired, and over all conditions.
        done = evaluate(
            lm, {"tasks": dict(tasks)}, limit=limit, bootstrap_iters=0, log_samples=True
        )
    return dict(done["samples"])


def _metric(name: str, task: Any) -> str:
    """What is counted of a task.

    Raises:
        TaskError: nothing of it is a number an item of which more is better.
    """
    better = task.higher_is_better()
    known = [metric for metric in (*PREFERRED, *better) if better.get(metric)]
    if task.OUTPUT_TYPE == "loglikelihood_rolling" or not known:
        raise TaskError(
            f"task {name} counts no right answers: it measures {', '.join(better) or 'nothing'}",
            hint="measure text with --text; or run the task under one condition: "
            "python -m kvtransfer.evaluation.harness",
        )
    return str(known[0])


def _result(
    name: str,
    task: Any,
    metric: str,
    answers: Mapping[str, Mapping[str, list[dict[str, Any]]]],
) -> TaskResult:
    right: dict[str, Any] = {}
    for condition, noted in answers.items():
        first = noted[name][0]["filter"]  # further ones read the same answers in another way
        items = sorted(
            (item for item in noted[name] if item["filter"] == first),
            key=lambda item: int(item["doc_id"]),
        )
        scores = [item[metric] for item in items]
        if not all(isinstance(score, int | float | np.number) for score in scores):
            raise TaskError(
                f"task {name} gives no number an item: its {metric} of one is {scores[0]!r}",
                hint="run it under one condition: python -m kvtransfer.evaluation.harness",
            )
        right[condition] = np.array(scores, dtype=np.float64)
    return TaskResult(name, metric, right, np.array([_chance(task, item) for item in items]))


def _chance(task: Any, item: Mapping[str, Any]) -> float:
    """What guessing gives: the share of the choices that are right; nothing for what is written."""
    if task.OUTPUT_TYPE != "multiple_choice":
        return 0.0
    choices = len(task.doc_to_choice(item["doc"]))
    wanted = item["target"]
    return (len({*wanted}) if isinstance(wanted, list) else 1) / choices


__all__ = ["CONDITIONS", "check_sizes", "checked_names", "measure_tasks"]
