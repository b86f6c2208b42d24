"""Drift by turn: tables and a curve for people, JSON for scripts, a clause for the hurried."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvtransfer.evaluation.drawn import plot
from kvtransfer.evaluation.figure import Curve, Figure, Series
from kvtransfer.measures.intervals import Column, interval, mean
from kvtransfer.report import Estimate, plain

METRICS = ("nll", "kl_to_own", "top1_agreement")
"""What is kept of each session, arm and turn."""

CARRIED = ("whole", "new", "bound")
ARMS = ("own", *CARRIED, "none")
LETTERS = {"whole": "W", "new": "N", "bound": "B"}

Columns = Mapping[str, Mapping[str, NDArray[np.float64]]]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Turns:
    """How two models fare that take turns at a text. True where carrying is worth it.

    That is: with only new tokens mapped, either model's NLL over its turns is lower than without
    the history, by a paired 95 % interval above zero.
    """

    source: str
    target: str
    turns: int
    tokens: int
    """Of a turn."""
    bound: float
    """Nats a token of KL beyond which ``bound`` reads the history again."""
    columns: Columns
    """By arm and metric, one row a session, one number a turn from the second on. ``bound`` also
    has ``re_prefilled``; ``whole`` and ``new`` have ``deviation``, where it can be looked at."""

    def __bool__(self) -> bool:
        return all((margin.low or 0.0) > 0 for margin in self.margins("new").values())

    @property
    def n(self) -> int:
        """Sessions."""
        return len(self.columns["own"]["nll"])

    @property
    def readers(self) -> tuple[str, ...]:
        """Who reads each turn, from the second on."""
        return tuple((self.target, self.source)[turn % 2] for turn in range(self.turns - 1))

    def by_turn(self, arm: str, metric: str) -> list[Estimate]:
        """Means over sessions, one a turn from the second on."""
        return [mean(column) for column in self.columns[arm][metric].T]

    def margins(self, arm: str) -> dict[str, Estimate]:
        """By how many nats a token an arm beats no history, over the turns of each model."""
        gain = self.columns["none"]["nll"] - self.columns[arm]["nll"]
        return {name: mean(gain[:, part].mean(1)) for name, part in self._parts().items()}

    def growth(self, arm: str) -> dict[str, Estimate]:
        """By how much KL is higher in each model's last turn than in its first, paired.

        A model with one turn has none.
        """
        found = self.columns[arm]["kl_to_own"][:, : self.turns - 1]
        return {
            name: mean(found[:, part][:, -1] - found[:, part][:, 0])
            for name, part in self._parts().items()
            if found[:, part].shape[1] > 1
        }

    def lower(self, arm: str, than: str = "whole") -> dict[str, Estimate]:
        """By how much an arm's KL is lower than another's, over the turns of each model, paired."""
        gain = self.columns[than]["kl_to_own"] - self.columns[arm]["kl_to_own"]
        return {name: mean(gain[:, part].mean(1)) for name, part in self._parts().items()}

    def restored(self) -> Estimate | None:
        """KL of ``bound`` in the turns before which it re-prefilled; None where it never did."""
        chosen = self.columns["bound"]["re_prefilled"]
        return _ratio(self.columns["bound"]["kl_to_own"] * chosen, chosen)

    def unrestored(self) -> Estimate | None:
        """KL of ``whole`` in the same turns."""
        chosen = self.columns["bound"]["re_prefilled"]
        return _ratio(self.columns["whole"]["kl_to_own"] * chosen, chosen)

    def telling(self, arm: str) -> dict[str, Estimate | None]:
        """Rank correlation of deviation before a turn with KL in it, for each model."""
        found = self.columns[arm]
        if "deviation" not in found:
            return {}
        return {
            name: _rank_correlation(found["deviation"][:, part], found["kl_to_own"][:, part])
            for name, part in self._parts().items()
        }

    def _parts(self) -> dict[str, slice]:
        """By a model's name, its turns."""
        names = (self.target, self.source)
        if self.source == self.target:
            return {self.target: slice(None)}
        return {name: slice(start, None, 2) for start, name in enumerate(names[: self.turns - 1])}

    def to_dict(self) -> dict[str, Any]:
        """The JSON shape that scripts rely on."""
        return {
            "n": self.n,
            "turns": self.turns,
            "turn_tokens": self.tokens,
            "bound": self.bound,
            "by_turn": [
                {
                    "turn": turn + 2,
                    "reader": reader,
                    "conditions": {
                        arm: {
                            metric: plain(mean(column[:, turn])) for metric, column in found.items()
                        }
                        for arm, found in self.columns.items()
                    },
                }
                for turn, reader in enumerate(self.readers)
            ],
            "growth": {arm: _plain(self.growth(arm)) for arm in CARRIED},
            "over_none": {arm: _plain(self.margins(arm)) for arm in (*CARRIED, "own")},
            "below_whole": {arm: _plain(self.lower(arm)) for arm in ("new", "bound")},
            "re_prefilled": {
                "a_session": plain(mean(self.columns["bound"]["re_prefilled"].sum(1))),
                "kl_to_own": plain(self.restored()),
                "kl_to_own_whole": plain(self.unrestored()),
            },
            "deviation_tells_kl": {
                arm: _plain(found) for arm in ("whole", "new") if (found := self.telling(arm))
            },
            "items": {
                arm: {metric: column.tolist() for metric, column in found.items()}
                for arm, found in self.columns.items()
            },
        }

    def __rich__(self) -> Group:
        said: list[RenderableType] = [
            self._table("kl_to_own", "KL to own", ".3f", (*CARRIED, "none")),
            self._table("nll", "NLL", ".3f", ARMS),
            self._table("top1_agreement", "top-1 agreement with own", ".0%", (*CARRIED, "none")),
            Text(self.curve(), no_wrap=True),
        ]
        return Group(*said)

    def figures(self) -> tuple[Figure, ...]:
        """Drift by turn, for the page."""
        about = (
            f"n = {self.n} sessions of {self.turns} turns of {self.tokens} tokens; the models take "
            "turns, so that neighbouring points are of different readers. whole: the cache is "
            "mapped whole at each turn; new: only the tokens since the reader's last turn; bound: "
            f"whole, read again beyond {self.bound:g} nats of drift."
        )
        return tuple(
            Curve(
                title=title,
                x="turn",
                y=y,
                series=tuple(
                    Series(
                        name=arm,
                        points=tuple(enumerate(self.by_turn(arm, metric), start=2)),
                        control=arm in ("own", "none"),
                    )
                    for arm in arms
                ),
                note=f"{about} Lower is better.",
            )
            for title, y, metric, arms in (
                ("Drift by turn", "KL to own, nats a token", "kl_to_own", CARRIED),
                ("NLL by turn", "nats a token", "nll", ARMS),
            )
        )

    def curve(self) -> str:
        """KL by turn as a picture of characters, intervals and all."""
        return "\n".join(
            [
                "KL to own by turn, in nats a token",
                *plot({LETTERS[arm]: self.by_turn(arm, "kl_to_own") for arm in CARRIED}, first=2),
                f"W whole   N new   B whole, re-prefilled beyond {self.bound:g}   "
                f"│ 95 % interval over n = {self.n} sessions",
            ]
        )

    def sentence(self) -> str:
        """What the numbers mean, in a clause."""
        last = {
            arm: ", ".join(
                f"{estimate:+.3f} for {name}" for name, estimate in self.growth(arm).items()
            )
            for arm in ("whole", "new")
        }
        grown = (
            f"from a model's first turn to its last KL changes by {last['whole']} with caches "
            f"mapped whole, and by {last['new']} with only new tokens mapped; "
            if last["whole"]
            else ""
        )
        often = mean(self.columns["bound"]["re_prefilled"].sum(1))
        again = (
            f"at a bound of {self.bound:g} a session re-prefills {often:.1f} times, and in those "
            f"turns KL falls from {self.unrestored():.3f} to {self.restored():.3f}"
            if often.value
            else f"no drift passes the bound of {self.bound:g}"
        )
        worth = " and ".join(
            f"{estimate:.3f} for {name}" for name, estimate in self.margins("new").items()
        )
        doubt = "" if self else ", which is not clear of zero: do not rely on these mappings"
        return (
            f"over {self.turns} turns of {self.tokens} tokens, {grown}{again}; with new tokens "
            f"mapped, the history lowers NLL by {worth}, in nats a token{doubt} (n = {self.n} "
            "sessions)"
        )

    def _table(self, metric: str, title: str, form: str, arms: Sequence[str]) -> Table:
        table = Table(
            "turn",
            "reader",
            *arms,
            title=f"{self.source} ⇄ {self.target}: {title} by turn of {self.tokens} tokens",
            caption=f"n = {self.n} sessions; paired bootstrap 95 % intervals over them",
        )
        columns = [self.by_turn(arm, metric) for arm in arms]
        for turn, reader in enumerate(self.readers):
            table.add_row(
                str(turn + 2), reader, *(format(column[turn], form) for column in columns)
            )
        return table


