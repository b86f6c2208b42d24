"""The persona axis V★: the direction in which two personas' hidden states lie apart.

A linear discriminant of what enters a layer, fitted to texts in which both personas speak, each
read behind its own prompt (arXiv:2609.11020). States of a run are projected on it twice: raw, as
the discriminant has it, and scaled so that the mean of the source's texts is −1 and that of the
target's +1. Every axis has a scale of its own, so only scaled projections are compared between
layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.part import states
from kvtransfer.hf.reader import Reader
from kvtransfer.hf.run import prefill
from kvtransfer.steering.frame import prompt
from kvtransfer.steering.persona import Persona

ASKED = "Tell me something."
"""What the user says before each example text: nothing of its subject."""

FOLDS = 4
"""Parts that the texts are held out in, one after another. So many texts are needed of each."""

NO_AXIS = "without layers there is no persona axis: choose another model"
"""What to do where layers cannot be told apart."""

Rows = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PersonaAxis:
    """Of what enters one layer."""

    layer: int
    direction: Float[Tensor, " e"]
    """Raw projection: the log odds of the target, as the discriminant sees them."""
    offset: float
    ends: tuple[float, float]
    """Raw projections of the source's and the target's texts, on average."""
    accuracy: float
    """Share of tokens of texts held out that lie on their persona's side, both counting alike."""
    texts: int
    """Of each persona, at least."""
    tokens: int
    """Of both personas' texts."""

    def raw(self, states: Float[Tensor, "*n e"]) -> Float[Tensor, "*n"]:
        """Where states lie on the axis, in log odds of the target."""
        found: Tensor = states.double() @ self.direction + self.offset
        return found

    def scaled(self, states: Float[Tensor, "*n e"]) -> Float[Tensor, "*n"]:
        """The same, with the source's texts at −1 and the target's at +1."""
        low, high = self.ends
        return 2 * (self.raw(states) - low) / (high - low) - 1


def persona_axes(
    model: LanguageModel, source: Persona, target: Persona, layers: Sequence[int]
) -> tuple[PersonaAxis, ...]:
    """An axis of what enters each of ``layers``.

    Raises:
        PersonaError: a persona has too few example texts.
        UnsupportedModel: the model's layers cannot be told apart.
        SeamError: the model's template does not take a persona's prompt.
    """
    for persona in (source, target):
        persona.require_texts(FOLDS)
    spoken = [_spoken(model, persona, layers) for persona in (source, target)]
    return tuple(
        fit_axis([text[layer] for text in spoken[0]], [text[layer] for text in spoken[1]], layer)
        for layer in layers
    )


def fit_axis(
    source: Sequence[Float[Tensor, "_n e"]], target: Sequence[Float[Tensor, "_n e"]], layer: int
) -> PersonaAxis:
    """The axis between two personas' states, a block of tokens a text; and how well it tells texts
    that it was not fitted to."""
    low, high = ([text.double().numpy() for text in texts] for texts in (source, target))
    right = [
        _right(
            [text for i, text in enumerate(low) if i % FOLDS != fold],
            [text for i, text in enumerate(high) if i % FOLDS != fold],
            low[fold::FOLDS],
            high[fold::FOLDS],
        )
        for fold in range(FOLDS)
    ]
    direction, offset = _discriminant(low, high)
    return PersonaAxis(
        layer=layer,
        direction=torch.from_numpy(direction),
        offset=offset,
        ends=(_middle(low, direction) + offset, _middle(high, direction) + offset),
        accuracy=float(np.mean(right)),
        texts=min(len(low), len(high)),
        tokens=sum(map(len, (*low, *high))),
    )


def _middle(texts: list[Rows], direction: Rows) -> float:
    """The mean projection of all tokens of ``texts``."""
    return float((np.concatenate(texts) @ direction).mean())


def _right(low: list[Rows], high: list[Rows], low_out: list[Rows], high_out: list[Rows]) -> float:
    """Share of the tokens held out that lie on their side, a mean over both sides."""
    direction, offset = _discriminant(low, high)
    below, above = (np.concatenate(texts) @ direction + offset for texts in (low_out, high_out))
    return float(((below < 0).mean() + (above > 0).mean()) / 2)


def _discriminant(low: list[Rows], high: list[Rows]) -> tuple[Rows, float]:
    """Direction and offset of the log odds of ``high``.

    There are mostly fewer tokens than a state has numbers, so the covariance is shrunk, by as much
    as Ledoit and Wolf (2004) find right.
    """
    from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

    rows = np.concatenate([*low, *high])
    is_high = np.repeat([0, 1], [sum(map(len, low)), sum(map(len, high))])
    fitted = LinearDiscriminantAnalysis(solver="lsqr", shrinkage="auto", priors=[0.5, 0.5])
    fitted.fit(rows, is_high)
    return np.asarray(fitted.coef_[0], dtype=np.float64), float(fitted.intercept_[0])


def _spoken(
    model: LanguageModel, persona: Persona, layers: Sequence[int]
) -> list[dict[int, Tensor]]:
    """What enters ``layers`` at each token of each example text, read behind its prompt."""
    ids = model.opened(prompt(model, persona, ASKED).ids)
    prefix = prefill(model, ids[None])
    found = []
    for text in persona.texts:
        said = model.encode(text)
        with torch.no_grad(), states(model, layers, otherwise=NO_AXIS) as seen:
            Reader.over(model, prefix)(said[None], last=True)
        found.append({layer: seen[layer][0].to("cpu", torch.float32) for layer in layers})
    return found
