"""The evaluation's result: tables for people, JSON for scripts, one sentence for the hurried."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from kvtransfer.evaluation.conditions import CONDITIONS, CONTROLS
from kvtransfer.evaluation.curve import condition_of, curve, curve_table
from kvtransfer.evaluation.guide_items import GuideResult
from kvtransfer.evaluation.part import Part
from kvtransfer.evaluation.text import TextResult
from kvtransfer.report import Estimate, Provenance, to_json
from kvtransfer.steering.expression import terms

if TYPE_CHECKING:
    from kvtransfer.evaluation.inside import Inside

TEXT_COLUMNS = (
    ("nll", "NLL", ".3f"),
    ("perplexity", "perplexity", ".2f"),
    ("kl_to_own", "KL to own", ".3f"),
    ("top1_agreement", "top-1", ".0%"),
    ("attention_cosine", "attention cos", ".3f"),
    ("gap_recovered", "gap recovered", ".0%"),
    ("retention", "retention", ".0%"),
)
GUIDE_COLUMNS = (
    ("accuracy", "accuracy", ".0%"),
    ("gap_recovered", "gap recovered", ".0%"),
    ("retention", "retention", ".0%"),
)
EXAMPLES_SHOWN = 3


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class EvalReport:
    """What a mapping is worth. True where ``mapped`` beats every control that was measured, and
    every further part is true.

    Beating means that the 95 % interval of the paired NLL difference lies above zero; without
    text, that more guide items are answered than without the guide. Where another prefix is
    repaired, true if reading the most of it again brings it nearer to ``own``.
    """

    source: str
    target: str
    text: TextResult | None
    guides: GuideResult | None
    provenance: Provenance
    notes: tuple[str, ...] = ()
    """What a reader must know before any number: that a fingerprint was overruled, say."""
    shares: tuple[float, ...] = ()
    """How much of a prefix was read again, where that was asked."""
    repair: str = "mapped"
    """Whose prefix that was."""
    parts: Mapping[str, Part] = field(default_factory=dict)
    """What was measured beside text and guides, by its key in the JSON."""

    def __bool__(self) -> bool:
        if not all(self.parts.values()):
            return False
        if self.parts and self.text is None and self.guides is None:
            return True
        return self._mapped_is_better()

    def _mapped_is_better(self) -> bool:
        if self.repair != "mapped":
            return self._improves()
        if self.text is not None:
            margins = self.text.margins()
            return bool(margins) and all((m.low or 0.0) > 0 for m in margins.values())
        if self.guides is not None and "mapped" in self.guides.right:
            return bool(self.guides.right["mapped"].mean() > self.guides.right["none"].mean())
        return False

    def with_part(self, key: str, part: Part) -> "EvalReport":
        """The same, and one more thing that was measured, which JSON holds under ``key``."""
        return replace(self, parts={**self.parts, key: part})

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape that scripts rely on."""
        document: dict[str, Any] = {
            "source": self.source,
            "target": self.target,
            "provenance": self.provenance.to_dict(),
            "notes": list(self.notes),
        } | {key: part.to_dict() for key, part in self.parts.items()}
        if self.text is not None:
            document["text"] = {
                "n": self.text.n,
                "protocol": "chunks" if self.text.stream else None,
                "prefix_tokens": self.text.prefix,
                "continuation_tokens": self.text.continuation,
                "conditions": {
                    name: _plain(self.text.estimates(name)) for name in self.text.columns
                },
                "margins": _plain(self.text.margins()),
                "items": {
                    name: {metric: column.tolist() for metric, column in found.items()}
                    for name, found in self.text.columns.items()
                },
                "missing": self.text.missing,
            }
        if self.guides is not None:
            document["guides"] = {
                "n": self.guides.n,
                "chance": float(self.guides.chance.mean()),
                "conditions": {
                    name: _plain(self.guides.estimates(name)) for name in self.guides.right
                },
                "items": {name: column.tolist() for name, column in self.guides.right.items()},
                "examples": [
                    {"guide": e.guide, "prompt": e.prompt, "expect": e.expect, "texts": e.texts}
                    for e in self.guides.examples
                ],
                "missing": self.guides.missing,
            }
        if self.shares:
            document["recompute"] = [
                {
                    key: each.to_dict() if isinstance(each, Estimate) else each
                    for key, each in point.items()
                }
                for point in self.curve()
            ]
        return document

    def curve(self) -> list[dict[str, Any]]:
        """Quality against the the share of a prefix that was read again, a point a share."""
        return curve(self.shares, self.text, self.guides, of=self.repair)

    def _improves(self) -> bool:
        """Whether the last point of the curve is better than the first."""
        points = self.curve()
        for key, sign in (("kl_to_own", -1), ("accuracy", 1)):
            found = [point[key].value for point in points if point.get(key) is not None]
            if len(found) > 1:
                return bool(sign * found[-1] > sign * found[0])
        return False

    def to_json(self) -> str:
        """Stable text."""
        return to_json(self.to_dict())

    def to_html(self, *, inside: "Inside | None" = None) -> str:
        """The page: one HTML document without scripts.

        Args:
            inside: What :func:`kvtransfer.evaluation.inside.look_inside` saw, to be drawn too.
        """
        from kvtransfer.evaluation.page.page import render

        return render(self, inside)

    def __rich__(self) -> Group:
        parts: list[RenderableType] = [Text(f"Note: {note}.", style="red") for note in self.notes]
        if self.text is not None:
            parts.append(_text_table(self.text, self.source, self.target))
            if margins := self.text.margins():
                beaten = ", ".join(f"{name} by {margin:.3f}" for name, margin in margins.items())
                parts.append(Text(f"In nats a token, paired, mapped beats {beaten}."))
        if self.guides is not None:
            parts.append(_guide_table(self.guides))
            if self.guides.examples:
                parts.append(_example_table(self.guides, without=self._repaired()))
        if points := self.curve():
            parts.append(curve_table(points, of=self.repair))
        parts += [part.__rich__() for part in self.parts.values()]
        missing = (self.text.missing if self.text else {}) | (
            self.guides.missing if self.guides else {}
        )
        parts += [Text(f"{name} was left out: {why}", style="dim") for name, why in missing.items()]
        parts.append(Text(self.sentence(), style="bold"))
        return Group(*parts)

    def sentence(self) -> str:
        """What the numbers mean, in one sentence."""
        said = []
        if self.text is not None and "mapped" in self.text.columns:
            gap = self.text.estimates("mapped")["gap_recovered"]
            said.append(
                f"of what the prefix is worth to {self.target}, the cache of {self.source} brings "
                f"{_percent(gap)} across (a share of NLL, n = {self.text.n})"
            )
            for name in self.rivals(self.text.columns):
                rival = self.text.estimates(name)["gap_recovered"]
                said.append(f"the mapping '{name}' {_percent(rival)}")
            if "source" in self.text.columns:
                alone = self.text.estimates("source")["gap_recovered"]
                said.append(f"{self.source} alone stands at {_percent(alone)}")
        if self.guides is not None and "mapped" in self.guides.right:
            right = self.guides.right
            said.append(
                f"with the mapped guide it answers {right['mapped'].mean():.0%} of the questions, "
                + "".join(
                    f"with '{name}' {right[name].mean():.0%}, " for name in self.rivals(right)
                )
                + f"with its own {right['own'].mean():.0%}, with none {right['none'].mean():.0%} "
                f"(n = {self.guides.n})"
            )
        if self.repair != "mapped":
            said += [
                f"of the NLL that {self.repair} loses, reading {point['share']:.0%} of its tokens "
                f"again wins back {_percent(point['loss_recovered'])}"
                for point in self.curve()
                if point["share"] and point.get("loss_recovered") is not None
            ]
        said += [clause for part in self.parts.values() if (clause := part.sentence())]
        if not said:
            return "The condition 'mapped' was not measured."
        sentence = "; ".join(said)
        doubt = (
            ""
            if self._mapped_is_better()
            or self.repair != "mapped"
            or (self.text is None and self.guides is None)
            else "; it does not beat every control, so do not rely on this mapping"
        )
        return sentence[0].upper() + sentence[1:] + doubt + "."

    def rivals(self, measured: Iterable[str]) -> list[str]:
        """Those of some conditions that are other mappings, and not an edit of a prefix."""
        others = {*measured} - {*CONDITIONS, *self._repaired()}
        return sorted(name for name in others if len(terms(name)) == 1)

    def _repaired(self) -> set[str]:
        """The conditions whose tokens were partly read again."""
        return {condition_of(share, self.repair) for share in self.shares if share}


