"""The ``kvtransfer`` command. Answers ``--help`` without importing torch."""

import sys
from typing import cast

import typer

from kvtransfer.cli import (
    ablate,
    battery,
    bench,
    check,
    demo,
    diagnose,
    evaluate,
    fit,
    pack,
    probe,
    steer,
    verify,
)
from kvtransfer.cli.console import say

app = typer.Typer(
    name="kvtransfer",
    help="Move, reuse and change the KV caches of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("check")(check.check)
app.command("fit")(fit.fit)
app.command("eval")(evaluate.evaluate)
app.command("diagnose")(diagnose.diagnose)
app.command("probe")(probe.probe)
app.add_typer(pack.app, name="pack")
app.add_typer(steer.app, name="steer")
app.command("verify")(verify.verify)
app.command("ablate")(ablate.ablate)
app.command("battery")(battery.battery)
app.command("bench")(bench.bench)
app.command("demo")(demo.demo)


# Typer has Click's errors from Click or, since 0.20, from a copy of its own: this finds either.
UsageError = cast(type[typer.BadParameter], typer.BadParameter.__base__)


def main() -> None:
    """Entry point. Mistakes in the arguments end in the same two lines as all other errors."""
    try:
        arguments = sys.argv[1:] or ["--help"]
        # None where a command has no verdict: it did what it was told.
        code = app(arguments, prog_name="kvtransfer", standalone_mode=False) or 0
    except UsageError as error:
        command = error.ctx.command_path if error.ctx is not None else "kvtransfer"
        say(error.format_message(), f"see {command} --help")
        code = 2
    except typer.Abort:
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
