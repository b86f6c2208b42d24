"""The ``kvtransfer`` command. Answers ``--help`` without importing torch."""

import typer

from kvtransfer.cli import check, demo, evaluate, fit

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
app.command("demo")(demo.demo)


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
