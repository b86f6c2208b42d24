"""The ways of reading one prompt that the exactness ladder compares.

All of them read the same ids. What differs is in how many pieces, and who made the guide's cache.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvtransfer.errors import UnsupportedModel
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.reader import Reader

NEVER = -1e30
"""Stands for minus infinity, which some models give to words that they never say: it has
differences."""

ARMS = {
    "A": "recomputes the whole sequence at every step, with no cache",
    "B": "reads guide and prompt in one go, and decodes on its cache",
    "B2": "the same, but reads the prompt in the two pieces that D reads",
    "D": "reads the guide apart, and the prompt on top of the guide's cache",
    "P": "as D, with the guide's cache saved to a pack and restored",
}
"""Each arm, and what it does."""


@dataclass(slots=True, eq=False, kw_only=True)
class CachedArm:
    """Reads on, token by token, on top of what it has read."""

    ids: Int[Tensor, " t"]
    """What it read: guide and prompt."""
    first: Float[Tensor, " v"]
    """Logits after the prompt, in float32 on the CPU."""
    uniform: Float[Tensor, "n k"]
    """The numbers by which it draws: one a seed and step."""
    reader: Reader

    @classmethod
    def over(
        cls, reader: Reader, *pieces: Int[Tensor, " _t"], uniform: Float[Tensor, "n k"]
    ) -> "CachedArm":
        """One that reads ``pieces``, one after another, with ``reader``, which may hold a prefix.

        ``ids`` are those of the pieces; who gives a prefix puts its ids before them.
        """
        logits = torch.empty(0)
        for piece in pieces:
            with torch.no_grad():
                logits = reader(piece[None], last=True)[0, -1]
        return cls(ids=torch.cat(pieces), first=_comparable(logits), uniform=uniform, reader=reader)

    @classmethod
    def on(
        cls,
        model: LanguageModel,
        hidden: Int[Tensor, " p"],
        prefix: KVCache,
        live: Int[Tensor, " s"],
        *,
        uniform: Float[Tensor, "n k"],
    ) -> "CachedArm":
        """One that goes on from ``prefix``, which is said to be of the ids ``hidden``."""
        arm = cls.over(Reader.over(model, prefix), live, uniform=uniform)
        arm.ids = torch.cat((hidden, live))
        return arm

    def widen(self, rows: int) -> None:
        """Go on with that many rows."""
        self.reader.widen(rows)

    def follow(self, history: Int[Tensor, "r n"]) -> Float[Tensor, "r v"]:
        """The logits after the prompt and ``history``, one column longer at every call."""
        with torch.no_grad():
            return _comparable(self.reader(history[:, -1:], last=True)[:, -1])

    def layers(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Keys and values of every layer."""
        held: Any = self.reader.cache.layers
        return tuple((layer.keys, layer.values) for layer in held)


@dataclass(slots=True, eq=False, kw_only=True)
class RecomputingArm:
    """Reads everything again at every step that it looks at."""

    ids: Int[Tensor, " t"]
    first: Float[Tensor, " v"]
    uniform: Float[Tensor, "n k"]
    model: LanguageModel
    steps: Collection[int]

    @classmethod
    def of(
        cls,
        model: LanguageModel,
        ids: Int[Tensor, " t"],
        *,
        steps: Collection[int],
        uniform: Float[Tensor, "n k"],
    ) -> "RecomputingArm":
        """One that looks at ``steps`` (0 is the first token) alone: each costs a whole reading."""
        first = _comparable(_afresh(model, ids[None])[0])
        return cls(ids=ids, first=first, uniform=uniform, model=model, steps=steps)

    def widen(self, rows: int) -> None:
        """Nothing is kept from step to step."""

    def follow(self, history: Int[Tensor, "r n"]) -> Float[Tensor, "r v"] | None:
        """The logits after the prompt and ``history``; None at a step that it leaves out."""
        if history.shape[1] not in self.steps:
            return None
        rows = torch.cat((self.ids.expand(len(history), -1), history), dim=1)
        return _comparable(_afresh(self.model, rows))

    def layers(self) -> None:
        """It keeps none."""


Arm = CachedArm | RecomputingArm
"""One way of reading a prompt, which then follows a history step by step."""


def _afresh(model: LanguageModel, ids: Int[Tensor, "b t"]) -> Float[Tensor, "b v"]:
    with torch.no_grad():
        return Reader.over(model, None, rows=len(ids))(ids, last=True)[:, -1]


def _comparable(logits: Float[Tensor, "*b v"]) -> Float[Tensor, "*b v"]:
    """In float32 on the CPU, where they can be compared."""
    found = logits.to("cpu", torch.float32, copy=True)
    if not bool((found < torch.inf).all()):  # NaN is not below it either
        raise UnsupportedModel(
            f"the logits are not finite in {str(logits.dtype).removeprefix('torch.')}",
            hint="they overflow in float16: choose bfloat16 or float32",
        )
    return found.clamp_min(NEVER)
