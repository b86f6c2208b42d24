"""Several mappings of one pair, or one of them on several prefixes, side by side."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from kvtransfer.evaluation.conditions import CONDITIONS, Pair, in_order
from kvtransfer.evaluation.edits import edits_of
from kvtransfer.evaluation.text import TextResult
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.hf.model import LanguageModel
from kvtransfer.measures.intervals import Column, interval, mean
from kvtransfer.report import Estimate, plain

PLAIN = ("none", "own", "mapped", "source")
"""What is measured where nobody says what: floor, ceiling, experiment, and the source alone."""

METRICS = ("nll", "kl_to_own", "top1_agreement", "attention_cosine", "retention", "gap_recovered")


def pair_of(
    source: LanguageModel,
    target: LanguageModel,
    mapping: KVMapping | None,
    *,
    rivals: Mapping[str, KVMapping],
    conditions: Iterable[str],
    bound: Mapping[str, Any],
) -> tuple[Pair, tuple[str, ...]]:
    """The models with all mappings, and the names of all conditions, ``mapped`` always among them
    where there is a mapping; arguments as of :func:`kvtransfer.evaluation.evaluate.evaluate`.

    Raises:
        IncompatibleModels: a mapping is for another pair.
        SteeringError: a condition's edit is none.
        ValueError: there is no mapping, or no condition of a name.
    """
    if mapping is None and not rivals:
        raise ValueError("there is no mapping to measure: give one, or rivals")
    names = list(conditions)
    edits = edits_of(names, bound, others=rivals)
    bases = [name for name in names if name not in edits]
    bases += [base for base, _ in edits.values() if base in CONDITIONS]
    pair = Pair(source, target, mapping, dict(rivals), edits=edits)
    found = in_order(bases if mapping is None else [*bases, "mapped"])
    if mapping is None:
        found = tuple(name for name in found if name != "mapped")
    return pair, (*found, *edits, *rivals)


def mappings_of(pair: Pair) -> dict[str, KVMapping]:
    """The mappings of a pair, by the conditions that they are."""
    main = {} if pair.mapping is None else {"mapped": pair.mapping}
    return main | dict(pair.rivals)


def beats_floor(result: TextResult, name: str) -> bool:
    """Whether a condition was measured, and the 95 % interval of what it gains over no prefix lies
    above zero."""
    if name not in result.columns:
        return False
    gain = mean(result.columns["none"]["nll"] - result.columns[name]["nll"])
    return (gain.low or 0.0) > 0


def change(
    result: TextResult, name: str, *, since: TextResult, other: str
) -> dict[str, Estimate | None] | None:
    """By how much a condition differs from another, which ``since`` holds, paired over items; None
    where one was not measured.

    ``gap_recovered`` is a difference of shares, each of its own gap; None where there is no gap.

    Args:
        result: Holds ``name``.
        name: A condition.
        since: Holds ``other``, over as many items, which stand in the same order.
        other: What it is compared with.
    """

    if name not in result.columns or other not in since.columns:
        return None

    def shares(*columns: Column) -> Column | np.float64:
        """Of (floor, own, condition) twice, the share the first wins back less the second's."""
        floor, own, found, floor_then, own_then, then = (each.mean(-1) for each in columns)
        share, share_then = (
            (floor - found) / (floor - own),
            (floor_then - then) / (floor_then - own_then),
        )
        moved: Column | np.float64 = share - share_then
        return moved

    held = [
        of.columns[each]["nll"]
        for of, which in ((result, name), (since, other))
        for each in ("none", "own", which)
    ]
    nothing = any(held[i].mean() == held[i + 1].mean() for i in (0, 3))  # to be a share of
    return {
        "gap_recovered": None if nothing else interval(shares, *held),
        "kl_to_own": mean(
            result.columns[name]["kl_to_own"] - since.columns[other]["kl_to_own"],
        ),
    }


def points(estimate: Estimate) -> str:
    """A difference of shares in percentage points, with its interval."""
    text = f"{100 * estimate.value:+.0f} points"
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text} [{100 * estimate.low:+.0f}, {100 * estimate.high:+.0f}]"


def plain_change(moved: Mapping[str, Estimate | None] | None) -> dict[str, Any] | None:
    """A change for JSON, or null where there is none."""
    return None if moved is None else {key: plain(each) for key, each in moved.items()}


def plain_text(found: TextResult) -> dict[str, Any]:
    """Every condition of a text, for JSON: estimates, one number an item, and what is missing."""
    estimates = {name: found.estimates(name) for name in found.columns}
    return {
        "conditions": {
            name: {metric: plain(each[metric]) for metric in METRICS}
            for name, each in estimates.items()
        },
        "items": {
            name: {metric: column.tolist() for metric, column in each.items()}
            for name, each in found.columns.items()
        },
        "missing": found.missing,
    }
