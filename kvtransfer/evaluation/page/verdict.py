"""Would I switch models on this? A plain answer, and what speaks for and against.

Every rule is said on the page (:data:`RULE`), so that a reader may disagree with it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvtransfer.evaluation.conditions import CONTROLS
from kvtransfer.evaluation.gated import Gated
from kvtransfer.evaluation.page.markup import n_of, shown
from kvtransfer.evaluation.report import EvalReport
from kvtransfer.evaluation.text import TextResult
from kvtransfer.measures.intervals import mean
from kvtransfer.report import Estimate

ENOUGH = 0.8
"""Where the low end of the interval of what comes across must lie."""

MANY = 20
"""Items below which an interval is itself a guess."""

RULE = (
    f"“Yes” needs all of this: every control is beaten; at the low end of its interval, at least "
    f"{shown(ENOUGH, '.0%')} of the gap on text is recovered and as much of its own right answers "
    f"is kept; going on with the source alone is worse; at least {MANY} items of each kind; "
    "nothing else speaks against it. A control that is not beaten on text makes it “No”, "
    "anything else “With care”."
)

Answer = Literal["Yes", "With care", "No", "Not measured"]
Sign = Literal["for", "doubt", "against"]


@dataclass(frozen=True, slots=True)
class Reason:
    """One thing that was looked at, in a sentence."""

    sign: Sign
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer, what was gained and lost in a sentence, and the reasons."""

    answer: Answer
    sentence: str
    also: str
    """The same of the other thing that was measured; may be empty."""
    reasons: tuple[Reason, ...]

    @classmethod
    def of(cls, report: EvalReport) -> "Verdict":
        """What the numbers say."""
        reasons = tuple(_reasons(report))
        signs = {reason.sign for reason in reasons}
        answer: Answer = "Not measured"
        if "against" in signs:
            answer = "No"
        elif "doubt" in signs:
            answer = "With care"
        elif signs:
            answer = "Yes"
        return cls(answer=answer, sentence=_sentence(report), also=_also(report), reasons=reasons)


def _reasons(report: EvalReport) -> Iterator[Reason]:
    beside = [*_on_text(report), *_on_guides(report)]
    yield from beside
    gates = {key: part for key, part in report.parts.items() if isinstance(part, Gated)}
    others = {key: part for key, part in report.parts.items() if key not in gates}
    for key, part in others.items():
        clause = part.sentence() or key
        yield Reason("for" if part else "doubt", _capital(clause))
    if others and not beside:
        yield Reason("doubt", "Neither text nor guides were measured, with controls beside them.")
    if others or beside:  # a gate predicts; it measures nothing
        for gate in gates.values():
            if clause := gate.sentence():
                yield Reason("doubt", _capital(clause))
    for note in report.notes:
        yield Reason("doubt", _capital(note))


def _on_text(report: EvalReport) -> Iterator[Reason]:
    text = report.text
    if text is None or "mapped" not in text.columns:
        return
    margins = text.margins()
    unbeaten = [name for name, margin in margins.items() if (margin.low or 0.0) <= 0]
    if unbeaten:
        yield Reason("against", f"On text it is not shown to beat {_and(unbeaten)}.")
    elif margins:
        yield Reason("for", f"On text it beats every control: {_and(list(margins))}.")
    nll = {name: column["nll"] for name, column in text.columns.items()}
    gap = text.estimates("mapped")["gap_recovered"]
    if gap is None or not _is_worth_something(text):
        yield Reason(
            "doubt",
            f"The prefix itself is not shown to help {report.target} on this text, so a share of "
            "that help says little.",
        )
    else:
        yield Reason(
            "for" if _is_enough(gap) else "doubt",
            f"On text, {_share(gap)} of the gap from no prefix to its own is recovered "
            f"({n_of(text.n)}).",
        )
    if "source" in nll:
        better = mean(nll["source"] - nll["mapped"])
        if (better.low or 0.0) > 0:
            yield Reason(
                "for",
                f"{report.target} on it predicts text better than {report.source}, by "
                f"{format(better.value, '.3f')} nats a token.",
            )
        else:
            yield Reason(
                "doubt", f"On text it is not shown to be better than staying with {report.source}."
            )
    else:
        yield Reason("doubt", f"{report.source} alone was not measured beside it.")
    if text.n < MANY:
        yield Reason("doubt", f"Only {text.n} text items: its intervals are themselves a guess.")


