"""kvtransfer probe SOURCE TARGET"""

from typing import Annotated

import typer

from kvtransfer.cli.console import AsJson, Device, Dtype, Source, Target, bars, foreseen, show


def probe(
    source: Source,
    target: Target,
    mapping: Annotated[
        str | None,
        typer.Option(
            help="Mapping folder, or the name of a shipped mapping: judge it on the text, and on "
            "builtin prose beside it, and fit nothing."
        ),
    ] = None,
    data: Annotated[
        str, typer.Option(help="Text of the kind that is to be transferred: as fit's --data.")
    ] = "builtin",
    tokens: Annotated[int, typer.Option(help="Tokens to read.")] = 1_024,
    device: Device = "cpu",
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Say from a thousand tokens, before any fit, whether SOURCE's cache can be mapped to TARGET.

    The score compares what TARGET's attention returns from mapped keys and values with what it
    returns from its own; beside it stands what the prefix is worth to TARGET at all. Exit 1 if the
    cache does not transfer, or that is in doubt.
    """
    with foreseen():
        from kvtransfer.fitting.mapping import KVMapping
        from kvtransfer.fitting.probe import probe as run
        from kvtransfer.fitting.probe import require_tokens
        from kvtransfer.fitting.texts import builtin, read_all
        from kvtransfer.hf.check import check
        from kvtransfer.hf.model import load
        from kvtransfer.hf.quiet import quiet

        quiet()
        require_tokens(tokens)  # before models are loaded
        # A mapping was perhaps fitted on the other split.
        texts = builtin("heldout") if data == "builtin" else read_all([data])
        given = None if mapping is None else KVMapping.from_pretrained(mapping)
        check(source, target).raise_if_blocked()
        models = load(source, dtype=dtype, device=device), load(target, dtype=dtype, device=device)
        with bars(probe=tokens if given is None else 2 * tokens) as advance:
            report = run(
                *models,
                texts,
                mapping=given,
                tokens=tokens,
                progress=lambda done: advance("probe", done),
            )
        show(report, report.to_json() if as_json else None)
    raise typer.Exit(0 if report else 1)
