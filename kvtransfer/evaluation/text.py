"""Score held-out continuations under every condition."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import DeviceError
from kvtransfer.evaluation.conditions import CONTROLS, Arm, Pair, Reading, arms
from kvtransfer.hf.attention import attention_outputs
from kvtransfer.hf.run import score
from kvtransfer.measures.agreement import cosine, kl, nll, top1_agreement
from kvtransfer.measures.intervals import Column, interval, mean, mean_exp, mean_ratio
from kvtransfer.report import Estimate

METRICS = ("nll", "kl_to_own", "top1_agreement", "attention_cosine")
"""What is kept of each item and condition."""


@dataclass(frozen=True, slots=True, eq=False)
class TextResult:
    """Per condition and metric, one number an item; everything else is derived from them."""

    columns: dict[str, dict[str, Column]]
    """A metric that has no meaning for a condition is absent."""
    missing: dict[str, str]
    """Conditions that this pair does not allow, with the reason."""
    prefix: int
    continuation: int
    stream: bool = False
    """Whether the items are chunks of one text, as in the paper's protocol."""

    @property
    def n(self) -> int:
        """Items."""
        return len(self.columns["own"]["nll"])

    def estimates(self, condition: str) -> dict[str, Estimate | None]:
        """All metrics of one condition, with intervals paired over items.

        ``retention`` is own perplexity over this condition's; ``gap_recovered`` is the share of
        the NLL between ``none`` and ``own`` that this condition wins back.
        """
        found = self.columns[condition]
        floor, ceiling = self.columns["none"]["nll"], self.columns["own"]["nll"]
        return {
            "nll": mean(found["nll"]),
            "perplexity": mean_exp(found["nll"]),
            "kl_to_own": _mean_or_none(found.get("kl_to_own")),
            "top1_agreement": _mean_or_none(found.get("top1_agreement")),
            "attention_cosine": _mean_or_none(found.get("attention_cosine")),
            "retention": mean_exp(ceiling - found["nll"]),
            "gap_recovered": mean_ratio(floor - found["nll"], floor - ceiling),
        }

    def margins(self) -> dict[str, Estimate]:
        """By how many nats a token ``mapped`` beats each control, paired over items."""
        if "mapped" not in self.columns:
            return {}
        ours = self.columns["mapped"]["nll"]
        return {
            name: interval(lambda x: x.mean(-1), self.columns[name]["nll"] - ours)
            for name in CONTROLS
            if name in self.columns
        }


def evaluate_text(
    pair: Pair,
    items: Iterable[Int[Tensor, " t"]],
    names: tuple[str, ...],
    *,
    prefix: int,
    progress: Callable[[], None] = lambda: None,
) -> TextResult:
    """Score every item under every condition.

    The first ``prefix`` tokens but one are hidden; that one and the rest are live, so that each
    condition runs the same ids and is scored on the same predictions.

    Args:
        pair: The models and the mapping.
        items: The target's token ids, all of one length, each begun with its opening.
        names: Conditions; ``none`` and ``own`` must be among them.
        prefix: Tokens of an item that make the prefix.
        progress: Called after each item.
    """
    columns: dict[str, dict[str, list[float]]] = {}
    missing: dict[str, str] = {}
    length = 0
    for ids in items:
        length = len(ids)
        reading = Reading.of(pair, ids[: prefix - 1])
        made, unavailable = arms(reading, names)
        missing |= unavailable
        for name, measured in _score_item(pair, reading, made, ids, prefix).items():
            for metric, value in measured.items():
                columns.setdefault(name, {}).setdefault(metric, []).append(value)
        progress()
    return TextResult(
        {
            name: {metric: np.array(values) for metric, values in found.items()}
            for name, found in columns.items()
        },
        missing,
        prefix,
        length - prefix,
    )


def _score_item(
    pair: Pair, reading: Reading, made: dict[str, Arm], ids: Tensor, prefix: int
) -> dict[str, dict[str, float]]:
    live, wanted = ids[None, prefix - 1 : -1], ids[prefix:]
    of_target = {
        name: arm.prefix
        for name, arm in made.items()
        if arm.reader is pair.target
        and arm.prefix is not None
        and name not in ("none", "own")
        # Attention is compared under one mask: what a layer does not see, it would see there.
        and arm.prefix.hidden is None
    }
    own, cosines = attention_outputs(pair.target, live, reading.own, of_target, cosine)
    measured: dict[str, dict[str, float]] = {}
    for name, arm in made.items():
        logits = own[0] if name == "own" else score(arm.reader, live, arm.prefix)[0]
        logits = logits.to(own.device)
        measured[name] = {
            "nll": float(nll(logits, wanted.to(own.device)).mean()),
            "kl_to_own": float(kl(own[0], logits).mean()),
            "top1_agreement": float(top1_agreement(own[0], logits).float().mean()),
        }
        if not math.isfinite(measured[name]["nll"]):
            found = measured[name]["nll"]
            raise DeviceError(
                f"condition {name!r}: the NLL is {found} in {arm.reader.spec.dtype}",
                hint="numbers overflowed; run in bfloat16 or float32 (--dtype)",
            )
        if name in cosines and not bool(torch.isnan(cosines[name]).any()):
            measured[name]["attention_cosine"] = float(cosines[name].mean())
    return measured


def _mean_or_none(column: Column | None) -> Estimate | None:
    return None if column is None else mean(column)
