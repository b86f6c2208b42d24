"""kvtransfer check SOURCE TARGET"""

import typer

from kvtransfer.cli.console import AsJson, Source, Target, foreseen, show


def check(source: Source, target: Target, as_json: AsJson = False) -> None:
    """Say whether SOURCE's cache can be used by TARGET. Exit 1 if it cannot.

    A model is a folder, a hub id, a .gguf file or a zoo alias. Configs and tokenizers are read,
    weights are not.
    """
    with foreseen():
        from kvtransfer.hf.check import check as compare  # torch stays out of --help
        from kvtransfer.hf.quiet import quiet

        quiet()
        report = compare(source, target)
        show(report, report.to_json() if as_json else None)
    raise typer.Exit(0 if report else 1)
