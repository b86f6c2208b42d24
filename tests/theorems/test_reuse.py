"""One prefix serves any number of prompts, one after another or all at once."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import generate, prefill, score

from .compare import is_still, relative_error, snapshot
from .prose import prose
from .ropes import YARN


@pytest.fixture(scope="module", params=["llama", "yarn", "qwen3", "gemma3_text"])
def model(request: pytest.FixtureRequest, tiny: Callable[..., LanguageModel]) -> LanguageModel:
    if request.param == "yarn":
        return tiny(rope_parameters=YARN)
    return tiny(request.param)


@pytest.fixture
def prefix(model: LanguageModel) -> KVCache:
    return prefill(model, prose(model, 40))


@pytest.fixture(scope="module")
def prompts(model: LanguageModel) -> tuple[Tensor, ...]:
    """Three of different lengths."""
    ids = prose(model, 30, skip=100)
    return ids[:, :12], ids[:, 12:17], ids[:, 17:]


def test_scoring_three_prompts_leaves_the_prefix_as_it_was(
    model: LanguageModel, prefix: KVCache, prompts: tuple[Tensor, ...]
) -> None:
    before = snapshot(prefix)

    for prompt in prompts:
        score(model, prompt, prefix)

    assert prefix.tokens == 40
    assert is_still(prefix, before)


def test_the_third_prompt_scores_as_if_it_were_the_first(
    model: LanguageModel, prefix: KVCache, prompts: tuple[Tensor, ...]
) -> None:
    alone = score(model, prompts[2], prefill(model, prose(model, 40)))

    for prompt in prompts[:2]:
        score(model, prompt, prefix)
        list(generate(model, prompt[0], prefix, max_new_tokens=6))

    assert torch.equal(score(model, prompts[2], prefix), alone)


def test_generating_after_three_prompts_leaves_the_prefix_as_it_was(
    model: LanguageModel, prefix: KVCache, prompts: tuple[Tensor, ...]
) -> None:
    before = snapshot(prefix)

    for prompt in prompts:
        assert list(generate(model, prompt[0], prefix, max_new_tokens=6))

    assert prefix.tokens == 40
    assert is_still(prefix, before)


def test_the_third_prompt_is_answered_as_if_it_were_the_first(
    model: LanguageModel, prefix: KVCache, prompts: tuple[Tensor, ...]
) -> None:
    alone = list(generate(model, prompts[2][0], prefill(model, prose(model, 40)), max_new_tokens=6))

    answers = [list(generate(model, prompt[0], prefix, max_new_tokens=6)) for prompt in prompts]

    assert answers[2] == alone
    assert answers[0] != answers[1]


def test_a_prefix_shared_by_a_batch_scores_as_alone(model: LanguageModel, prefix: KVCache) -> None:
    prompts = prose(model, 36, skip=100).view(3, 12)
    before = snapshot(prefix)

    together = score(model, prompts, prefix.expand(3))

    alone = torch.cat([score(model, prompt[None], prefix) for prompt in prompts])
    assert relative_error(together, alone) < 1e-6
    assert is_still(prefix, before)
