"""What one condition makes of a context: what stands hidden, and what is read live after it.

A cache holds no logits, so the last token of every context is read live. This module knows nothing
of lm-eval.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import IncompatibleModels
from kvtransfer.evaluation.conditions import CONDITIONS, USUAL, Pair, Reading
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.aligned import alignable_start
from kvtransfer.hf.model import LanguageModel

NEEDS_MAPPING = ("mapped", "unrotated", "shuffled")
NEEDS_SOURCE = (*NEEDS_MAPPING, "raw", "source")


def require_given(condition: str, *, source: object, target: object, mapping: object) -> None:
    """Raise unless a condition has what it needs, be it named or loaded.

    Raises:
        IncompatibleModels: a model or mapping is missing.
        ValueError: there is no such condition.
    """
    if condition not in USUAL:
        raise ValueError(f"no condition {condition!r}; there are {', '.join(USUAL)}")
    for what, given, needed in (
        ("source", source, condition in NEEDS_SOURCE),
        ("target", target, condition != "source"),
        ("mapping", mapping, condition in NEEDS_MAPPING),
    ):
        if needed and given is None:
            raise IncompatibleModels(
                f"condition {condition!r} needs a {what}, and none was given",
                hint=f"name it: {what}=… (--model_args source=…,target=…,mapping=…)",
            )


@dataclass(frozen=True, slots=True, eq=False)
class Context:
    """One context under one condition."""

    prefix: KVCache | None
    """Hidden; None where nothing is."""
    live: Int[Tensor, " s"]
    """What is left of the context, its last token at least."""


@dataclass(slots=True, eq=False)
class Contexts:
    """Reads contexts under one condition; the last one is kept, for whoever asks for it again."""

    pair: Pair
    arm: str
    """A name from CONDITIONS, of the pair."""
    _kept: tuple[tuple[int, ...], Context] | None = field(default=None, init=False)

    @classmethod
    def under(
        cls,
        condition: str,
        *,
        source: LanguageModel | None,
        target: LanguageModel | None,
        mapping: KVMapping | None,
    ) -> "Contexts":
        """Those of a condition, from what it needs of these.

        ``source`` alone is a model that reads everything itself, in its own tokens, whatever the
        target's are: answers compare where tokens do not.

        Raises:
            IncompatibleModels: a model or mapping that the condition needs was not given, or the
                mapping is for another pair.
            ValueError: there is no such condition.
        """
        require_given(condition, source=source, target=target, mapping=mapping)
        if source is not None and target is not None and mapping is not None:
            mapping.check_ends(source.spec, target.spec)
        if condition == "source":
            assert source is not None
            return cls(Pair(source, source, None), "own")
        assert target is not None
        # A prefix ends where the source's tokens allow it, also the one that is not there.
        asks_source = condition in NEEDS_SOURCE or (condition == "none" and source is not None)
        other = source if asks_source and source is not None else target
        return cls(Pair(other, target, mapping if condition in NEEDS_MAPPING else None), condition)

    @property
    def reader(self) -> LanguageModel:
        """Who reads what is live."""
        return self.pair.target

    def __call__(self, ids: Sequence[int]) -> Context:
        """A context, read.

        Args:
            ids: All of its tokens, as the reader has them; one at least.

        Raises:
            CacheLayoutError: it is longer than a model can read, or the source's cache as it is
                does not have the target's shapes.
            SeamError: the source has other tokens, and no text has any start of these.
            IncompatibleModels: the source's cache as it is means nothing to the target.
        """
        key = tuple(ids)
        if self._kept is None or self._kept[0] != key:
            self._kept = None  # before another is made: a prefix may be large
            self._kept = (key, self._read(torch.tensor(key, dtype=torch.long)))
        return self._kept[1]

    def _read(self, ids: Int[Tensor, " t"]) -> Context:
        if len(ids) < 2:
            return Context(None, ids)
        pair = self.pair
        end = alignable_start(pair.source, pair.target, ids, at_most=len(ids) - 1)
        hidden, live = ids[:end], ids[end:]
        opening = self.reader.opening
        if self.arm == "none" and not torch.equal(hidden[: len(opening)], opening):
            return Context(None, live)  # the context itself does not begin with it
        return Context(CONDITIONS[self.arm](Reading(pair, hidden[None])).prefix, live)
