"""kvtransfer ablate MODEL"""

from typing import Annotated

import typer

from kvtransfer.cli.console import AsJson, Device, Dtype, bars, foreseen, show


def ablate(
    model: Annotated[str, typer.Argument(help="Model that reads guides.")],
    guides: Annotated[
        str | None,
        typer.Option(help="Guide file (.jsonl) with questions; the builtin ones if not given."),
    ] = None,
    max_guides: Annotated[int | None, typer.Option(help="Guides at most.")] = None,
    layers: Annotated[
        str, typer.Option(help="Where: all, early, mid, late, 3-7, or 9-20/32 of another depth.")
    ] = "all",
    device: Device = "cpu",
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """What is left of a hidden guide without its keys, its values, both, or itself?

    Zeroed keys are not absent ones: they take their share of the softmax. Exit 1 if what was
    removed takes any.
    """
    with foreseen():
        from kvtransfer.evaluation.ablation import ablate as run
        from kvtransfer.evaluation.evaluate import BUILTIN_GUIDES
        from kvtransfer.guides.guide import read_guides
        from kvtransfer.hf.model import load
        from kvtransfer.hf.quiet import quiet
        from kvtransfer.steering.layers import which

        quiet()
        if max_guides is not None and max_guides < 1:
            raise ValueError(f"--max-guides is a positive number, not {max_guides}")
        asked = read_guides(guides or BUILTIN_GUIDES)[:max_guides]
        loaded = load(model, dtype=dtype, device=device)
        which(layers, len(loaded.spec.layers))  # before anything is read, not after
        with bars(questions=sum(len(guide.items) for guide in asked)) as advance:
            report = run(loaded, asked, layers=layers, progress=lambda: advance("questions", 1))
        show(report, report.to_json() if as_json else None)
    raise typer.Exit(0 if report else 1)
