"""What every command shares: where it prints, how it fails, how it shows progress.

Results go to stdout; progress, notes and errors go to stderr.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvtransfer.errors import KVTransferError

stderr = Console(stderr=True)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document, nothing else.")]
Device = Annotated[str, typer.Option(help="Torch device the models run on.")]
Dtype = Annotated[
    str | None,
    typer.Option(help="float32, bfloat16 or float16; as the weights were saved if not given."),
]
Source = Annotated[str, typer.Argument(help="Model that makes the cache.")]
Target = Annotated[str, typer.Argument(help="Model that reads it.")]


@contextmanager
def foreseen() -> Iterator[None]:
    """Turn a foreseen error into ``error:`` and ``hint:`` lines, and exit 1 (usage: 2)."""
    try:
        yield
    except KVTransferError as error:
        fail(error.message, error.hint, code=1)
    except ValueError as error:
        fail(str(error), "see --help", code=2)
    except KeyboardInterrupt:
        fail("interrupted", None, code=130)


def fail(message: str, hint: str | None, *, code: int) -> None:
    """Print the two lines and exit."""
    say(message, hint)
    raise typer.Exit(code)


def say(message: str, hint: str | None) -> None:
    """Print the two lines."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    if hint:
        print(f"hint: {' '.join(hint.split())}", file=sys.stderr)


def warn(message: str) -> None:
    """Print a line that whoever reads the result has to know; the result stands."""
    print(f"warning: {' '.join(message.split())}", file=sys.stderr)


def show(report: object, document: str | None) -> None:
    """Print the JSON document if there is one, else the report as a table."""
    if document is not None:
        sys.stdout.write(document + "\n")
    else:
        # A table that is piped to a file should not be folded to the 80 columns of no terminal.
        Console(width=None if sys.stdout.isatty() else 120).print(report)


@contextmanager
def bars(**totals: int) -> Iterator[Callable[[str, int], None]]:
    """A progress bar for each stage; silent where stderr is no terminal."""
    columns = (
        TextColumn("{task.description:>10}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f} %"),
    )
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=stderr,
        disable=not stderr.is_terminal,
        transient=True,
    ) as progress:
        tasks = {name: progress.add_task(name, total=total) for name, total in totals.items()}
        yield lambda name, done: progress.advance(tasks[name], done)
