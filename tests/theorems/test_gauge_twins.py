"""Where an exact map exists, fitting finds it, and a grafted prefix is as good as a native one.

No weights here are trained and no answer is stored: a twin computes the model's own function from
another cache, and so says what a mapped prefix must do to every logit.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest

from kvtransfer.fitting.fit import FitSettings, fit
from kvtransfer.fitting.texts import builtin
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill, score

from .compare import relative_error
from .prose import prose
from .ropes import LLAMA3, LONGROPE, YARN
from .twins import twin_of

Pair = tuple[LanguageModel, LanguageModel]

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gqa": ("llama", {}),
    "mha": ("llama", {"num_key_value_heads": 4}),
    "mqa": ("llama", {"num_key_value_heads": 1}),
    "biases": ("llama", {"attention_bias": True}),
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "yarn": ("llama", {"rope_parameters": YARN}),
    "longrope": ("llama", {"rope_parameters": LONGROPE}),
    "partial": ("phi", {}),
    "interleaved": ("cohere", {}),
    "interleaved-partial": ("glm", {}),
    "windowed": ("mistral", {"sliding_window": 8}),
}


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, tiny: Callable[..., LanguageModel]) -> Pair:
    architecture, config = MODELS[request.param]
    model = tiny(architecture, **config)
    return model, twin_of(model)


def test_a_twin_computes_the_same_function_from_another_cache(pair: Pair) -> None:
    model, twin = pair
    ids = prose(model, 48)

    assert relative_error(score(twin, ids), score(model, ids)) < 1e-4
    own, other = prefill(model, ids), prefill(twin, ids)
    for block, changed in zip((*own.keys, *own.values), (*other.keys, *other.values), strict=True):
        assert relative_error(changed, block) > 0.3


def test_a_twin_cannot_read_the_raw_cache(pair: Pair) -> None:
    model, twin = pair
    prefix, live = prose(model, 60).split([48, 12], dim=1)
    raw = replace(prefill(model, prefix), model=None)

    error = relative_error(score(twin, live, raw), score(twin, live, prefill(twin, prefix)))

    assert error > 1e-2


@pytest.mark.parametrize("layers", [1, "all"], ids=["k=1", "k=all"])
def test_a_mapped_prefix_gives_the_native_logits(pair: Pair, layers: Literal["all"] | int) -> None:
    model, twin = pair
    prefix, live = prose(model, 60).split([48, 12], dim=1)

    found = fit(
        model, twin, builtin("fit"), FitSettings(tokens=4096, chunk=64, layers=layers, batch=16)
    )

    grafted = score(twin, live, found.mapping(prefill(model, prefix)))
    assert relative_error(grafted, score(twin, live, prefill(twin, prefix))) < 1e-4
    for row in found.layers:
        assert min(row.r2_keys, row.r2_values) > 1 - 1e-6
        assert row.sources == ((row.target,) if layers == 1 else (0, 1, 2, 3))
