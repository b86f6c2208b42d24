"""What became of a mapping as prefixes grew: table, sentence, JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from kvtransfer.evaluation.figure import Curve, Figure, Series
from kvtransfer.evaluation.rivals import beats_floor, change, plain_change, plain_text, points
from kvtransfer.evaluation.text import TextResult
from kvtransfer.report import Estimate

COLUMNS = (
    ("nll", "NLL", ".3f"),
    ("kl_to_own", "KL to own", ".3f"),
    ("top1_agreement", "top-1", ".0%"),
    ("gap_recovered", "gap recovered", ".0%"),
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LengthsResult:
    """The same scored tokens after prefixes of several lengths. True where every mapping beats no
    prefix at every length, by the 95 % interval of the paired difference."""

    texts: Mapping[int, TextResult]
    """By the tokens of the prefix, ascending. Item i is the same scored tokens in all of them."""
    calibrated: Mapping[str, int | None]
    """By mapping, the longest text that its fit read; None where it does not say."""
    left_out: int = 0
    """Windows that the source's tokenizer cannot spell."""

    def __bool__(self) -> bool:
        return all(
            beats_floor(found, name) for found in self.texts.values() for name in self.calibrated
        )

    @property
    def n(self) -> int:
        """Windows."""
        return next(iter(self.texts.values())).n

    def beyond(self, name: str, length: int) -> bool | None:
        """Whether a prefix is longer than any that the mapping was fitted on; None if unknown."""
        limit = self.calibrated.get(name)
        return None if limit is None else length > limit

    def reference(self, name: str) -> int | None:
        """The longest measured prefix within what the mapping was fitted on."""
        return max((each for each in self.texts if self.beyond(name, each) is False), default=None)

    def change(self, name: str, length: int) -> dict[str, Estimate | None] | None:
        """What a mapping recovers at ``length``, less what it does at its reference; None where
        it has none, or ``length`` is not beyond it."""
        reference = self.reference(name)
        if reference is None or not self.beyond(name, length):
            return None
        return change(self.texts[length], name, since=self.texts[reference], other=name)

    def sentence(self) -> str:
        """What becomes of each mapping from the shortest prefix to the longest."""
        shortest, longest = min(self.texts), max(self.texts)
        said = []
        for name in self.calibrated:
            if not all(name in self.texts[each].columns for each in (shortest, longest)):
                continue
            first, last = (
                _percent(self.texts[each].estimates(name)["gap_recovered"])
                for each in (shortest, longest)
            )
            clause = f"after prefixes of {shortest:,} tokens '{name}' recovers {first} of the gap"
            if longest != shortest:
                clause += f", after {longest:,} {last}"
            moved = self.change(name, longest)
            if moved is not None and (gap := moved["gap_recovered"]) is not None:
                clause += (
                    f": beyond the {self.calibrated[name]:,} tokens of a text in its calibration, "
                    f"{points(gap)} against {self.reference(name):,}"
                )
            said.append(f"{clause} (n = {self.n})")
        return "; ".join(said)

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape that scripts rely on."""
        return {
            "n": self.n,
            "continuation_tokens": next(iter(self.texts.values())).continuation,
            "calibrated_on": dict(self.calibrated),
            "left_out": self.left_out,
            "points": [self._point(length, found) for length, found in self.texts.items()],
        }

    def _point(self, length: int, found: TextResult) -> dict[str, Any]:
        moved = {name: plain_change(self.change(name, length)) for name in self.calibrated}
        return {
            "prefix_tokens": length,
            "beyond_calibration": {name: self.beyond(name, length) for name in self.calibrated},
            "change": moved,
        } | plain_text(found)

    def __rich__(self) -> Table:
        some = next(iter(self.texts.values()))
        table = Table(
            "prefix",
            "condition",
            *(header for _, header, _ in COLUMNS),
            title=f"the same {some.continuation:,} tokens after prefixes of different lengths",
            caption=f"n = {self.n} windows; paired bootstrap 95 % intervals\n{self._caption()}",
        )
        # The floor is one and the same at every length; its distance from ``own`` is not.
        floor = some.estimates("none")["nll"]
        table.add_row("–", "none", f"{floor:.3f}", "–", "–", "0%", style="dim")
        table.add_section()
        for length, found in self.texts.items():
            shown = [name for name in found.columns if name != "none"]
            for name in shown:
                table.add_row(
                    f"{length:,}" if name == shown[0] else "",
                    f"{name} *" if self.beyond(name, length) else name,
                    *_cells(found, name),
                    style={"mapped": "bold", "own": "green"}.get(name),
                    end_section=name == shown[-1],
                )
        return table

    def figures(self) -> tuple[Figure, ...]:
        """What is recovered by length of the prefix, for the page."""
        scored = next(iter(self.texts.values())).continuation
        return tuple(
            Curve(
                title=title,
                x="tokens of the prefix",
                y=y,
                series=tuple(
                    Series(
                        name=name,
                        points=tuple(
                            (length, each)
                            for length, found in self.texts.items()
                            if name in found.columns
                            and (each := found.estimates(name)[key]) is not None
                        ),
                        control=name not in self.calibrated,
                    )
                    for name in names
                ),
                form=form,
                note=f"n = {self.n}; the same {scored:,} tokens are scored at every length. "
                f"{self._caption()}",
            )
            for title, y, key, form, names in (
                (
                    "Gap recovered by length of the prefix",
                    "share of the gap from none to own",
                    "gap_recovered",
                    ".0%",
                    [name for name in self._shown if name not in ("none", "own")],
                ),
                ("NLL by length", "nats a token", "nll", ".3f", list(self._shown)),
            )
        )

    @property
    def _shown(self) -> dict[str, None]:
        """The conditions that were measured at any length, in order."""
        return dict.fromkeys(name for found in self.texts.values() for name in found.columns)

    def _caption(self) -> str:
        known = [
            f"{name} {limit:,}"
            for name, limit in self.calibrated.items()
            if any(self.beyond(name, length) for length in self.texts)
        ]
        unknown = [name for name, limit in self.calibrated.items() if not limit]
        said = []
        if known:
            said.append(f"* beyond the tokens of a text in its calibration: {', '.join(known)}")
        if unknown:
            said.append(f"of {', '.join(unknown)} it is not known how long those were")
        if self.left_out:
            said.append(f"{self.left_out} windows left out: no text has their hidden ids")
        return "; ".join(said)


def _cells(found: TextResult, name: str) -> list[str]:
    estimates = found.estimates(name)
    return [
        "–" if (each := estimates[key]) is None else format(each, form) for key, _, form in COLUMNS
    ]


def _percent(estimate: Estimate | None) -> str:
    return "no measurable share" if estimate is None else f"{estimate:.0%}"