def _on_guides(report: EvalReport) -> Iterator[Reason]:
    guides = report.guides
    if guides is None or "mapped" not in guides.right:
        return
    right = guides.right
    margins = {name: mean(right["mapped"] - right[name]) for name in CONTROLS if name in right}
    unbeaten = [name for name, margin in margins.items() if (margin.low or 0.0) <= 0]
    if unbeaten:
        # Of few questions, each right or wrong, a control may be as good by chance.
        alone = report.text is None and "none" in unbeaten
        sign: Sign = "against" if alone else "doubt"
        yield Reason(sign, f"On guides it is not shown to beat {_and(unbeaten)}.")
    elif margins:
        yield Reason("for", f"On guides it beats every control: {_and(list(margins))}.")
    kept = guides.estimates("mapped")["retention"]
    if kept is None:
        yield Reason("doubt", "On its own cache it answers nothing, so there is nothing to keep.")
    else:
        yield Reason(
            "for" if _is_enough(kept) else "doubt",
            f"On guides it gives {_share(kept)} as many right answers as on its own cache "
            f"({n_of(guides.n)}).",
        )
    if "source" in right:
        better = mean(right["mapped"] - right["source"])
        if (better.low or 0.0) <= 0:
            yield Reason(
                "doubt",
                f"On guides it is not shown to be better than staying with {report.source}.",
            )
    if guides.n < MANY:
        yield Reason("doubt", f"Only {guides.n} questions: the intervals are themselves a guess.")


def _sentence(report: EvalReport) -> str:
    text = report.text
    if text is not None and "mapped" in text.columns:
        gap = text.estimates("mapped")["gap_recovered"]
        if gap is None or not _is_worth_something(text):
            return "Having read the text is not shown to help here, so little can come across."
        if gap.value <= 0:
            return "Nothing comes across: without the mapped cache, predictions are as good."
        if gap.value >= 1:
            return "All of the benefit of having read the text comes across."
        if gap.low is None or gap.high is None or gap.low <= 0 or gap.high >= 2:
            between = "" if gap.low is None else f", {_share(gap).partition('(')[2].rstrip(')')}"
            return (
                f"About {shown(gap.value, '.0%')} of the benefit of having read the text comes "
                f"across, but {text.n} items cannot tell{between}."
            )
        # Rounded once, so that the two add up to 100.
        kept = round(100 * gap.value)
        return (
            f"{shown(kept / 100, '.0%')} of the benefit of having read the text comes across; "
            f"{shown(1 - kept / 100, '.0%')} is lost."
        )
    if told := _answered(report):
        return told
    clauses = [clause for part in report.parts.values() if (clause := part.sentence())]
    if clauses:
        return _capital("; ".join(clauses))
    return "The condition ‘mapped’ was not measured."


def _also(report: EvalReport) -> str:
    """What the guides say beside text."""
    if report.text is not None and "mapped" in report.text.columns:
        return _answered(report)
    return ""


def _answered(report: EvalReport) -> str:
    guides = report.guides
    if guides is None or "mapped" not in guides.right:
        return ""
    own, mapped, none = (
        round(100 * float(guides.right[name].mean())) for name in ("own", "mapped", "none")
    )
    gained, lost = mapped - none, own - mapped
    return (
        f"Of questions about a guide that only {report.source} has read, {report.target} answers "
        f"{shown(mapped / 100, '.0%')}: {abs(gained)} points {'more' if gained >= 0 else 'fewer'} "
        f"than without the guide, {abs(lost)} {'fewer' if lost >= 0 else 'more'} than if it had "
        "read it itself."
    )


def _is_worth_something(text: TextResult) -> bool:
    """Whether the target's own prefix helps it, of which alone there can be a share."""
    worth = mean(text.columns["none"]["nll"] - text.columns["own"]["nll"])
    return (worth.low or 0.0) > 0


def _is_enough(estimate: Estimate) -> bool:
    return estimate.low is not None and estimate.low >= ENOUGH


def _share(estimate: Estimate) -> str:
    text = shown(estimate.value, ".0%")
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text} ({shown(estimate.low, '.0%')} to {shown(estimate.high, '.0%')})"


def _and(names: list[str]) -> str:
    named = ["no prefix" if name == "none" else name for name in names]
    return named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"


def _capital(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "!", "?")) else text + "."
