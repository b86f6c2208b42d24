"""kvtransfer bench [SOURCE] TARGET [--mapping DIR]"""

from typing import Annotated

import typer

from kvtransfer.cli.console import AsJson, Device, Dtype, bars, foreseen, show


def bench(
    models: Annotated[
        list[str],
        typer.Argument(help="TARGET, or SOURCE TARGET with the mapping between them."),
    ],
    mapping: Annotated[
        str | None,
        typer.Option(help="Folder of a mapping from SOURCE to TARGET, or the name of one."),
    ] = None,
    tokens: Annotated[
        str, typer.Option(help="Lengths of the prefixes, comma-separated.")
    ] = "64,256,1024,4096",
    repeats: Annotated[int, typer.Option(help="Rounds, in each of which all is timed once.")] = 5,
    device: Device = "cpu",
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Time what a prefix costs: prefilled, restored from a pack, mapped from SOURCE, read on.

    Told as ratios within one run. With one model, only what needs no mapping. Exit 1 if restoring a
    prefix is not cheaper than prefilling it.
    """
    with foreseen():
        from kvtransfer.fitting.mapping import KVMapping
        from kvtransfer.guides.bench import bench as run
        from kvtransfer.guides.bench import require_positive
        from kvtransfer.hf.model import load
        from kvtransfer.hf.quiet import quiet

        quiet()
        lengths = _lengths(tokens)
        require_positive(lengths, repeats)  # before models are loaded
        if len(models) > 2:
            raise ValueError(f"one model, or two, not {len(models)}: {' '.join(models)}")
        if (len(models) == 2) != (mapping is not None):
            raise ValueError("SOURCE and --mapping go together: give both, or TARGET alone")
        fitted = None if mapping is None else KVMapping.from_pretrained(mapping)
        *sources, target = (load(name, dtype=dtype, device=device) for name in models)
        with bars(bench=len(lengths) * repeats) as advance:
            report = run(
                target,
                source=sources[0] if sources else None,
                mapping=fitted,
                tokens=lengths,
                repeats=repeats,
                progress=lambda: advance("bench", 1),
            )
        show(report, report.to_json() if as_json else None)
    raise typer.Exit(0 if report else 1)


def _lengths(given: str) -> list[int]:
    try:
        return sorted({int(each.replace("_", "")) for each in given.split(",")})
    except ValueError:
        raise ValueError(f"--tokens {given!r} is no list of numbers, such as 64,256") from None
