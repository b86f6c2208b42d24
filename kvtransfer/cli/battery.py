"""kvtransfer battery MODEL --source-persona … --target-persona … --topic …"""

from pathlib import Path
from typing import Annotated

import typer

from kvtransfer.cli.console import AsJson, Device, Dtype, bars, foreseen, show

PLOT = "plot.png"


def battery(
    model: Annotated[str, typer.Argument(help="Model that plays both.")] = "smollm2-135m",
    source_persona: Annotated[
        str,
        typer.Option(
            help="Whose runs are edited: a builtin name (poet, pirate), or a .toml or .json file "
            "of name, prompt (the system message), markers (its words) and texts (four or more)."
        ),
    ] = "poet",
    target_persona: Annotated[str, typer.Option(help="Whose cache they read.")] = "pirate",
    topic: Annotated[str, typer.Option(help="What both are asked.")] = "Tell me about the sea.",
    samples: Annotated[int, typer.Option(help="Runs of each configuration.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens written in each.")] = 50,
    persistence: Annotated[
        int, typer.Option(help="Tokens of the long run, a multiple of --tokens; 0 for none.")
    ] = 150,
    temperature: Annotated[float, typer.Option(help="Of the drawing.")] = 0.7,
    seed: Annotated[int, typer.Option(help="Of the drawing.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write report.json, report.txt and plot.png to.")
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Give runs of one persona the cache of another, in thirteen ways.

    Everything, bands of layers, mixtures, wrong steps, wrong order, and the same tokens under
    another prompt: how far the cache is the target's, and how far the text. Exit 1 unless replacing
    everything gives the target's own run, and its markers are surely more frequent there.
    """
    with foreseen():
        from kvtransfer.fitting.heatmap import require_drawable
        from kvtransfer.hf.model import load
        from kvtransfer.hf.quiet import quiet
        from kvtransfer.report import write_report
        from kvtransfer.steering.battery import battery as run
        from kvtransfer.steering.battery import require_settings, steps
        from kvtransfer.steering.battery_plot import save_plot
        from kvtransfer.steering.persona import read_persona

        quiet()
        require_settings(samples, tokens, persistence, temperature)
        personas = read_persona(source_persona), read_persona(target_persona)
        if out is not None:
            if out.exists() and not out.is_dir():
                raise ValueError(f"--out {out} is a file; name a folder")
            require_drawable(out / PLOT)
        loaded = load(model, dtype=dtype, device=device)
        with bars(battery=steps(loaded, tokens=tokens, persistence=persistence)) as advance:
            report = run(
                loaded,
                *personas,
                topic=topic,
                samples=samples,
                tokens=tokens,
                persistence=persistence,
                temperature=temperature,
                seed=seed,
                progress=lambda: advance("battery", 1),
            )
        if out is not None:
            write_report(report, out)
            save_plot(report, out / PLOT)
        show(report, report.to_json() if as_json else None)
    raise typer.Exit(0 if report else 1)
