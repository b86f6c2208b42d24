"""Models with sliding windows: the whole prefix is kept, and the model's own mask does the rest."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import generate, prefill, score

from .compare import relative_error
from .prose import prose

WINDOW = 8
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "every layer": ("mistral", {}),
    "some layers": ("gemma3_text", {"sliding_window_pattern": 2}),
}


@pytest.fixture(params=MODELS)
def make(
    request: pytest.FixtureRequest, tiny: Callable[..., LanguageModel]
) -> Callable[[int], LanguageModel]:
    """The same weights with a window of any size."""
    architecture, config = MODELS[request.param]
    return lambda window: tiny(architecture, sliding_window=window, **config)


def test_a_prefix_beyond_the_window_is_kept_whole(make: Callable[[int], LanguageModel]) -> None:
    model = make(WINDOW)
    assert any(layer.window == WINDOW for layer in model.spec.layers)

    cache = prefill(model, prose(model, 20))

    assert cache.tokens == 20
    assert {block.shape[2] for block in (*cache.keys, *cache.values)} == {20}


@pytest.mark.parametrize("length", [5, 20, 40], ids=lambda n: f"prefix-{n}")
def test_a_split_run_gives_the_logits_of_one_run(
    make: Callable[[int], LanguageModel], length: int
) -> None:
    model = make(WINDOW)
    ids = prose(model, length + 12)
    prefix, live = ids.split([length, 12], dim=1)

    with torch.no_grad():
        joint = model.module(ids, use_cache=False).logits[:, length:]

    assert relative_error(score(model, live, prefill(model, prefix)), joint) < 1e-4


def test_a_wider_window_gives_other_logits(make: Callable[[int], LanguageModel]) -> None:
    narrow, wide = make(WINDOW), make(512)
    prefix, live = prose(narrow, 32).split([20, 12], dim=1)

    logits = [score(model, live, prefill(model, prefix)) for model in (narrow, wide)]

    assert relative_error(*logits) > 0.1


def test_token_by_token_past_the_window_is_what_one_run_says(
    make: Callable[[int], LanguageModel],
) -> None:
    model = make(WINDOW)
    prefix, live = prose(model, 32).split([20, 12], dim=1)

    tokens = list(generate(model, live[0], prefill(model, prefix), max_new_tokens=10))

    read = torch.cat((prefix, live, torch.tensor([tokens])), dim=1)
    with torch.no_grad():
        joint = model.module(read, use_cache=False).logits[0, 31:-1]
    assert tokens == joint.argmax(-1).tolist()
