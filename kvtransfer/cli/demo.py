"""kvtransfer demo"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import typer

from kvtransfer.cli.console import AsJson, bars, foreseen, show, stderr
from kvtransfer.cli.page import put_page


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything a demonstration takes, to end in about three minutes on two cores."""

    tokens: int
    layers: int
    items: int
    guides: int


SIZES: Mapping[str, Size] = MappingProxyType(
    {
        "smollm2": Size(tokens=6_144, layers=4, items=4, guides=2),
        "tiny": Size(tokens=65_536, layers=4, items=32, guides=0),
    }
)


def demo(
    pair: Annotated[str, typer.Option(help=f"Which zoo pair: {' or '.join(SIZES)}.")] = "smollm2",
    page: Annotated[
        Path | None,
        typer.Option("--report", help="File to write a page to, to be opened in a browser."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check, fit and evaluate a pair of real models, from nothing, in about three minutes.

    ``mapped`` is the mapping fitted here, on little text; ``shipped`` is the one that comes with
    kvtransfer, fitted on more.
    """
    with foreseen():
        if pair not in SIZES:
            raise ValueError(f"--pair is one of {', '.join(SIZES)}, not {pair!r}")
        from kvtransfer.evaluation.evaluate import BUILTIN_GUIDES, evaluate
        from kvtransfer.evaluation.page.place import check_place
        from kvtransfer.fitting.fit import fit
        from kvtransfer.fitting.mapping import KVMapping
        from kvtransfer.fitting.settings import FitSettings
        from kvtransfer.fitting.texts import builtin
        from kvtransfer.guides.guide import read_guides
        from kvtransfer.hf.check import check
        from kvtransfer.hf.model import load
        from kvtransfer.hf.quiet import quiet
        from kvtransfer.zoo import PAIRS

        quiet()
        if page is not None:
            check_place(page)
        size, names = SIZES[pair], PAIRS[pair]
        compatible = check(*names)
        if not as_json:
            show(compatible, None)
        compatible.raise_if_blocked()
        source, target = load(names[0]), load(names[1])
        shipped = KVMapping.from_pretrained("-to-".join(names))
        say(f"fitting on {size.tokens:,} tokens of the prose that Python carries …")
        settings = FitSettings(tokens=size.tokens, layers=size.layers)
        with bars(capture=size.tokens * 8 // 7, solve=len(target.spec.layers)) as advance:
            fitted = fit(source, target, builtin("fit"), settings, progress=advance)
        say(f"held-out R²: keys {fitted.r2_keys:.2f}, values {fitted.r2_values:.2f}")
        say(f"evaluating on prose that was held out{' and on guides' if size.guides else ''} …")
        guides = read_guides(BUILTIN_GUIDES)[: size.guides]
        questions = sum(len(guide.items) for guide in guides)
        with bars(text=size.items, guides=questions) as advance:
            report = evaluate(
                source,
                target,
                fitted.mapping,
                rivals={"shipped": shipped},
                texts=builtin("heldout"),
                guides=guides or None,
                items=size.items,
                progress=lambda part: advance(part, 1),
            )
        if page is not None:
            put_page(page, report, fitted.mapping, source, target, builtin("heldout"))
        show(report, report.to_json() if as_json else None)
    raise typer.Exit(0 if report else 1)


def say(note: str) -> None:
    """A note between the steps, for people: it goes to stderr."""
    stderr.print(note, highlight=False)
