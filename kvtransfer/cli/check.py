"""kvtransfer check SOURCE TARGET"""

from typing import Annotated

import typer

from kvtransfer.cli.console import AsJson, Source, Target, foreseen, show


def check(
    source: Source,
    target: Target,
    weights: Annotated[
        bool,
        typer.Option(
            "--weights",
            help="Load both models: compare fingerprints, and measure what positions do to keys.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say whether SOURCE's cache can be used by TARGET. Exit 1 if it cannot.

    A model is a folder, a hub id, a .gguf file or a zoo alias. Configs and tokenizers are read,
    and weights only if asked for.
    """
    with foreseen():
        from kvtransfer.hf.check import check as compare  # torch stays out of --help
        from kvtransfer.hf.quiet import quiet

        quiet()
        report = compare(source, target, weights=weights)
        show(report, report.to_json() if as_json else None)
    raise typer.Exit(0 if report else 1)
