"""kvtransfer diagnose SOURCE TARGET --mapping DIR"""

from typing import Annotated

import typer

from kvtransfer.cli.console import AsJson, Device, Dtype, Source, Target, bars, foreseen, show


def diagnose(
    source: Source,
    target: Target,
    mapping: Annotated[
        str, typer.Option(help="Folder of a mapping, or the name of one that ships.")
    ],
    text: Annotated[
        str | None,
        typer.Option(help="Held-out text, '-' for stdin; builtin prose if not given."),
    ] = None,
    items: Annotated[int, typer.Option(help="Windows to look at.")] = 4,
    prefix: Annotated[int, typer.Option(help="Hidden tokens of a window.")] = 256,
    continuation: Annotated[int, typer.Option(help="Live tokens of a window.")] = 64,
    device: Device = "cpu",
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Show where a mapping goes wrong, layer by layer and head by head.

    R², the cosine of what attention returns, and how much of the error sits where the target
    looks. Exit 1 unless every mapped layer beats its control.
    """
    with foreseen():
        from kvtransfer.fitting.diagnose import diagnose as look
        from kvtransfer.fitting.mapping import KVMapping
        from kvtransfer.fitting.texts import builtin, read_all
        from kvtransfer.hf.model import load
        from kvtransfer.hf.quiet import quiet

        quiet()
        fitted = KVMapping.from_pretrained(mapping)
        texts = builtin("heldout") if text is None else read_all([text])
        models = load(source, dtype=dtype, device=device), load(target, dtype=dtype, device=device)
        with bars(diagnose=items) as advance:
            report = look(
                fitted,
                *models,
                texts,
                prefix=prefix,
                continuation=continuation,
                items=items,
                progress=lambda n: advance("diagnose", n),
            )
        show(report, report.to_json() if as_json else None)
    raise typer.Exit(0 if report else 1)
