"""kvtransfer fit SOURCE TARGET --out DIR"""

from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer

from kvtransfer.cli.console import AsJson, Device, Dtype, Source, Target, bars, foreseen, show


def fit(
    source: Source,
    target: Target,
    out: Annotated[Path, typer.Option(help="Folder to write the mapping to.")],
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Calibration text: .txt, .jsonl, .parquet, a hub data set, '-' for stdin, "
            "'builtin' (prose that every Python carries), 'spaced:NAME' (NAME with every "
            "punctuation mark on its own), or 'self:N' (N tokens that TARGET writes). May be given "
            "several times."
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
    solver: Annotated[
        str,
        typer.Option(
            help="How to solve: ridge (the paper's), headwise, procrustes, lowrank, attention, "
            "mlp; or auto, which tries many and takes the best within --budget."
        ),
    ] = "ridge",
    budget: Annotated[
        str | None,
        typer.Option(
            help="With --solver auto: what the map may cost, as a size (9.6MB, as stored) or a "
            "time to map one token (40us)."
        ),
    ] = None,
    scale: Annotated[
        Literal["relative", "absolute"],
        typer.Option(help="What --strength is relative to: 'relative', or 'absolute' (the paper)."),
    ] = "relative",
    selection: Annotated[
        Literal["top", "greedy"],
        typer.Option(
            "--select",
            help="Source layers: the 'top' ones alone (the paper), or 'greedy', each time the one "
            "that adds most.",
        ),
    ] = "top",
    first: Annotated[
        int,
        typer.Option(
            help="Rows that a sequence's first token counts for at most, where first tokens are "
            "alike (an attention sink); 1 for the paper's recipe."
        ),
    ] = 256,
    before: Annotated[
        int,
        typer.Option(
            help="Source layers, evenly spaced, that may be read at the token before, too, where "
            "held-out rows say so: the keys of an induction head tell of that token."
        ),
    ] = 0,
    start: Annotated[
        int | None,
        typer.Option(
            help="Run the target's first START layers for real: their keys and values are exact, "
            "and the others read the state there too. 0 costs a look-up of embeddings."
        ),
    ] = None,
    gain: Annotated[float, typer.Option(help="How far outputs are spread from their mean.")] = 1.0,
    heatmap: Annotated[
        Path | None,
        typer.Option(help="Draw how much each source layer explains of each target layer (.png)."),
    ] = None,
    features: Annotated[
        Literal["same", "both"],
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
    storage: Annotated[
        Literal["float32", "bfloat16", "int8"], typer.Option(help="What the maps are saved in.")
    ] = "float32",
    products: Annotated[
        Literal["auto", "float64", "float32"],
        typer.Option(help="Dtype of the products in a batch (sums are float64)."),
    ] = "auto",
    batch: Annotated[int, typer.Option(help="Sequences read at once.")] = 4,
    band: Annotated[
        int | None,
        typer.Option(
            help="Gather and try only source layers within this many of a target layer's "
            "proportional depth; all, if not given."
        ),
    ] = None,
    moments: Annotated[
        str,
        typer.Option(
            help="Where the moments lie: 'cpu' (memory), 'device' (a stretch of batches at a time "
            "on the device), or a folder, in files that are gone when the fit ends."
        ),
    ] = "cpu",
    passes: Annotated[
        int,
        typer.Option(help="2: read the text for keys, and again for values: half as much at once."),
    ] = 1,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Folder for what a killed fit goes on from, when it is given again; removed when "
            "the mapping is saved."
        ),
    ] = None,
    every: Annotated[
        int, typer.Option("--checkpoint-every", help="Batches between two checkpoints.")
    ] = 64,
    seed: Annotated[int, typer.Option(help="Of the permutation behind the shuffled control.")] = 0,
    device: Device = "cpu",
    source_device: Annotated[
        str | None, typer.Option(help="Torch device of SOURCE, where it is not --device.")
    ] = None,
    target_device: Annotated[
        str | None, typer.Option(help="Torch device of TARGET, where it is not --device.")
    ] = None,
    device_map: Annotated[
        str | None,
        typer.Option(
            help="Spread each model over devices, as transformers does ('auto', 'balanced', …), "
            "instead of --device."
        ),
    ] = None,
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Fit a mapping that takes SOURCE's KV cache to TARGET.

    Both models read the same text; keys are de-rotated with each model's own rotary module; only
    sums are kept, so memory does not grow with the number of tokens.
    """
    with foreseen():
        settings_of_layers = _layers(layers)
        if budget is not None and solver != "auto":
            raise ValueError("--budget is for --solver auto, which has maps to choose from")
        from kvtransfer import artifact
        from kvtransfer.fitting import checkpoint as checkpoints
        from kvtransfer.fitting.fit import fit as run
        from kvtransfer.fitting.heatmap import require_drawable, save_heatmap
        from kvtransfer.fitting.network_settings import NetworkSettings
        from kvtransfer.fitting.refine import refine as improve
        from kvtransfer.fitting.refine_settings import RefineSettings
        from kvtransfer.fitting.selftext import read_all_with, self_tokens
        from kvtransfer.fitting.settings import SOLVER_NAMES, FitSettings
        from kvtransfer.fitting.texts import read_all
        from kvtransfer.fitting.tried import Budget
        from kvtransfer.fitting.workspace import Workspace
        from kvtransfer.hf.check import check
        from kvtransfer.hf.model import load
        from kvtransfer.hf.quiet import quiet

        quiet()
        _one_of("--solver", solver, SOLVER_NAMES)
        settings = FitSettings(
            tokens=tokens,
            chunk=chunk,
            layers=settings_of_layers,
            solver=solver,
            strength=strength,
            scale=scale,
            rank=rank,
            gain=gain,
            features=features,
            selection=selection,
            first=first,
            before=before,
            band=band,
            start=start,
            products=products,
            batch=batch,
            seed=seed,
            network=NetworkSettings(seed=seed),
        )
        workspace = Workspace(
            moments=_place(moments),
            passes=passes,
            checkpoint=checkpoint,
            every=every,
        )
        if device_map is not None and (source_device or target_device or device != "cpu"):
            raise ValueError("--device-map places the models; leave --device and the like out")
        bound = Budget() if budget is None else Budget.parse(budget)
        steps = RefineSettings(windows=refine, seed=seed) if refine else None
        if heatmap is not None:
            require_drawable(heatmap)
        artifact.refuse_foreign(out)  # before an hour of work, not after
        if checkpoint is not None:
            checkpoints.refuse_foreign(checkpoint)
        names = data or ["builtin"]
        written = [self_tokens(name) for name in names]
        texts = read_all(names) if not any(written) else iter(())
        check(source, target).raise_if_blocked()
        models = (
            load(source, dtype=dtype, device=source_device or device, device_map=device_map),
            load(target, dtype=dtype, device=target_device or device, device_map=device_map),
        )
        if any(written):
            texts = read_all_with(names, models[1], seed=seed)
        if steps is not None:  # refining reads the text once more, and some can be read only once
            texts = iter(kept := list(texts))
        depth = len(models[1].spec.layers)
        read = tokens + tokens // 7
        stages = {"capture": passes * read, "solve": depth}
        stages |= {"try": 13} if solver == "auto" else {}
        stages |= {"rows": read, "train": depth} if solver == "mlp" else {}
        stages |= {"refine": refine} if refine else {}
        with bars(**stages) as advance:
            report = run(
                *models,
                texts,
                settings,
                budget=bound,
                storage=storage,
                workspace=workspace,
                progress=advance,
            )
            if steps is not None:
                found = improve(
                    report.mapping, *models, kept, steps, progress=lambda n: advance("refine", n)
                )
                report = report.refined_by(found)
        report.mapping.save_pretrained(out, dtype=storage)
        if checkpoint is not None:
            checkpoints.remove(checkpoint)
        if heatmap is not None and report.ranking is not None:
            save_heatmap(
                report.ranking,
                heatmap,
                source=report.mapping.source.name,
                target=report.mapping.target.name,
                chosen=report.sources,
            )
        show(report, report.to_json(folder=out) if as_json else None)
    raise typer.Exit(0 if report else 1)


def _layers(text: str) -> int | Literal["auto", "all"]:
    if text == "auto" or text == "all":
        return cast(Literal["auto", "all"], text)
    if text.isdigit() and int(text) > 0:
        return int(text)
    raise ValueError(f"--layers is a positive number, 'all' or 'auto', not {text!r}")


def _place(text: str) -> Any:
    """Where moments are to lie: a word, or a folder."""
    if text in ("cpu", "device"):
        return text
    if text.partition(":")[0] in ("gpu", "cuda", "mps", "xpu", ""):
        raise ValueError(
            f"--moments is 'cpu', 'device' (TARGET's, whichever that is) or a folder, not {text!r}"
        )
    return Path(text)


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{option} is one of {', '.join(allowed)}, not {value!r}")
