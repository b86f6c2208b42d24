"""kvtransfer eval SOURCE TARGET --mapping DIR"""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import typer

from kvtransfer.cli.console import AsJson, Device, Dtype, Source, Target, bars, foreseen, show
from kvtransfer.cli.gate import GateOption, named_gate, probed
from kvtransfer.cli.vectors import Vectors, named_vectors


def evaluate(
    source: Source,
    target: Target,
    mapping: Annotated[
        str | None,
        typer.Option(
            help="Mapping folder, or a shipped mapping's name; only what needs none without it."
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(help="Held-out text: as fit's --data; 'none' to leave text out."),
    ] = None,
    guides: Annotated[
        str | None,
        typer.Option(help="Guide file (.jsonl), 'builtin', or 'none' to leave guides out."),
    ] = None,
    conditions: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated; all if not given. With an edit: mapped+Scale(0.5,layers=mid)."
        ),
    ] = None,
    vector: Vectors = None,
    recompute: Annotated[
        str | None,
        typer.Option(
            help="Shares of the mapped prefix that TARGET reads again, such as 0,0.15,0.5,1."
        ),
    ] = None,
    repair: Annotated[
        Literal["mapped", "raw", "apart"],  # as evaluation.conditions has it, without torch
        typer.Option(
            help="Whose prefix --recompute reads again: mapped, SOURCE's cache as it is (raw), or "
            "TARGET's own, its second half read apart."
        ),
    ] = "mapped",
    pack: Annotated[
        str | None,
        typer.Option(help="A pack of the guides for TARGET, measured as one more condition."),
    ] = None,
    prefix: Annotated[int, typer.Option(help="Tokens of each text item that are hidden.")] = 256,
    continuation: Annotated[int, typer.Option(help="Tokens that are scored after it.")] = 256,
    items: Annotated[int, typer.Option(help="Text items at most.")] = 32,
    max_guides: Annotated[int | None, typer.Option(help="Guides at most.")] = None,
    allow_fingerprint_mismatch: Annotated[
        bool,
        typer.Option(
            "--allow-fingerprint-mismatch",
            help="Use a mapping fitted on other weights of the same shapes; the report says so.",
        ),
    ] = False,
    gate: GateOption = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write report.json and report.txt to.")
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Measure what a transferred prefix is worth to TARGET, beside every honest baseline.

    Text: held-out continuations are scored after a hidden prefix. Guides: questions are asked that
    only a hidden guide can answer. Exit 1 if the mapped prefix does not beat every control. What a
    gate would have said stands beside it, and changes nothing of that.
    """
    with foreseen():
        from kvtransfer.evaluation.conditions import USUAL
        from kvtransfer.evaluation.evaluate import BUILTIN_GUIDES
        from kvtransfer.evaluation.evaluate import evaluate as run
        from kvtransfer.evaluation.gated import gated
        from kvtransfer.fitting.mapping import KVMapping
        from kvtransfer.fitting.texts import builtin, read_all
        from kvtransfer.guides.guide import read_guides
        from kvtransfer.guides.pack import GuidePack
        from kvtransfer.hf.model import load
        from kvtransfer.hf.quiet import quiet
        from kvtransfer.report import write_report
        from kvtransfer.steering.expression import entries

        quiet()
        asked_gate = named_gate(gate, mapping)
        names = USUAL if conditions is None else tuple(entries(conditions))
        shares = _shares(recompute)
        if max_guides is not None and max_guides < 1:
            raise ValueError(f"--max-guides is a positive number, not {max_guides}")
        if out is not None and out.exists() and not out.is_dir():
            raise ValueError(f"--out {out} is a file; name a folder")
        texts: Iterable[str] | None = None
        if text != "none":
            texts = builtin("heldout") if text in (None, "builtin") else read_all([text])
        asked = None
        if guides != "none":
            asked = read_guides(BUILTIN_GUIDES if guides in (None, "builtin") else guides)
            asked = asked[:max_guides]
        if texts is None and asked is None:
            raise ValueError("--text none and --guides none leave nothing to evaluate")
        fitted = None if mapping is None else KVMapping.from_pretrained(mapping)
        vectors = named_vectors(vector)
        models = load(source, dtype=dtype, device=device), load(target, dtype=dtype, device=device)
        score, texts = probed(asked_gate, *models, texts)
        questions = sum(len(guide.items) for guide in asked or ())
        with bars(text=items if texts is not None else 0, guides=questions) as advance:
            report = run(
                *models,
                fitted,
                texts=texts,
                guides=asked,
                conditions=names,
                bound=vectors,
                recompute=shares,
                repair=repair,
                packs={} if pack is None else {"pack": GuidePack.from_pretrained(pack)},
                prefix=prefix,
                continuation=continuation,
                items=items,
                allow_fingerprint_mismatch=allow_fingerprint_mismatch,
                progress=lambda part: advance(part, 1),
            )
        if fitted is not None:
            report = gated(report, fitted, asked_gate, probe=score)
        if out is not None:
            write_report(report, out)
        show(report, report.to_json() if as_json else None)
    raise typer.Exit(0 if report else 1)


def _shares(given: str | None) -> tuple[float, ...]:
    """What --recompute asks for.

    Raises:
        ValueError: it is no list of numbers.
    """
    try:
        return tuple(float(share) for share in (given or "").split(",") if given is not None)
    except ValueError:
        raise ValueError(
            f"--recompute takes shares from 0 to 1, such as 0.1,0.15, not {given!r}"
        ) from None
