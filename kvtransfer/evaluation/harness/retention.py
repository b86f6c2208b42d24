"""What is left of a target's right answers: a table over tasks and conditions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Column as Header
from rich.table import Table
from rich.text import Text

from kvtransfer.evaluation.figure import Figure, Listing
from kvtransfer.measures.intervals import Column, interval
from kvtransfer.report import Estimate, plain

COLUMNS = (
    ("accuracy", "accuracy", ".0%"),
    ("floor_normalised", "floor-normalised", ".0%"),
    ("gap_recovered", "gap recovered", ".0%"),
    ("gap_to_source", "against the source", "+.0%"),
)
STYLES = {"mapped": "bold", "own": "green", "none": "dim"}
BEATEN = ("none", "raw")
"""What ``mapped`` must beat, where it was measured."""


@dataclass(frozen=True, slots=True, eq=False)
class TaskResult:
    """One task: per condition, what each item scored; the items are the same in all."""

    name: str
    metric: str
    """lm-eval's name of what is counted."""
    right: dict[str, Column]
    chance: Column
    """What guessing gives, item by item; zero where an answer is written."""

    @property
    def n(self) -> int:
        """Items."""
        return len(self.chance)


def estimates(tasks: Sequence[TaskResult], condition: str) -> dict[str, Estimate | None]:
    """Of some tasks together, each counting alike; items are resampled within their task.

    ``floor_normalised`` is accuracy over the target's, chance taken off both (Heo et al.,
    arXiv:2608.03893); ``gap_recovered`` is the share of what lies between ``none`` and ``own``,
    and ``gap_to_source`` how much more than the source alone is right. A share of nothing, or of
    less, is None.
    """
    sizes = [task.n for task in tasks]
    ends = np.cumsum(sizes)[:-1]

    def mean(column: Column) -> Column:
        means = [part.mean(-1) for part in np.split(column, ends, axis=-1)]
        return np.asarray(np.mean(means, axis=0))

    def ratio(above: Column, below: Column) -> Column:
        return np.asarray(mean(above) / mean(below))

    def share(of: Column, floor: Column) -> Estimate | None:
        if not mean(of - floor) > 0:
            return None
        return measure(ratio, found - floor, of - floor)

    measure = partial(interval, strata=sizes)
    column = partial(_column, tasks)
    found, own, none = column(condition), column("own"), column("none")
    chance = np.concatenate([task.chance for task in tasks])
    sourced = all("source" in task.right for task in tasks)
    return {
        "accuracy": measure(mean, found),
        "floor_normalised": share(own, chance),
        "gap_recovered": share(own, none),
        "gap_to_source": measure(mean, found - column("source")) if sourced else None,
    }


def lead(tasks: Sequence[TaskResult], condition: str) -> Estimate:
    """How much more is right under ``mapped`` than under ``condition``, each task counting
    alike."""
    sizes = [task.n for task in tasks]
    weights = np.concatenate([np.full(n, sum(sizes) / (len(sizes) * n)) for n in sizes])
    gain = _column(tasks, "mapped") - _column(tasks, condition)
    return interval(lambda x: x.mean(-1), weights * gain, strata=sizes)


