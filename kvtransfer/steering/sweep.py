"""How strong is strong enough, and how strong too strong: one vector at many strengths.

For every prompt the model answers at all strengths, side by side in one batch. Each text is then
read by the model as it is: what it finds unlikely, or what repeats itself, is broken.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from kvtransfer.errors import SteeringError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import score
from kvtransfer.hf.sample import Sampling
from kvtransfer.measures.agreement import nll
from kvtransfer.measures.repetition import repetition
from kvtransfer.report import Provenance
from kvtransfer.steering.answers import Start, answer
from kvtransfer.steering.edit import require_finite
from kvtransfer.steering.guard import Effect, Guard
from kvtransfer.steering.interventions.steer import Steer
from kvtransfer.steering.layers import Layers
from kvtransfer.steering.pairs import Said
from kvtransfer.steering.sweep_report import Steered, Strength, SweepReport
from kvtransfer.steering.vector import CacheVector

SOMETHING = 0.1
"""Nats a token: where nobody says what is steered towards, less is no effect."""


def sweep(
    model: LanguageModel,
    vector: CacheVector,
    prompts: Sequence[Said],
    strengths: Sequence[float],
    *,
    key_strength: float = 1.0,
    value_strength: float = 1.0,
    layers: Layers = "all",
    chat: bool = False,
    after: str = "",
    max_new_tokens: int = 60,
    effect: Effect | None = None,
    guard: Guard | None = None,
    sampling: Sampling | None = None,
    seed: int = 0,
    progress: Callable[[int], None] = lambda prompts: None,
) -> SweepReport:
    """Answer ``prompts`` at every strength, and find those that work without breaking anything.

    Args:
        model: Answers, and judges.
        vector: Added once, after the prompt is read.
        prompts: That were not among the vector's pairs.
        strengths: Times the vector; 0, which the others are compared with, is added.
        key_strength: Of the keys, times the strength.
        value_strength: Of the values, times the strength.
        layers: That are steered.
        chat: Whether a plain text is what a user says.
        after: Text to put after each prompt; see :class:`kvtransfer.steering.answers.Start`.
        max_new_tokens: Of each answer, at most.
        effect: How much a text has of what is steered towards, :class:`Matches` of an expression
            say. If not given, how many nats a token the text is likelier to the model as steered
            than to the model as it is, which says that something changed, and not what.
        guard: When a text is broken, and an effect there.
        sampling: How tokens are drawn; greedy if not given.
        seed: Of the draws, which are the same at every strength.
        progress: Told 1 after each prompt.

    Raises:
        SteeringError: there are no prompts or strengths, a strength is no finite number, or the
            vector is of another size than the model's cache.
        IncompatibleModels: it is another model's.
        CacheLayoutError: a prompt and its answer are longer than the model's positions.
    """
    if not prompts or not strengths:
        raise SteeringError(
            f"{len(prompts)} prompts at {len(strengths)} strengths are nothing to sweep",
            hint="give at least one of each",
        )
    for strength in strengths:
        require_finite("a strength", strength)
    ordered = sorted({0.0, *map(float, strengths)})
    plain = Steer(
        vector, 0.0, key_strength=key_strength, value_strength=value_strength, layers=layers
    )
    steps = [replace(plain, strength=strength) for strength in ordered]
    guard = guard or Guard(effect=SOMETHING if effect is None else 0.0)
    found: list[tuple[Steered, ...]] = []
    for said in prompts:
        start = Start.of(model, said, at=vector.at, chat=chat, after=after)
        caches = [step(start.prefix) for step in steps]
        texts = answer(
            model, start, caches, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed
        )
        written = [
            _Written.by(model, start, cache, ids, effect)
            for cache, ids in zip(caches, texts, strict=True)
        ]
        as_it_is = written[ordered.index(0.0)]
        found.append(tuple(each.judged(as_it_is, guard) for each in written))
        progress(1)
    return SweepReport(
        model=model.spec.name,
        vector=vector.made,
        steered={
            "key_strength": key_strength,
            "value_strength": value_strength,
            "layers": str(plain.layers),
            "at": vector.at,
            "after": after,
        },
        prompts=tuple(map(_plain, prompts)),
        effect="nats a token that steering brings" if effect is None else str(effect),
        strengths=tuple(
            Strength.of(strength, at_it, guard)
            for strength, *at_it in zip(ordered, *found, strict=True)
        ),
        guard=guard,
        max_new_tokens=max_new_tokens,
        provenance=Provenance.here(seed=seed),
    )


@dataclass(frozen=True, slots=True)
class _Written:
    """A text, measured."""

    text: str
    tokens: int
    repetition: float
    nll: float | None
    effect: float

    @classmethod
    def by(
        cls,
        model: LanguageModel,
        start: Start,
        cache: KVCache,
        ids: Int[Tensor, " t"],
        effect: Effect | None,
    ) -> "_Written":
        text, unlikely = model.decode(ids), _nll(model, start, start.prefix, ids)
        if effect is not None:
            found = float(effect(text))
        elif unlikely is None or cache is start.prefix:
            found = 0.0
        else:
            found = unlikely - (_nll(model, start, cache, ids) or 0.0)
        return cls(text, len(ids), repetition(ids.tolist()), unlikely, found)

    def judged(self, plain: "_Written", guard: Guard) -> Steered:
        """Against the text without steering."""
        rise = None if self.nll is None else self.nll - (plain.nll or 0.0)
        return Steered(
            text=self.text,
            tokens=self.tokens,
            repetition=self.repetition,
            nll=self.nll,
            effect=self.effect,
            gain=self.effect - plain.effect,
            broken=guard.breaks(repetition=self.repetition - plain.repetition, nll=rise),
        )


def _nll(
    model: LanguageModel, start: Start, prefix: KVCache, ids: Int[Tensor, " t"]
) -> float | None:
    """Of an answer, in nats a token, read on ``prefix``; None where there is none."""
    new = ids[start.answered :]  # what the prompt said first is the same in every answer
    if not len(new):
        return None
    logits = score(model, torch.cat((start.live, new))[None], prefix)[0, len(start.live) - 1 : -1]
    return float(nll(logits, new.to(logits.device)).mean())


def _plain(said: Said) -> str:
    """A prompt in a line: of a conversation, what is said last."""
    return said if isinstance(said, str) else str(said[-1]["content"])
