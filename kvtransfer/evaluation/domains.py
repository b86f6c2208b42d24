"""Calibrated on one kind of text, read on another: a matrix of mappings by texts."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from rich.table import Column as Heading
from rich.table import Table

from kvtransfer.errors import TextError
from kvtransfer.evaluation.conditions import Pair
from kvtransfer.evaluation.figure import Figure, Listing
from kvtransfer.evaluation.rivals import (
    beats_floor,
    change,
    mappings_of,
    plain_change,
    plain_text,
    points,
)
from kvtransfer.evaluation.text import TextResult, evaluate_text
from kvtransfer.fitting.chunks import chunks, one_stream
from kvtransfer.hf.aligned import Alignable
from kvtransfer.report import Estimate

SHOWN = (("gap_recovered", ".0%", "gap"), ("kl_to_own", ".3f", "KL"))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DomainsResult:
    """Several mappings on several texts. True where every mapping beats no prefix on every text,
    by the 95 % interval of the paired difference.

    A mapping is at home on the text that bears its name.
    """

    texts: Mapping[str, TextResult]
    mappings: tuple[str, ...]

    def __bool__(self) -> bool:
        return all(
            beats_floor(found, name) for found in self.texts.values() for name in self.mappings
        )

    def swap(self, text: str, name: str) -> dict[str, Estimate | None] | None:
        """What mapping ``name`` recovers of ``text``, less what the one at home there does; None
        where none is, or it is the one."""
        if text not in self.mappings or name == text:
            return None
        found = self.texts[text]
        return change(found, name, since=found, other=text)

    def sentence(self) -> str:
        """What a swap costs; without mappings at home, where each recovers most and least."""
        swaps = {
            (text, name): moved["gap_recovered"]
            for text in self.texts
            for name in self.mappings
            if name in self.texts and (moved := self.swap(text, name)) is not None
        }
        costs = {where: each for where, each in swaps.items() if each is not None}
        if costs:
            least, most = (pick(costs, key=lambda where: costs[where].value) for pick in (max, min))
            shown = [least] if least == most else [least, most]
            found = " to ".join(
                f"{points(costs[text, name])} ('{name}' on {text}, n = {costs[text, name].n})"
                for text, name in shown
            )
            return (
                "against the one of the text's own kind, mappings calibrated on another recover "
                f"{found} of the gap"
            )
        said = []
        for name in self.mappings:
            shares = {
                text: share
                for text, found in self.texts.items()
                if name in found.columns
                and (share := found.estimates(name)["gap_recovered"]) is not None
            }
            if shares:
                said.append(
                    f"'{name}' recovers "
                    + ", ".join(f"{share:.0%} on {text}" for text, share in shares.items())
                )
        return "; ".join(said)

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape that scripts rely on."""
        some = next(iter(self.texts.values()))
        return {
            "prefix_tokens": some.prefix,
            "continuation_tokens": some.continuation,
            "mappings": list(self.mappings),
            "texts": {text: self._text(text, found) for text, found in self.texts.items()},
        }

    def _text(self, text: str, found: TextResult) -> dict[str, Any]:
        swaps = {name: plain_change(self.swap(text, name)) for name in self.mappings}
        return {"n": found.n, "swap": swaps} | plain_text(found)

    def __rich__(self) -> Table:
        some = next(iter(self.texts.values()))
        at_home = [name for name in self.mappings if name in self.texts]
        table = Table(
            Heading("read on a prefix by", overflow="fold"),
            "",
            *(f"{text}, n = {found.n}" for text, found in self.texts.items()),
            title="gap recovered and KL to own, by what a mapping was calibrated on (rows) and "
            f"what is read\n{some.continuation:,} tokens after {some.prefix:,} hidden",
            caption="paired bootstrap 95 % intervals over items"
            + ("\n* a mapping on the text that bears its name" if at_home else ""),
        )
        for name in (each for each in some.columns if each != "own"):
            for key, form, label in SHOWN:
                table.add_row(
                    name if key == SHOWN[0][0] else "",
                    label,
                    *(self._cell(text, name, key, form) for text in self.texts),
                    style="dim" if name == "none" else None,
                    end_section=key == SHOWN[-1][0],
                )
        return table

    def figures(self) -> tuple[Figure, ...]:
        """The matrix, for the page: a table a measure."""
        some = next(iter(self.texts.values()))
        rows = [name for name in some.columns if name not in ("none", "own")]
        return tuple(
            Listing(
                title=f"{title}, by what a mapping was calibrated on (rows) and what is read",
                columns=("read on a prefix by", *self.texts),
                rows=tuple(
                    (
                        name,
                        *(
                            found.estimates(name)[key] if name in found.columns else None
                            for found in self.texts.values()
                        ),
                    )
                    for name in rows
                ),
                forms=("", *(form for _ in self.texts)),
                note="; ".join(f"{text}: n = {found.n}" for text, found in self.texts.items()),
            )
            for title, (key, form, _) in zip(("Gap recovered", "KL to own"), SHOWN, strict=True)
        )

    def _cell(self, text: str, name: str, key: str, form: str) -> str:
        found = self.texts[text]
        if name == "none" and key == "gap_recovered":
            return "0%"  # by definition, and without an interval of rounding
        if name not in found.columns or (estimate := found.estimates(name)[key]) is None:
            return "–"
        return format(estimate, form) + (" *" if name == text and name in self.mappings else "")


def evaluate_domains(
    pair: Pair,
    texts: Mapping[str, Iterable[str]],
    names: tuple[str, ...],
    *,
    prefix: int = 256,
    continuation: int = 256,
    items: int = 32,
    progress: Callable[[], None] = lambda: None,
) -> DomainsResult:
    """Score items of every text under every mapping.

    Args:
        pair: The models and their mappings: ``mapped``, and the rivals by name.
        texts: Held-out documents by name. A mapping of the same name is at home there.
        names: Conditions; ``none`` and ``own`` must be among them.
        prefix: Tokens of each item that are hidden (the last of them is run live).
        continuation: Tokens of each item that are scored.
        items: Items of each text at most.
        progress: Called after each item.

    Raises:
        SeamError: the tokenizers differ, and no text has the ids that are to be hidden.
        TextError: a text is shorter than one item.
        ValueError: there is no text, or nothing to score.
    """
    if not texts:
        raise ValueError("there is no text to evaluate on: give one at least")
    if prefix < 2 or continuation < 1 or items < 1:
        raise ValueError(f"{prefix=}, {continuation=}, {items=}: at least 2, 1 and 1 are needed")
    target = pair.target
    cut = {}
    for name, documents in texts.items():  # a short text is known before any is scored
        chunked = chunks(
            one_stream(documents),
            target.encode,
            length=prefix + continuation,
            opening=target.opening,
        )
        readable = Alignable(pair.source, target, chunked, hidden=prefix - 1)
        try:
            cut[name] = list(islice(readable, items))
        except TextError as error:
            raise TextError(f"{name}: {error.message}", hint=error.hint) from error
    return DomainsResult(
        texts={
            name: evaluate_text(pair, found, names, prefix=prefix, progress=progress)
            for name, found in cut.items()
        },
        mappings=tuple(mappings_of(pair)),
    )