def _percent(estimate: Estimate | None) -> str:
    return "no measurable share" if estimate is None else f"{estimate:.0%}"


def _plain(estimates: dict[str, Any]) -> dict[str, Any]:
    return {
        name: estimate.to_dict() if isinstance(estimate, Estimate) else None
        for name, estimate in estimates.items()
    }


def _text_table(result: TextResult, source: str, target: str) -> Table:
    table = Table(
        Column("condition", overflow="fold"),
        *(header for _, header, _ in TEXT_COLUMNS),
        title=f"{source} → {target}: {result.continuation:,} tokens after {result.prefix:,} hidden"
        + (", chunks of one text" if result.stream else ""),
        caption=f"n = {result.n} items; paired bootstrap 95 % intervals over items",
    )
    for name in result.columns:
        estimates = result.estimates(name)
        _row(table, name, [(estimates[key], form) for key, _, form in TEXT_COLUMNS])
    return table


def _guide_table(result: GuideResult) -> Table:
    table = Table(
        Column("condition", overflow="fold"),
        *(header for _, header, _ in GUIDE_COLUMNS),
        title="questions about a hidden guide",
        caption=f"n = {result.n} items; guessing gives {result.chance.mean():.0%}",
    )
    for name in result.right:
        estimates = result.estimates(name)
        _row(table, name, [(estimates[key], form) for key, _, form in GUIDE_COLUMNS])
    return table


def _row(table: Table, name: str, cells: list[tuple[Estimate | None, str]]) -> None:
    style = {"mapped": "bold", "own": "green", "none": "dim"}.get(name)
    shown = ["–" if e is None else _compact(e, form) for e, form in cells]
    table.add_row(name, *shown, style=style)


def _compact(estimate: Estimate, form: str) -> str:
    """Value over interval, so that seven columns fit a terminal."""
    text = format(estimate.value, form)
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text}\n{format(estimate.low, form)}–{format(estimate.high, form)}"


def _example_table(result: GuideResult, *, without: set[str]) -> Table:
    left_out = {*CONTROLS, *without} - {"none"}
    names = [name for name in result.right if name not in left_out]
    table = Table("question", "expected", *names, title="side by side")
    for example in result.examples[:EXAMPLES_SHOWN]:
        question = example.prompt.strip().splitlines()[0].removeprefix("Question:").strip()
        table.add_row(question, example.expect, *(example.texts.get(name, "–") for name in names))
    return table
