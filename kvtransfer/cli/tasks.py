"""kvtransfer eval --tasks: what lm-eval's tasks say."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvtransfer.cli.measures import Asked

if TYPE_CHECKING:
    from kvtransfer.evaluation.part import Part

Tasks = Annotated[
    str | None,
    typer.Option(help="lm-eval's tasks, comma-separated, such as kvtransfer_guides,arc_easy."),
]
IncludePath = Annotated[
    Path | None, typer.Option(help="Folder with tasks of yours, a .yaml file each.")
]
Limit = Annotated[int | None, typer.Option(help="Items of each task at most.")]
Shots = Annotated[
    int | None, typer.Option(help="Examples before each question of a task, if not its own.")
]
BatchSize = Annotated[
    str | None, typer.Option(help="Answers of a task that are run at a time; as many as fit: auto.")
]


@dataclass(frozen=True, slots=True, eq=False)
class TaskMeasure:
    """Tasks, found already, so that a name that is none is said before models are loaded."""

    found: Mapping[str, Any]
    limit: int | None
    shots: int | None
    batch_size: str
    key: Literal["tasks"] = "tasks"

    @classmethod
    def asked(
        cls,
        tasks: str | None,
        *,
        include_path: Path | None,
        limit: int | None,
        shots: int | None,
        batch_size: str | None,
    ) -> "TaskMeasure | None":
        """What the options ask for.

        Raises:
            KVTransferError: lm-eval is not installed.
            TaskError: there is no such task, or no data of it.
            ValueError: the options do not go together.
        """
        if tasks is None:
            if (include_path, limit, shots, batch_size) != (None, None, None, None):
                raise ValueError(
                    "--include-path, --limit, --shots and --batch-size are about --tasks"
                )
            return None
        batch_size = batch_size or "auto"
        from kvtransfer.evaluation.harness.measure import check_sizes
        from kvtransfer.evaluation.harness.options import checked_batch_size
        from kvtransfer.evaluation.harness.tasks import find

        check_sizes(limit, shots)
        checked_batch_size(batch_size)
        return cls(find(tasks.split(","), include_path=include_path), limit, shots, batch_size)

    def steps(self, items: int) -> int:
        """None: lm-eval has bars of its own."""
        return 0

    def check(self, asked: Asked) -> None:
        """Refuse conditions that tasks do not have, and a mapping for another pair."""
        from kvtransfer.evaluation.harness.measure import checked_names

        checked_names(self._names(asked))
        if asked.mapping is not None:
            asked.mapping.check_ends(asked.source.spec, asked.target.spec)

    def _names(self, asked: Asked) -> tuple[str, ...]:
        from kvtransfer.evaluation.conditions import USUAL
        from kvtransfer.evaluation.harness.measure import CONDITIONS

        names = asked.conditions or CONDITIONS
        # What else is measured has more of them.
        return names if asked.alone else tuple(name for name in names if name in USUAL)

    def part(self, asked: Asked, progress: Callable[[], None]) -> "Part":
        """Answer every item under every condition."""
        from kvtransfer.evaluation.harness.measure import measure_tasks

        return measure_tasks(
            asked.source,
            asked.target,
            asked.mapping,
            self.found,
            conditions=self._names(asked),
            limit=self.limit,
            shots=self.shots,
            batch_size=self.batch_size,
        )