def _plain(estimates: Mapping[str, Estimate | None]) -> dict[str, Any]:
    return {name: plain(estimate) for name, estimate in estimates.items()}


def _ratio(above: NDArray[np.float64], below: NDArray[np.float64]) -> Estimate | None:
    """All of one over all of the other, resampled by session; None for nothing."""
    if not below.any():
        return None
    return interval(lambda a, b: a.sum(-1) / b.sum(-1), above.sum(1), below.sum(1))


def _rank_correlation(one: NDArray[np.float64], other: NDArray[np.float64]) -> Estimate | None:
    """Spearman's, over sessions and turns, resampled by session; ranks are of the sample."""
    x, y = (_ranks(each) for each in (one, other))
    if not (x.std() > 0 and y.std() > 0):
        return None

    def correlation(*products: Column) -> Column | np.float64:
        x, y, xx, yy, xy = (each.mean(-1) for each in products)
        found: Column | np.float64 = (xy - x * y) / np.sqrt((xx - x * x) * (yy - y * y))
        return found

    products = (x, y, x * x, y * y, x * y)
    return interval(correlation, *(each.mean(1) for each in products))


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks around zero; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = counts.cumsum()
    ranks: NDArray[np.float64] = (ends - (counts - 1) / 2)[inverse].reshape(values.shape)
    centred: NDArray[np.float64] = ranks - ranks.mean()
    return centred
