"""The whole page, and how it is written.

One file without scripts: its own policy forbids it to load anything, so that no text of a model
could, even if it were not escaped.
"""

import io
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from kvtransfer.evaluation.figure import Curve, Drawn, Figure, Series
from kvtransfer.evaluation.inside import Inside
from kvtransfer.evaluation.page.bars import patterns
from kvtransfer.evaluation.page.conditions import guide_bars, order, text_bars
from kvtransfer.evaluation.page.curve import curve
from kvtransfer.evaluation.page.guides import SHOWN, answers
from kvtransfer.evaluation.page.layers import inside_section
from kvtransfer.evaluation.page.markup import Child, Safe, el, join, n_of, said
from kvtransfer.evaluation.page.tables import listing, numbers, scrolling
from kvtransfer.evaluation.page.terms import terms
from kvtransfer.evaluation.page.verdict import RULE, Reason, Verdict
from kvtransfer.evaluation.part import Part
from kvtransfer.evaluation.report import GUIDE_COLUMNS, TEXT_COLUMNS, EvalReport
from kvtransfer.report import Provenance

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Nothing is loaded, and nothing is run."""

SIGNS = {"for": ("✓", "for it"), "doubt": ("!", "careful"), "against": ("✗", "against it")}

SYMBOLS = {"Yes": "✓", "With care": "!", "No": "✗", "Not measured": "–"}


def render(report: EvalReport, inside: Inside | None = None) -> str:
    """The page, as one HTML document.

    Args:
        report: What was measured.
        inside: What :func:`kvtransfer.evaluation.inside.look_inside` saw; None leaves it out.
    """
    title = f"{report.source} → {report.target}: what the mapped cache is worth"
    head = el(
        "head",
        None,
        el("meta", {"charset": "utf-8"}),
        el("meta", {"http-equiv": "Content-Security-Policy", "content": POLICY}),
        el("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        el("meta", {"name": "color-scheme", "content": "light dark"}),
        el("title", None, title),
        el("link", {"rel": "icon", "href": "data:,"}),
        el("style", None, _style()),
    )
    body = el(
        "body",
        None,
        patterns(),
        el("main", None, *_sections(report, inside)),
    )
    return f"<!doctype html>\n{el('html', {'lang': 'en'}, head, body)}\n"


def _sections(report: EvalReport, inside: Inside | None) -> Iterable[Child]:
    yield _top(report)
    if report.text is not None:
        text = report.text
        yield _section(
            "On text",
            f"{text.continuation} tokens are scored after {text.prefix} hidden ones, the same "
            "under every condition.",
            text_bars(text),
        )
    if report.guides is not None:
        yield _guides(report)
    if report.shares and (points := report.curve()):
        yield _section("Tokens read again", "", _repaired(report, points))
    for key, part in report.parts.items():
        yield _part(key, part)
    if inside is not None:
        yield _section(
            "Inside",
            "Where the mapping is right and where it is not, on a little text.",
            inside_section(inside, report.source, report.target),
        )
    yield _every_number(report)
    yield _section("What the words mean", "", terms())
    yield _section("How to repeat it", "", _provenance(report.provenance))


def _top(report: EvalReport) -> Safe:
    verdict = Verdict.of(report)
    columns = [
        el("div", None, el("h2", None, title), el("ul", {"class": "reasons"}, *reasons))
        for title, signs in (
            ("What speaks for it", ("for",)),
            ("What does not", ("against", "doubt")),
        )
        if (reasons := [_reason(each) for each in verdict.reasons if each.sign in signs])
    ]
    style = verdict.answer.lower().replace(" ", "-")
    return el(
        "header",
        None,
        el("p", {"class": "pair"}, said(report.source), " → ", said(report.target)),
        el("h1", None, said(verdict.sentence)),
        el("p", {"class": "also"}, said(verdict.also)) if verdict.also else None,
        el(
            "div",
            {"class": f"verdict {style}"},
            el(
                "p",
                {"class": "ask"},
                "Would I switch models on this? ",
                el(
                    "strong",
                    None,
                    el("span", {"class": "seal", "aria-hidden": "true"}, SYMBOLS[verdict.answer]),
                    f" {verdict.answer}.",
                ),
            ),
            el("div", {"class": "columns"}, *columns),
            el("p", {"class": "rule"}, RULE),
        ),
    )


def _reason(of: Reason) -> Safe:
    sign, meaning = SIGNS[of.sign]
    drawn = el("span", {"class": "sign", "role": "img", "aria-label": meaning}, sign)
    return el("li", {"class": of.sign}, drawn, el("span", None, said(of.text)))


def _section(title: str, lead: str, *inside: Child) -> Safe:
    said_first = el("p", {"class": "lead"}, lead) if lead else None
    return el("section", None, el("h2", None, title), said_first, *inside)


def _guides(report: EvalReport) -> Safe:
    guides = report.guides
    assert guides is not None
    cards: list[Child] = []
    if guides.examples:
        wanted = {"own", "mapped", "source", "none"}
        plain = [n for n in order(guides.right) if n in wanted or n in report.rivals(guides.right)]
        count = len(guides.examples)
        first = f"The first {SHOWN} of {count}" if count > SHOWN else f"All {count}"
        cards = [
            el("h3", None, "Side by side"),
            el(
                "p",
                {"class": "note"},
                f"{first} questions that are answered in the model’s own words. ✓ the expected "
                "words occur, ✗ they do not. ",
                el("mark", None, "≠marked"),
                " words differ from the answer on its own prefix; ",
                el("span", {"class": "gap"}, "[…]"),
                " stands where words of that answer are missing.",
            ),
            answers(guides.examples, plain),
        ]
    return _section(
        "On guides",
        "A guide is read by the source, and the target is asked about it without seeing it.",
        el("div", {"class": "figures"}, guide_bars(guides)),
        *cards,
    )


def _repaired(report: EvalReport, points: list[dict[str, Any]]) -> Safe:
    key, y, form = "kl_to_own", "KL to own, in nats", ".3f"
    if report.text is None:
        key, y, form = "accuracy", "accuracy", ".0%"
    found = tuple((100 * p["share"], p[key]) for p in points if p.get(key) is not None)
    drawn = Curve(
        title="Quality by the share of tokens read again",
        x="% of the prefix that the target reads again",
        y=y,
        series=(Series(name=f"{report.repair}, repaired", points=found),),
        form=form,
    )
    return _drawing(drawn)


def _part(key: str, part: Part) -> Safe:
    clause = part.sentence()
    lead = f"{clause[:1].upper()}{clause[1:]}." if clause else ""
    if isinstance(part, Drawn):
        return _section(key.capitalize(), lead, *map(_drawing, part.figures()))
    if isinstance(drawn := part.__rich__(), Text):  # which wraps
        return _section(key.capitalize(), lead, el("p", None, drawn.plain))
    console = Console(width=110, record=True, file=io.StringIO(), color_system=None)
    console.print(drawn)
    text = el("pre", None, console.export_text().rstrip())
    return _section(key.capitalize(), lead, scrolling(key, text))


def _drawing(figure: Figure) -> Safe:
    inside = curve(figure) if isinstance(figure, Curve) else listing(figure)
    note = el("p", {"class": "note"}, figure.note) if figure.note else None
    return el("section", {"class": "figure wide"}, el("h3", None, figure.title), note, inside)


def _every_number(report: EvalReport) -> Safe | None:
    shown: list[Child] = []
    missing: dict[str, str] = {}
    for name, found, columns in (
        ("text items", report.text, TEXT_COLUMNS),
        ("questions", report.guides, GUIDE_COLUMNS),
    ):
        if found is None:
            continue
        missing |= found.missing
        conditions = found.columns if hasattr(found, "columns") else found.right
        rows = []
        for condition in order(conditions):
            estimates = found.estimates(condition)
            rows.append((condition, *(estimates[key] for key, _, _ in columns)))
        shown.append(
            numbers(
                f"{n_of(found.n)} {name}; paired bootstrap 95 % intervals",
                ("condition", *(header for _, header, _ in columns)),
                rows,
                ("", *(form for *_, form in columns)),
            )
        )
    if report.text is not None and (margins := report.text.margins()):
        shown.append(
            numbers(
                f"Nats a token by which mapped beats each control, paired; {n_of(report.text.n)}",
                ("control", "margin"),
                [(name, margin) for name, margin in margins.items()],
                ("", ".3f"),
            )
        )
    if not shown:
        return None
    shown += [
        el("p", {"class": "note"}, f"{name} was left out: {why}.") for name, why in missing.items()
    ]
    return _section("Every number", "", *shown)


def _provenance(of: Provenance) -> Safe:
    facts = {
        "made": of.date,
        "commit": of.commit or "an installed package",
        "seed": str(of.seed),
        "Python": of.python,
        "machine": of.machine,
        "packages": ", ".join(f"{name} {version}" for name, version in of.packages.items()),
    }
    pairs = [join([el("dt", None, key), el("dd", None, value)]) for key, value in facts.items()]
    command = el("pre", {"class": "command"}, el("code", None, of.command))
    return join(
        [
            el("p", {"class": "note"}, "One click selects the command."),
            scrolling("the command", command),
            el("dl", {"class": "facts"}, *pairs),
        ]
    )


@cache
def _style() -> Safe:
    """Ours, and so it may stand as it is."""
    return Safe(Path(__file__).with_name("style.css").read_text(encoding="utf-8"))
