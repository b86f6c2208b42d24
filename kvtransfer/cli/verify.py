"""kvtransfer verify MODEL"""

from typing import Annotated

import typer

from kvtransfer.cli.console import AsJson, Device, bars, foreseen, show

BUILTIN = 3
"""Builtin guides that are read unless more are asked for: each takes minutes with a real model."""


def verify(
    model: Annotated[str, typer.Argument(help="Model that reads guides.")],
    guides: Annotated[
        str | None, typer.Option(help="Guide file (.jsonl); the builtin guides if not given.")
    ] = None,
    max_guides: Annotated[
        int | None,
        typer.Option(help="Guides at most; all of a file, 3 of the builtin ones if not given."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens written after each guide.")] = 400,
    seeds: Annotated[int, typer.Option(help="Drawn runs beside the greedy one.")] = 4,
    attention: Annotated[
        str, typer.Option(help="Attention implementations, comma-separated.")
    ] = "eager,sdpa",
    dtypes: Annotated[
        str, typer.Option(help="Of float32, bfloat16 and float16, comma-separated.")
    ] = "float32,bfloat16",
    chat: Annotated[
        bool, typer.Option("--chat", help="Guides as system messages, by the chat template.")
    ] = False,
    recompute: Annotated[
        int, typer.Option(help="Steps at which the whole sequence is read again, without a cache.")
    ] = 8,
    top_p: Annotated[float, typer.Option(help="Share of chance in the nucleus.")] = 0.95,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Is a hidden guide read exactly as if it stood in the prompt?

    The same token ids are read in five ways, from recomputing everything to a guide restored from
    a saved pack, and compared: ids, logits, greedy and drawn text. Attention that the model does
    not have is left out, and the report says so. Exit 1 on a fault, a difference that rounding does
    not explain: then the report's verdict names it. An error exits 1, too, with no report.
    """
    with foreseen():
        from kvtransfer.evaluation.evaluate import BUILTIN_GUIDES
        from kvtransfer.guides.guide import read_guides
        from kvtransfer.guides.ladder import verify as climb
        from kvtransfer.hf.model import load
        from kvtransfer.hf.quiet import quiet

        quiet()
        if max_guides is not None and max_guides < 1:
            raise ValueError(f"--max-guides is a positive number, not {max_guides}")
        ways, names = _words(attention), _words(dtypes)
        if not ways or not names:
            raise ValueError(
                "--attention and --dtypes name one each at least, such as sdpa, float32"
            )
        if guides is None:
            hidden = read_guides(BUILTIN_GUIDES)[: max_guides or BUILTIN]
        else:
            hidden = read_guides(guides, questions=False)[:max_guides]
        loaded = load(model, dtype=names[0], device=device)
        steps = len(hidden) * tokens * len(ways) * len(names)
        with bars(verify=steps) as advance:
            report = climb(
                loaded,
                hidden,
                tokens=tokens,
                seeds=seeds,
                attention=ways,
                dtypes=names,
                chat=chat,
                recompute=recompute,
                top_p=top_p,
                progress=lambda: advance("verify", 1),
            )
        show(report, report.to_json() if as_json else None)
    raise typer.Exit(0 if report else 1)


def _words(listed: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in listed.split(",") if word.strip())
