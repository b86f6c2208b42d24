"""Find tasks by name: our own, those of a folder, and lm-eval's. Needs the extra ``lm-eval``."""

import logging
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from difflib import get_close_matches
from functools import cache
from itertools import chain
from os import devnull
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvtransfer.errors import TaskError
from kvtransfer.evaluation.harness.extra import require_lm_eval
from kvtransfer.hf.hub import unreachable
from kvtransfer.hf.spec import first_line

OWN = Path(__file__).parent / "tasks"
"""The folder of our own tasks, for lm-eval's ``include_path``."""

OURS = tuple(sorted(path.stem for path in OWN.glob("*.yaml")))

SEEDS = (0, 1234, 1234, 1234)
"""Python, numpy, torch and few-shot examples, as lm-eval sets them."""


def manager(include_path: str | Path | None = None, *, defaults: bool = True) -> Any:
    """lm-eval's TaskManager, which knows our own tasks too.

    Args:
        include_path: A folder with more.
        defaults: Whether to look through lm-eval's, which takes half a minute the first time.

    Raises:
        KVTransferError: lm-eval is not installed.
        TaskError: there is no such folder.
    """
    require_lm_eval()
    if include_path is None and defaults:
        return _all()
    from lm_eval.tasks import TaskManager

    folders = [OWN]
    if include_path is not None:
        folders.append(Path(include_path))
        if not folders[-1].is_dir():
            raise TaskError(
                f"no folder of tasks at {include_path}",
                hint="--include-path names a folder with a .yaml file a task",
            )
    return TaskManager(include_path=folders, include_defaults=defaults)


@cache
def _all() -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=[OWN])


def find(names: Iterable[str], *, include_path: str | Path | None = None) -> dict[str, Any]:
    """lm-eval's tasks by name, with their data; groups, tags and patterns give all of theirs.

    Raises:
        KVTransferError: lm-eval is not installed.
        TaskError: there is no such task or folder, or its data cannot be had.
    """
    asked = list(dict.fromkeys(names))
    if not asked or not all(name.strip() for name in asked):
        raise TaskError(
            f"tasks are {', '.join(map(repr, asked)) or 'none'}", hint=f"--tasks {','.join(OURS)}"
        )
    with hushed(), seeded():  # some tasks shuffle their choices as they are loaded
        known = manager(include_path, defaults=False)
        if not all(name in known.all_subtasks or _is_file(name) for name in asked):
            known = manager(include_path)
        matches = {name: _matches(known, name) for name in asked}  # before any data are fetched
        found: dict[str, Any] = {}
        for match in dict.fromkeys(chain.from_iterable(matches.values())):
            found |= _loaded(known, match)
    return found


def _matches(known: Any, name: str) -> list[str]:
    """What a name stands for.

    Raises:
        TaskError: for nothing.
    """
    if _is_file(name):
        return [name]
    if matches := known.match_tasks([name]):
        return list(matches)
    near = get_close_matches(name, known.all_tasks, n=3, cutoff=0.7)
    raise TaskError(
        f"no task {name!r}" + (f"; there is {', '.join(near)}" if near else ""),
        hint=f"{', '.join(OURS)}, one of lm-eval's ('lm-eval ls tasks' lists them), or one of "
        "yours in --include-path",
    )


def _is_file(name: str) -> bool:
    return name.endswith(".yaml") and Path(name).is_file()


def _loaded(known: Any, name: str) -> dict[str, Any]:
    try:
        return dict(known.load([name])["tasks"])
    except Exception as error:  # a task is code and data of others
        raise without_data(name, error) from error


def without_data(name: str, error: Exception) -> TaskError:
    """What to raise where a task's data could not be had."""
    away = "OfflineMode" in str(error) or isinstance(error, ConnectionError) or unreachable()
    return TaskError(
        f"task {name} cannot be loaded: {first_line(error)}",
        hint="its data are on the hub, which cannot be reached from here; "
        f"{' and '.join(OURS)} need none"
        if away
        else "its YAML file or its data set is at fault; see the message above",
    )


@contextmanager
def hushed() -> Iterator[None]:
    """Keep what lm-eval prints off stdout, and its bars and advice off a stderr that is a file."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    with ExitStack() as stack:
        stack.callback(logger.setLevel, before)
        if not sys.stderr.isatty():
            stack.enter_context(redirect_stderr(stack.enter_context(Path(devnull).open("w"))))
        stack.enter_context(redirect_stdout(sys.stderr))
        yield


@contextmanager
def seeded() -> Iterator[None]:
    """Draw as lm-eval does, the same under each condition, and leave no trace of it."""
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        random.seed(SEEDS[0])
        np.random.seed(SEEDS[1])
        torch.manual_seed(SEEDS[2])
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
