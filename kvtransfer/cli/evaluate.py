"""kvtransfer eval SOURCE TARGET --mapping DIR"""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from kvtransfer.cli.console import AsJson, Device, Dtype, Source, Target, bars, foreseen, show
from kvtransfer.cli.gate import GateOption, named_gate, probed
from kvtransfer.cli.measures import Asked, Measure
from kvtransfer.cli.page import put_page
from kvtransfer.cli.protocols import (
    Continuation,
    Domains,
    Lengths,
    Prefix,
    Protocol,
    ProtocolMeasure,
    Rivals,
    named_mappings,
    size,
)
from kvtransfer.cli.tasks import BatchSize, IncludePath, Limit, Shots, TaskMeasure, Tasks
from kvtransfer.cli.texts import HeldOut
from kvtransfer.cli.turns import Back, Bound, TurnMeasure, Turns, TurnTokens
from kvtransfer.cli.vectors import Vectors, named_vectors


def evaluate(
    source: Source,
    target: Target,
    mapping: Annotated[
        str | None,
        typer.Option(
            help="Mapping folder, or a shipped mapping's name. Without one, conditions that need "
            "it (mapped, unrotated, shuffled) are left out, and the exit is 1."
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
    tasks: Tasks = None,
    include_path: IncludePath = None,
    limit: Limit = None,
    shots: Shots = None,
    batch_size: BatchSize = None,
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
    turns: Turns = None,
    back: Back = None,
    turn_tokens: TurnTokens = None,
    bound: Bound = None,
    pack: Annotated[
        str | None,
        typer.Option(help="A pack of the guides for TARGET, measured as one more condition."),
    ] = None,
    prefix: Prefix = None,
    continuation: Continuation = None,
    items: Annotated[int, typer.Option(help="Text items at most.")] = 32,
    protocol: Protocol = None,
    lengths: Lengths = None,
    domain: Domains = None,
    rival: Rivals = None,
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
    page: Annotated[
        Path | None,
        typer.Option("--report", help="File to write a page to, to be opened in a browser."),
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Measure what a transferred prefix is worth to TARGET, beside every honest baseline.

    Text: held-out continuations are scored after a hidden prefix. Guides: questions are asked that
    only a hidden guide can answer. Both are left out beside --tasks, --turns and the protocols
    lengths and domains, unless they are named. Exit 1 if the mapped prefix does not beat every
    control. What a gate would have said stands beside it, and changes nothing of that.
    """
    with foreseen():
        from kvtransfer.evaluation.conditions import MAPPED, USUAL
        from kvtransfer.evaluation.evaluate import BUILTIN_GUIDES, bare
        from kvtransfer.evaluation.evaluate import evaluate as run
        from kvtransfer.evaluation.gated import gated
        from kvtransfer.evaluation.page.place import check_place
        from kvtransfer.fitting.mapping import KVMapping
        from kvtransfer.guides.guide import read_guides
        from kvtransfer.guides.pack import GuidePack
        from kvtransfer.hf.model import load
        from kvtransfer.hf.quiet import quiet
        from kvtransfer.report import write_report
        from kvtransfer.steering.expression import entries, terms

        quiet()
        # All that can be said to be wrong is said before models are loaded.
        asked_gate = named_gate(gate, mapping)
        names = None if conditions is None else tuple(entries(conditions))
        if mapping is None and (lost := {terms(name)[0] for name in names or ()} & {*MAPPED}):
            raise ValueError(f"--conditions {', '.join(sorted(lost))}: there is no --mapping")
        shares = _shares(recompute)
        if max_guides is not None and max_guides < 1:
            raise ValueError(f"--max-guides is a positive number, not {max_guides}")
        if out is not None and out.exists() and not out.is_dir():
            raise ValueError(f"--out {out} is a file; name a folder")
        if page is not None:
            check_place(page)
        held_out = HeldOut(text)
        how = ProtocolMeasure.asked(
            protocol, text=held_out, prefix=prefix, lengths=lengths, domains=domain
        )
        at = TurnMeasure.asked(turns, tokens=turn_tokens, bound=bound, text=held_out, back=back)
        answered = TaskMeasure.asked(
            tasks, include_path=include_path, limit=limit, shots=shots, batch_size=batch_size
        )
        measures: list[Measure] = [each for each in (how, at, answered) if each is not None]
        texts = asked = None
        if how is None and text != "none" and (text is not None or not measures):
            texts = held_out()
        if guides != "none" and (guides is not None or not (measures or protocol)):
            asked = read_guides(BUILTIN_GUIDES if guides in (None, "builtin") else guides)
            asked = asked[:max_guides]
        alone = texts is None and asked is None
        if alone and not measures:
            raise ValueError("--text none and --guides none leave nothing to evaluate")
        if alone and (shares or pack is not None):
            raise ValueError("--recompute and --pack are about text and guides: name one of them")
        if alone and how is None and rival:
            raise ValueError("--rival is measured on text, on guides and under protocols: name one")
        if alone and how is None and answered is None and names is not None:
            raise ValueError("--turns has arms of its own; leave --conditions out, or name --text")
        fitted = None if mapping is None else KVMapping.from_pretrained(mapping)
        rivals = named_mappings(rival)
        vectors = named_vectors(vector)
        models = load(source, dtype=dtype, device=device), load(target, dtype=dtype, device=device)
        if allow_fingerprint_mismatch:
            ends = tuple(model.spec for model in models)
            fitted = fitted and fitted.insisting_on(*ends)
            rivals = {name: each.insisting_on(*ends) for name, each in rivals.items()}
        what = Asked(
            source=models[0],
            target=models[1],
            mapping=fitted,
            rivals=rivals,
            conditions=names,
            alone=alone and how is None,
            bound=vectors,
            prefix=size(prefix, protocol),
            continuation=size(continuation, protocol),
            items=items,
            insist=allow_fingerprint_mismatch,
        )
        again = None if page is None or text in (None, "none") else held_out()
        score, texts = probed(asked_gate, *models, texts)
        stages = {each.key: each.steps(items) for each in measures}
        stages["text"] = 0 if texts is None else items
        stages["guides"] = sum(len(guide.items) for guide in asked or ())
        for each in measures:
            each.check(what)
        report = bare(*models, fitted, rivals)
        with bars(**{stage: steps for stage, steps in stages.items() if steps}) as advance:
            if not alone:
                report = run(
                    *models,
                    fitted,
                    texts=texts,
                    guides=asked,
                    conditions=names or USUAL,
                    rivals=rivals,
                    bound=vectors,
                    recompute=shares,
                    repair=repair,
                    packs={} if pack is None else {"pack": GuidePack.from_pretrained(pack)},
                    prefix=what.prefix,
                    continuation=what.continuation,
                    items=items,
                    stream=protocol == "chunks",
                    progress=lambda part: advance(part, 1),
                )
            for measure in measures:
                part = measure.part(what, partial(advance, measure.key, 1))
                report = report.with_part(measure.key, part)
        if fitted is not None:
            report = gated(report, fitted, asked_gate, probe=score)
        if out is not None:
            write_report(report, out)
        if page is not None:
            put_page(
                page,
                report,
                fitted,
                *models,
                again,
                prefix=what.prefix,
                live=what.continuation,
            )
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
