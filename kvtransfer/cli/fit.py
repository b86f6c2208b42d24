"""kvtransfer fit SOURCE TARGET --out DIR"""

from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from kvtransfer.cli.console import AsJson, Device, Dtype, Source, Target, bars, foreseen, show


def fit(
    source: Source,
    target: Target,
    out: Annotated[Path, typer.Option(help="Folder to write the mapping to.")],
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Calibration text: .txt, .jsonl, .parquet, a hub data set, '-' for stdin, or "
            "'builtin' (prose that every Python carries). May be given several times."
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="Tokens to fit on; one eighth more is held out.")
    ] = 32_768,
    chunk: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 512,
    layers: Annotated[
        str, typer.Option(help="Source layers that feed a target layer: a number, 'all' or 'auto'.")
    ] = "auto",
    strength: Annotated[
        float | None,
        typer.Option(help="Ridge strength, relative; chosen on held-out rows if not given."),
    ] = None,
    solver: Annotated[str, typer.Option(help="How to solve: ridge.")] = "ridge",
    features: Annotated[
        str,
        typer.Option(
            help="What a target's keys and values are read from: 'same' (the source's of the same "
            "kind, the paper's) or 'both' (its keys and values together)."
        ),
    ] = "same",
    refine: Annotated[
        int,
        typer.Option(
            help="Then train low-rank updates of the maps on this many windows of the text, so "
            "that the target predicts from the mapped prefix what it predicts from its own."
        ),
    ] = 0,
    rank: Annotated[int | None, typer.Option(help="Reduce each layer's map to this rank.")] = None,
    storage: Annotated[str, typer.Option(help="float32, bfloat16 or int8.")] = "float32",
    products: Annotated[
        str, typer.Option(help="auto, float64 or float32 products in a batch (sums are float64).")
    ] = "auto",
    batch: Annotated[int, typer.Option(help="Sequences read at once.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the permutation behind the shuffled control.")] = 0,
    device: Device = "cpu",
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Fit a mapping that takes SOURCE's KV cache to TARGET.

    Both models read the same tokens; keys are de-rotated with each model's own rotary module; only
    sums are kept, so memory does not grow with the number of tokens.
    """
    with foreseen():
        settings_of_layers = _layers(layers)
        _one_of("--storage", storage, ("float32", "bfloat16", "int8"))
        _one_of("--features", features, ("same", "both"))
        _one_of("--products", products, ("auto", "float64", "float32"))
        from kvtransfer import artifact
        from kvtransfer.fitting.fit import FitSettings
        from kvtransfer.fitting.fit import fit as run
        from kvtransfer.fitting.refine import RefineSettings
        from kvtransfer.fitting.refine import refine as improve
        from kvtransfer.fitting.solvers import SOLVERS
        from kvtransfer.fitting.texts import read_all
        from kvtransfer.hf.check import check
        from kvtransfer.hf.model import load
        from kvtransfer.hf.quiet import quiet

        quiet()
        _one_of("--solver", solver, tuple(SOLVERS))
        settings = FitSettings(
            tokens=tokens,
            chunk=chunk,
            layers=settings_of_layers,
            strength=strength,
            rank=rank,
            features=cast(Literal["same", "both"], features),
            products=cast(Literal["auto", "float64", "float32"], products),
            batch=batch,
            seed=seed,
        )
        steps = RefineSettings(windows=refine, seed=seed) if refine else None
        artifact.refuse_foreign(out)  # before an hour of work, not after
        # Refining reads the text once more, and standard input can be read once.
        texts = read_all(data or ["builtin"]) if not refine else list(read_all(data or ["builtin"]))
        check(source, target).raise_if_blocked()
        models = load(source, dtype=dtype, device=device), load(target, dtype=dtype, device=device)
        depth = len(models[1].spec.layers)
        with bars(capture=tokens + tokens // 7, solve=depth, refine=refine) as advance:
            report = run(*models, texts, settings, progress=advance)
            if steps is not None:
                found = improve(
                    report.mapping, *models, texts, steps, progress=lambda n: advance("refine", n)
                )
                report = report.refined_by(found)
        report.mapping.save_pretrained(
            out, dtype=cast(Literal["float32", "bfloat16", "int8"], storage)
        )
        show(report, report.to_json(folder=out) if as_json else None)
    raise typer.Exit(0 if report else 1)


def _layers(text: str) -> int | Literal["auto", "all"]:
    if text == "auto" or text == "all":
        return cast(Literal["auto", "all"], text)
    if text.isdigit() and int(text) > 0:
        return int(text)
    raise ValueError(f"--layers is a positive number, 'all' or 'auto', not {text!r}")


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{option} is one of {', '.join(allowed)}, not {value!r}")
