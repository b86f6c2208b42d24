"""Tiny models, and the mapping from a model to itself that changes nothing."""

from collections.abc import Callable

import pytest
import torch

from kvtransfer.evaluation.evaluate import evaluate
from kvtransfer.evaluation.report import EvalReport
from kvtransfer.fitting.affine import Affine
from kvtransfer.fitting.layer_map import LayerMap
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.texts import builtin
from kvtransfer.guides.guide import Choice, Expect, Guide
from kvtransfer.hf.model import LanguageModel

PREFIX, CONTINUATION, ITEMS = 40, 16, 6

GUIDES = (
    Guide(
        "harbour",
        "The harbour of Tellmouth opens with the code 4821. Its master is named Marlow.",
        (
            Choice("\nWhich code opens it? The code", (" 4821", " 7764", " 11"), 0),
            Choice("\nWho is its master? It is", (" Quennell", " Marlow"), 1),
            Expect("\nThe master is named", "Marlow"),
        ),
    ),
    Guide(
        "bell",
        "The tide bell hangs above the customs shed.",
        (Choice("\nWhere is the bell? It hangs above the", (" customs shed", " pier"), 0),),
    ),
)


def identity(model: LanguageModel) -> KVMapping:
    """Each layer from itself, by the identity matrix; the control maps everything to its bias."""

    def layer(index: int, scale: float) -> LayerMap:
        width = model.spec.layers[index].kv_heads * model.spec.layers[index].key_dim
        each = Affine(scale * torch.eye(width), torch.zeros(width))
        return LayerMap((index,), each, each)

    depth = range(len(model.spec.layers))
    return KVMapping(
        source=model.spec,
        target=model.spec,
        layers=tuple(layer(i, 1.0) for i in depth),
        rotate=model.rotary,
        target_config=model.module.config.to_dict(),
        shuffled=tuple(layer(i, 0.1) for i in depth),
        settings={},
        quality={},
        provenance={},
    )


@pytest.fixture(scope="session")
def model(tiny: Callable[..., LanguageModel]) -> LanguageModel:
    return tiny("llama", num_hidden_layers=2)


@pytest.fixture(scope="session")
def sibling(tiny: Callable[..., LanguageModel]) -> LanguageModel:
    """Of another depth and another number of heads."""
    return tiny("qwen3", seed=4, num_hidden_layers=3, num_key_value_heads=4)


@pytest.fixture(scope="session")
def itself(model: LanguageModel) -> EvalReport:
    """Everything measured of the mapping that changes nothing."""
    return evaluate(
        model,
        model,
        identity(model),
        texts=builtin("heldout"),
        guides=GUIDES,
        prefix=PREFIX,
        continuation=CONTINUATION,
        items=ITEMS,
    )