def _column(tasks: Sequence[TaskResult], condition: str) -> Column:
    return np.concatenate([task.right[condition] for task in tasks])


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TaskReport:
    """A retention table. True where ``mapped`` is right more often, over all tasks, than with no
    prefix, and than on the source's cache as it is: where that was measured, and by the 95 %
    interval of the paired difference."""

    source: str
    target: str
    tasks: tuple[TaskResult, ...]
    missing: Mapping[str, str]
    """Conditions that this pair does not allow, with the reason."""

    @property
    def conditions(self) -> tuple[str, ...]:
        """What was measured."""
        return tuple(self.tasks[0].right)

    def __bool__(self) -> bool:
        if "mapped" not in self.conditions:
            return False
        rivals = [name for name in BEATEN if name in self.conditions]
        return all((lead(self.tasks, name).low or 0.0) > 0 for name in rivals)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "tasks": {
                task.name: self._plain((task,))
                | {
                    "metric": task.metric,
                    "items": {name: column.tolist() for name, column in task.right.items()},
                }
                for task in self.tasks
            },
            "overall": self._plain(self.tasks),
            "missing": dict(self.missing),
        }

    def _plain(self, tasks: Sequence[TaskResult]) -> dict[str, Any]:
        return {
            "n": sum(task.n for task in tasks),
            "chance": _chance(tasks),
            "conditions": {
                name: {key: plain(value) for key, value in estimates(tasks, name).items()}
                for name in self.conditions
            },
        }

    def __rich__(self) -> Group:
        table = Table(
            Header("task", overflow="fold"),
            "condition",
            *(header for _, header, _ in COLUMNS),
            title=f"{self.source} → {self.target}: tasks",
            caption="paired bootstrap 95 % intervals over items; floor-normalised: chance taken "
            "off, as a share of own; gap: from none to own",
        )
        for title, tasks in self._groups():
            about = [title, f"n = {sum(task.n for task in tasks)}", f"chance {_chance(tasks):.0%}"]
            for row, name in enumerate(self.conditions):
                found = estimates(tasks, name)
                cells = [
                    "–" if (each := found[key]) is None else format(each, form)
                    for key, _, form in COLUMNS
                ]
                if name == "source":
                    cells[-1] = "–"  # against itself
                told = Text(about[row] if row < len(about) else "", style="not bold not dim")
                table.add_row(told, name, *cells, style=STYLES.get(name))
            table.add_section()
        parts: list[RenderableType] = [table]
        parts += [
            Text(f"{name} was left out: {why}", style="dim") for name, why in self.missing.items()
        ]
        return Group(*parts)

    def _groups(self) -> list[tuple[str, tuple[TaskResult, ...]]]:
        """Each task, and all together where there are several."""
        found = [(task.name, (task,)) for task in self.tasks]
        together = [(f"mean of {len(self.tasks)} tasks", self.tasks)] if self.tasks[1:] else []
        return [*found, *together]

    def figures(self) -> tuple[Figure, ...]:
        """A table a task, for the page."""
        drawn = []
        for title, tasks in self._groups():
            by_name = {name: estimates(tasks, name) for name in self.conditions}
            drawn.append(
                Listing(
                    title=title,
                    columns=("condition", *(header for _, header, _ in COLUMNS)),
                    rows=tuple(
                        (
                            name,
                            *(
                                None if (name, key) == ("source", "gap_to_source") else found[key]
                                for key, _, _ in COLUMNS
                            ),
                        )
                        for name, found in by_name.items()
                    ),
                    forms=("", *(form for *_, form in COLUMNS)),
                    note=f"n = {sum(task.n for task in tasks)}; guessing gives "
                    f"{_chance(tasks):.0%}. Floor-normalised: chance taken off, as a share of own.",
                )
            )
        return tuple(drawn)

    def sentence(self) -> str:
        """What the tasks say, in a clause."""
        if "mapped" not in self.conditions:
            return ""
        right = {name: estimates(self.tasks, name) for name in self.conditions}
        n = sum(task.n for task in self.tasks)
        count = f"{len(self.tasks)} tasks" if self.tasks[1:] else f"the task {self.tasks[0].name}"
        said = (
            f"on {count} it is right {_percent(right['mapped']['accuracy'])} of the time with the "
            f"mapped prefix, {_value(right['own'])} with its own, {_value(right['none'])} with none"
        )
        if "source" in right:
            said += f", where {self.source} alone is {_value(right['source'])}"
        gap = right["mapped"]["gap_recovered"]
        share = "no share" if gap is None else _percent(gap)
        return f"{said}: {share} of the gap is recovered (n = {n})"


def _chance(tasks: Sequence[TaskResult]) -> float:
    return float(np.mean([task.chance.mean() for task in tasks]))


def _percent(estimate: Estimate | None) -> str:
    return f"{estimate:.0%}"


def _value(found: Mapping[str, Estimate | None]) -> str:
    accuracy = found["accuracy"]
    assert accuracy is not None  # it is a share of nothing
    return f"{accuracy.value:.0%}"
