"""Does a mapping hold on prefixes longer than those that it was calibrated on?

The same tokens are scored after prefixes of different lengths that end right before them. A shorter
prefix is a text of its own, that begins at position 0: its tokens have seen nothing of what the
longer one begins with. The end of the longer one's cache would be something else (tokens that did
see it, at other positions), and no transfer ever has that; so both models read each length anew.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from jaxtyping import Int
from rich.table import Table
from torch import Tensor

from kvtransfer.errors import CacheLayoutError, SeamError, TextError
from kvtransfer.evaluation.conditions import Pair
from kvtransfer.evaluation.swap import METRICS, beats_floor, change, listed, mappings_of, points
from kvtransfer.evaluation.text import TextResult, evaluate_text
from kvtransfer.fitting.chunks import chunks, one_stream
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.hf.aligned import Alignable
from kvtransfer.hf.model import LanguageModel
from kvtransfer.report import Estimate, plain

LENGTHS = (64, 128, 256, 512, 1_024, 2_048, 4_096)
"""Tokens of a prefix, where nobody says how many."""

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
        estimates = {name: found.estimates(name) for name in found.columns}
        moved = {name: self.change(name, length) for name in self.calibrated}
        return {
            "prefix_tokens": length,
            "beyond_calibration": {name: self.beyond(name, length) for name in self.calibrated},
            "conditions": {
                name: {metric: plain(each[metric]) for metric in METRICS}
                for name, each in estimates.items()
            },
            "change": {
                name: None if each is None else {key: plain(value) for key, value in each.items()}
                for name, each in moved.items()
            },
            "items": listed(found.columns),
            "missing": found.missing,
        }

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

    def _caption(self) -> str:
        known = [f"{name} {limit:,}" for name, limit in self.calibrated.items() if limit]
        unknown = [name for name, limit in self.calibrated.items() if not limit]
        said = []
        if known:
            said.append(f"* beyond the tokens of a text in its calibration: {', '.join(known)}")
        if unknown:
            said.append(f"of {', '.join(unknown)} it is not known how long those were")
        if self.left_out:
            said.append(f"{self.left_out} windows left out: no text has their hidden ids")
        return "; ".join(said)


def calibrated_on(mapping: KVMapping) -> int | None:
    """Tokens of the longest text that a mapping's fit read, each from position 0; None if its
    settings do not say."""
    refined = mapping.settings.get("refine") or {}
    said = (mapping.settings.get("chunk"), refined.get("prefix"))
    return max((each for each in said if isinstance(each, int)), default=None)


def checked_lengths(
    lengths: Iterable[int] | None, pair: Pair, names: Iterable[str], continuation: int
) -> tuple[int, ...]:
    """The lengths, if both models have the positions; of LENGTHS, where None are given, those for
    which they have.

    Raises:
        ValueError: there is none; or they do not ascend, or begin below 2, or hold nothing but what
            the target puts before every text.
        CacheLayoutError: a model has too few positions.
    """
    needs = {
        pair.target: continuation,
        # What is mapped is all that the source reads, unless it stands alone too.
        pair.source: continuation if "source" in names or pair.source is pair.target else 0,
    }
    room = {
        model: model.max_positions - more
        for model, more in needs.items()
        if model.max_positions is not None
    }
    least = max(2, len(pair.target.opening) + 1)
    if lengths is None:
        fit = [each for each in LENGTHS if all(each <= most for most in room.values())]
        lengths = fit or LENGTHS[:1]
    found = tuple(lengths)
    if not found or list(found) != sorted(set(found)) or found[0] < least:
        raise ValueError(
            f"lengths of prefixes ascend and begin with at least {least} tokens, not "
            f"{', '.join(map(str, found)) or 'none'}"
        )
    for model, most in room.items():
        if found[-1] > most:
            raise CacheLayoutError(
                f"a prefix of {found[-1]} tokens and {needs[model]} after it, and "
                f"{model.spec.name} reads at most {model.max_positions}",
                hint=f"leave out lengths above {most}",
            )
    return found


def ending(
    window: Int[Tensor, " w"], length: int, continuation: int, opening: Int[Tensor, " o"]
) -> Int[Tensor, " t"]:
    """The last ``continuation`` tokens of ``window``, behind ``length`` tokens: the opening, and
    those that stand right before them."""
    return torch.cat((opening, window[len(window) - continuation - length + len(opening) :]))


def evaluate_lengths(
    pair: Pair,
    texts: Iterable[str],
    names: tuple[str, ...],
    *,
    lengths: Iterable[int] | None = None,
    continuation: int = 256,
    items: int = 32,
    progress: Callable[[], None] = lambda: None,
) -> LengthsResult:
    """Score the same tokens after prefixes of each length.

    Of each prefix, the last token is run live, as everywhere.

    Args:
        pair: The models and their mappings.
        texts: Held-out documents, read as one text.
        names: Conditions; ``none`` and ``own`` must be among them.
        lengths: Tokens of a prefix, the target's opening among them, ascending; None for those of
            LENGTHS that the models have positions for.
        continuation: Tokens that are scored.
        items: Windows at most.
        progress: Called after each window, once a length.

    Raises:
        CacheLayoutError: a length is more than a model has positions for.
        SeamError: the tokenizers differ, and no text has the ids that are to be hidden.
        TextError: the text is shorter than the longest prefix with what follows it.
        ValueError: lengths do not ascend, or there is nothing to score.
    """
    if continuation < 1 or items < 1:
        raise ValueError(f"{continuation=}, {items=}: at least 1 of each is needed")
    chosen = checked_lengths(lengths, pair, names, continuation)
    opening = pair.target.opening
    room = chosen[-1] - len(opening) + continuation
    cut = _windows(pair.target, texts, room)
    windows: list[Tensor] = []
    left_out, reason = 0, None
    for window in cut:
        endings = (ending(window, each, continuation, opening) for each in chosen)
        try:
            _require_readable(pair, endings, continuation)
        except SeamError as error:
            left_out, reason = left_out + 1, error
            continue
        windows.append(window)
        if len(windows) == items:
            break
    if reason is not None and not windows:
        raise reason
    return LengthsResult(
        texts={
            length: evaluate_text(
                pair,
                [ending(window, length, continuation, opening) for window in windows],
                names,
                prefix=length,
                progress=progress,
            )
            for length in chosen
        },
        calibrated={name: calibrated_on(each) for name, each in mappings_of(pair).items()},
        left_out=left_out,
    )


def _windows(target: LanguageModel, texts: Iterable[str], room: int) -> Iterator[Tensor]:
    try:
        yield from chunks(one_stream(texts), target.encode, length=room)
    except TextError as error:
        raise TextError(error.message, hint="give more text, or shorter lengths") from error


def _require_readable(pair: Pair, endings: Iterable[Tensor], continuation: int) -> None:
    """Raise SeamError unless the source can read the hidden part of each."""
    for ids in endings:
        hidden = len(ids) - continuation - 1
        list(islice(Alignable(pair.source, pair.target, [ids], hidden=hidden), 1))


def _cells(found: TextResult, name: str) -> list[str]:
    estimates = found.estimates(name)
    return [
        "–" if (each := estimates[key]) is None else format(each, form) for key, _, form in COLUMNS
    ]


def _percent(estimate: Estimate | None) -> str:
    return "no measurable share" if estimate is None else f"{estimate:.0%}"
