"""The ablation matrix: what is left of a guide without its keys, its values, both, or itself.

A zeroed key is not an absent one: its score is zero, and a score of zero takes its share of the
softmax. Only what is removed is gone. The matrix shows both, and checks the second.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvtransfer.errors import TextError
from kvtransfer.evaluation.ablation_report import AblationReport, Answers
from kvtransfer.evaluation.conditions import Arm
from kvtransfer.evaluation.guide_items import ask, shared
from kvtransfer.geometry.cache import KVCache
from kvtransfer.guides.guide import Expect, Guide, Item, guides_of
from kvtransfer.guides.seam import split
from kvtransfer.hf.attention import looks
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.reader import Reader
from kvtransfer.hf.run import prefill, score
from kvtransfer.measures.agreement import kl, nll
from kvtransfer.measures.intervals import SEED
from kvtransfer.report import Provenance
from kvtransfer.steering.chain import chain
from kvtransfer.steering.edit import Intervention
from kvtransfer.steering.interventions import Ablate
from kvtransfer.steering.interventions.ablate import Ablation
from kvtransfer.steering.layers import Layers, which

ABLATIONS: Mapping[str, Ablation | None] = MappingProxyType(
    {
        "intact": None,
        "keys zeroed": "keys",
        "values zeroed": "values",
        "both zeroed": "both",
        "removed": "removed",
    }
)
"""The rows, in their order, and the part that each takes out. After them comes ``none``: the run
without the guide, its live tokens at the same positions."""


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """One question: its tokens with the right answer, split at the seam."""

    hidden: Int[Tensor, " p"]
    live: Int[Tensor, " s"]
    answer: int
    """Tokens at the end of ``live`` that are the answer."""

    @classmethod
    def of(cls, model: LanguageModel, guide: Guide, item: Item) -> "_Asked":
        right = f" {item.expect}" if isinstance(item, Expect) else item.choices[item.answer]
        asked = guide.text + item.prompt
        hidden = split(model.tokenizer, guide.text, item.prompt, seam="back-off").hidden
        prompt, whole = model.encode(asked), model.encode(asked + right)
        # At least one live token before the answer, to predict it, and one token of answer.
        start = max(min(shared(prompt, whole), len(whole) - 1), len(hidden) + 1)
        begun = torch.cat((model.opening, hidden))
        return cls(begun, whole[len(hidden) :], len(whole) - start)


def ablate(
    model: LanguageModel,
    guides: Iterable[Guide],
    *,
    layers: Layers = "all",
    progress: Callable[[], None] = lambda: None,
) -> AblationReport:
    """Ask every question of every guide on the model's own cache of it, ablated in each way.

    The beginning that the model expects before any text stays as it is.

    Args:
        model: Reads guides.
        guides: With questions.
        layers: Where the guide is ablated.
        progress: Called after each question.

    Returns:
        Per row NLL of the right answers, KL to the intact graft, share of the softmax that is spent
        on the guide (a mean over live tokens, heads and the ablated layers), and answers.

    Raises:
        SteeringError: there is no such layer.
        TextError: there are no questions.
        SeamError: a guide and a prompt share no token boundary.
        UnsupportedModel: the model's attention cannot hide tokens from a layer.
    """
    columns: dict[str, dict[str, list[float]]] = {}
    answers: list[Answers] = []
    off: list[float] = []
    opening = len(model.opening)
    for guide in guides_of(guides):
        for item in guide.items:
            asked = _Asked.of(model, guide, item)
            own = prefill(model, asked.hidden[None])
            arms = {name: part_out(part, layers, opening)(own) for name, part in ABLATIONS.items()}
            logits = {name: score(model, asked.live[None], arm) for name, arm in arms.items()}
            logits["none"] = _without(model, asked, own)
            if len(which(layers, len(own))) == len(own):
                off.append(float((logits["removed"] - logits["none"]).abs().max()))
            texts: dict[str, str] = {}
            for name, found in logits.items():
                arm = arms.get(name, own.prefix(opening) if opening else None)
                right, texts[name] = ask(
                    Arm(model, arm), guide.text, len(asked.hidden) - opening, item
                )
                measured = {
                    "nll": float(nll(found[0, :-1], asked.live[1:])[-asked.answer :].mean()),
                    "kl": float(kl(logits["intact"][0], found[0])[-asked.answer - 1 : -1].mean()),
                    "mass": _mass(model, asked, arm, layers, opening) if name in arms else 0.0,
                    "accuracy": float(right),
                }
                for metric, value in measured.items():
                    columns.setdefault(name, {}).setdefault(metric, []).append(value)
            if isinstance(item, Expect):
                answers.append(Answers(guide.name, item.prompt, item.expect, texts))
            progress()
    if not columns:
        raise TextError(
            "there are no questions to ask",
            hint="give guides with items: read_guides(file) reads them with their questions",
        )
    return AblationReport(
        model=model.spec.name,
        layers=str(layers),
        columns={
            name: {metric: np.array(values) for metric, values in found.items()}
            for name, found in columns.items()
        },
        answers=tuple(answers),
        removed_to_none=max(off, default=None),
        provenance=Provenance.here(seed=SEED),
    )


def part_out(part: Ablation | None, layers: Layers, opening: int) -> Intervention:
    """The ablation of a row of the matrix, which leaves the first ``opening`` tokens alone."""
    return chain() if part is None else Ablate(part, layers=layers, tokens=(opening, None))


def _without(model: LanguageModel, asked: _Asked, own: KVCache) -> Float[Tensor, "b s v"]:
    """The logits of the live tokens at the same positions, with no guide before them."""
    opening = len(model.opening)
    reader = Reader.over(model, own.prefix(opening) if opening else None)
    further = replace(reader, next=reader.next + own.tokens - opening)
    with torch.no_grad():
        return further(asked.live[None])


def _mass(
    model: LanguageModel, asked: _Asked, arm: KVCache | None, layers: Layers, opening: int
) -> float:
    """The share of the softmax that live tokens spend on the guide, in the ablated layers."""
    assert arm is not None  # every ablation leaves a cache
    seen = looks(model, asked.live[None], arm)
    shares = [
        look.weights[..., opening : arm.tokens].sum(dim=-1).mean()
        for layer in which(layers, len(arm))
        if (look := seen[layer]) is not None
    ]
    return float(torch.stack(shares).mean()) if shares else float("nan")
