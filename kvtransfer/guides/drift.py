"""How far a model on a cache that was carried to it is from itself on its own, and what to do then.

The measure and the bound; :class:`kvtransfer.guides.session.Session` knows when to ask.
"""

import math
from dataclasses import dataclass
from numbers import Integral, Real

from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import CacheLayoutError, require
from kvtransfer.geometry.cache import KVCache
from kvtransfer.guides.recompute import deviation
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.reread import first_layers
from kvtransfer.hf.run import score
from kvtransfer.measures.agreement import kl, nll, top1_agreement

TOKENS = 32
"""How many tokens a drift is measured on, where nobody says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """One model on two caches of the same tokens: one carried to it, and its own."""

    tokens: int
    """How many next tokens the rest are means over."""
    nll: float
    """Of these tokens on the carried cache, in nats a token."""
    own_nll: float
    """The same on the model's own cache."""
    kl: float
    """KL(own ‖ carried) of the next-token distributions, in nats a token."""
    top1_agreement: float
    """How often both rank the same token first."""

    def __str__(self) -> str:
        return (
            f"KL {self.kl:.3f}, NLL {self.nll:.3f} (own {self.own_nll:.3f}), "
            f"top-1 {self.top1_agreement:.0%} over {self.tokens} tokens"
        )


def drift_between(
    model: LanguageModel, ids: Int[Tensor, " t"], carried: KVCache, own: KVCache, *, tokens: int
) -> Drift:
    """How differently ``model`` predicts the last ``tokens`` of ``ids`` on two caches.

    The token before them is read live, for a cache holds no logits; what stands before that is
    taken from the caches.

    Args:
        model: Reads.
        ids: All tokens; the caches hold all of them but the last ``tokens + 1``, or more.
        carried: A cache of them.
        own: The model's own.
        tokens: How many to score.
    """
    hidden = len(ids) - tokens - 1
    live, wanted = ids[None, hidden:-1], ids[hidden + 1 :].to(model.device)
    mine, theirs = (score(model, live, cache.prefix(hidden))[0] for cache in (own, carried))
    return Drift(
        tokens=tokens,
        nll=float(nll(theirs, wanted).mean()),
        own_nll=float(nll(mine, wanted).mean()),
        kl=float(kl(mine, theirs).mean().clamp_min(0)),
        top1_agreement=float(top1_agreement(mine, theirs).float().mean()),
    )


def first_deviation(
    model: LanguageModel, ids: Int[Tensor, " t"], cache: KVCache, *, layers: int
) -> float:
    """By how much the tokens of ``cache`` are off in the model's first ``layers`` layers, a mean.

    Those are computed for all tokens, which costs ``layers - 1`` of a prefill's layers; what is
    compared is as of :func:`kvtransfer.guides.recompute.deviation`. Layers above are not looked at.

    Raises:
        CacheLayoutError, IncompatibleModels, RotationError: as
            :func:`kvtransfer.guides.recompute.recompute`.
        ValueError: there are no such layers.
    """
    require("layers", layers, Integral, "a whole number", hint="a number of layers")
    if not 1 <= layers <= len(model.spec.layers):
        raise ValueError(
            f"{layers} layers are to be looked at, and the model has {len(model.spec.layers)}"
        )
    right = first_layers(model, ids[None], cache, after=0, last=layers - 1)
    return float(deviation(right, cache, layers=layers).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class RePrefill:
    """When a model that a cache was carried to reads the whole text itself after all.

    >>> RePrefill(deviation=0.5)  # where its first layers are off by that much
    RePrefill(kl=None, deviation=0.5, every=None, tokens=32)

    ``deviation`` is what a live session can afford: a layer or two of a prefill. ``kl`` is the
    drift itself, for which the model has to read everything: no cheaper than to re-prefill at once,
    and good for a study, or to find what deviation stands for which drift. ``every`` does not look.
    """

    kl: float | None = None
    """Nats a token beyond which :attr:`Drift.kl` is too much."""
    deviation: float | None = None
    """Beyond which :meth:`~kvtransfer.guides.session.Session.deviation` is too much."""
    every: int | None = None
    """At each n-th time in a row that mapped tokens were added, whatever they are worth."""
    tokens: int = TOKENS
    """How many of the last tokens ``kl`` is measured on."""

    def __post_init__(self) -> None:
        bounds = {"kl": self.kl, "deviation": self.deviation, "every": self.every}
        asked = {name: bound for name, bound in bounds.items() if bound is not None}
        if not asked:
            raise ValueError("a policy needs a bound: kl, deviation or every")
        for name, bound in asked.items():
            require(name, bound, Real, "a number", hint="RePrefill(kl=0.1)")
            if not (math.isfinite(bound) and bound >= 0):
                raise ValueError(f"{name}={bound}; a bound is a number from 0 on")
        for name, count in (("every", self.every), ("tokens", self.tokens)):
            if count is not None:
                require(name, count, Integral, "a whole number", hint="RePrefill(every=3)")
                if count < 1:
                    raise ValueError(f"{name}={count}; at least 1")

    def due(self, *, drift: Drift | None, deviation: float | None, carried: int) -> bool:
        """Whether a bound is passed.

        Args:
            drift: As measured; None where ``kl`` is not asked for.
            deviation: As measured; None where it is not asked for.
            carried: How often in a row mapped tokens were added to this cache.
        """
        return (
            (self.kl is not None and drift is not None and drift.kl > self.kl)
            or (self.deviation is not None and deviation is not None and deviation > self.deviation)
            or (self.every is not None and carried >= self.every)
        )


def scored_at_most(held: int, tokens: int) -> int:
    """How many of the last of ``held`` tokens are scored: ``tokens``, and half of them at most.

    What is scored is read again on what is held of the tokens before, which has to be something.

    Raises:
        CacheLayoutError: none.
    """
    require("tokens", tokens, Integral, "a whole number", hint="a number of tokens")
    if tokens < 1:
        raise ValueError(f"{tokens} tokens are to be scored; at least 1")
    if held < 3:
        raise CacheLayoutError(
            f"a drift needs a token in the cache, one that is read and one to predict: {held} "
            "were seen",
            hint="feed more first, or say what comes next: session.drift(continuation)",
        )
    return min(tokens, held // 2)
