"""Would I switch models on this? A plain answer, and what speaks for and against.

Every rule is said on the page (:data:`RULE`), so that a reader may disagree with it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvtransfer.evaluation.page.markup import shown
from kvtransfer.evaluation.report import EvalReport
from kvtransfer.measures.intervals import mean
from kvtransfer.report import Estimate

ENOUGH = 0.8
"""Where the low end of the interval of what comes across must lie."""

MANY = 20
"""Items below which an interval is itself a guess."""

RULE = (
    f"“Yes” needs all of this: every control is beaten; at the low end of its interval, at least "
    f"{shown(ENOUGH, '.0%')} of the gap on text is recovered and as much of its own right answers "
    f"is kept; going on with the source alone is worse; at least {MANY} items of each kind. A "
    "control that is not beaten makes it “No”, anything else “With care”."
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
        return cls(answer=answer, sentence=_sentence(report), reasons=reasons)


def _reasons(report: EvalReport) -> Iterator[Reason]:
    yield from _on_text(report)
    yield from _on_guides(report)
    for key, part in report.parts.items():
        clause = part.sentence() or key
        yield Reason("for" if part else "doubt", _capital(clause))
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
    worth = mean(nll["none"] - nll["own"])
    if gap is None or (worth.low or 0.0) <= 0:
        yield Reason(
            "doubt",
            f"The prefix itself is not shown to help {report.target} on this text, so a share of "
            "that help says little.",
        )
    else:
        yield Reason(
            "for" if _is_enough(gap) else "doubt",
            f"On text {_share(gap)} of what the prefix is worth comes across (n = {text.n}).",
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
    right = {name: shown(float(column.mean()), ".0%") for name, column in guides.right.items()}
    alone = f", and {report.source} alone {right['source']}" if "source" in right else ""
    counts = (
        f"with the mapped guide it answers {right['mapped']} of the questions, with its own "
        f"{right['own']}, with none {right['none']}{alone} (n = {guides.n})."
    )
    if report.text is None and guides.right["mapped"].mean() <= guides.right["none"].mean():
        yield Reason("against", _capital(counts))
        return
    kept = guides.estimates("mapped")["retention"]
    enough = kept is not None and _is_enough(kept)
    yield Reason("for" if enough else "doubt", _capital(counts))
    if "source" in guides.right:
        better = mean(guides.right["mapped"] - guides.right["source"])
        if (better.high or better.value) < 0:
            yield Reason("doubt", f"{report.source} alone answers more of the questions.")
    if guides.n < MANY:
        yield Reason("doubt", f"Only {guides.n} questions: the intervals are themselves a guess.")


def _sentence(report: EvalReport) -> str:
    text, guides = report.text, report.guides
    if text is not None and "mapped" in text.columns:
        gap = text.estimates("mapped")["gap_recovered"]
        if gap is None:
            return f"A prefix makes no difference to {report.target} here, so nothing can be lost."
        if gap.value <= 0:
            return f"Nothing comes across: {report.target} does better without the mapped prefix."
        if gap.value >= 1:
            return f"All of what the prefix is worth to {report.target} comes across."
        # Rounded once, so that the two add up to 100.
        kept = round(100 * gap.value)
        return (
            f"Of what the prefix is worth to {report.target}, {shown(kept / 100, '.0%')} comes "
            f"across and {shown(1 - kept / 100, '.0%')} is lost."
        )
    if guides is not None and "mapped" in guides.right:
        right = guides.right
        return (
            f"With the mapped guide {report.target} answers "
            f"{shown(float(right['mapped'].mean()), '.0%')} of the questions; with its own, "
            f"{shown(float(right['own'].mean()), '.0%')}."
        )
    clauses = [clause for part in report.parts.values() if (clause := part.sentence())]
    if clauses:
        return _capital("; ".join(clauses)) + "."
    return "The condition ‘mapped’ was not measured."


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
