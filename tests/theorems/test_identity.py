"""A model is its own best partner: mapped to itself, split in two, or read out, it is unchanged."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvtransfer.fitting.fit import fit
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.texts import builtin
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.cache import read, write
from kvtransfer.hf.call import cache_keyword
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill, score

from .compare import cache_error, is_still, relative_error, snapshot
from .prose import prose
from .ropes import YARN


@pytest.fixture(scope="module")
def model(tiny: Callable[..., LanguageModel]) -> LanguageModel:
    return tiny()


@pytest.fixture(scope="module")
def to_itself(model: LanguageModel) -> KVMapping:
    settings = FitSettings(tokens=4096, chunk=64, layers=1, batch=16)
    return fit(model, model, builtin("fit"), settings).mapping


def decode_on(model: LanguageModel, cache: DynamicCache, steps: int = 5) -> None:
    """Let transformers itself go on from a cache."""
    step = torch.tensor([[5]])
    for _ in range(steps):
        with torch.no_grad():
            logits = model.module(step, **{cache_keyword(model.module.forward): cache}).logits
        step = logits[:, -1:].argmax(-1)


def overwrite(cache: DynamicCache) -> None:
    """What a cache with preallocated layers does to its tensors at every step."""
    layer: Any = cache.layers[0]
    layer.keys.zero_()


def test_a_model_mapped_to_itself_gets_its_cache_back(
    model: LanguageModel, to_itself: KVMapping
) -> None:
    prefix, live = prose(model, 60).split([48, 12], dim=1)
    own = prefill(model, prefix)

    mapped = to_itself(own)

    assert cache_error(mapped, own) < 1e-5
    assert relative_error(score(model, live, mapped), score(model, live, own)) < 1e-5


def test_the_same_fit_on_shuffled_rows_loses_the_cache(
    model: LanguageModel, to_itself: KVMapping
) -> None:
    prefix, live = prose(model, 60).split([48, 12], dim=1)
    own = prefill(model, prefix)

    shuffled = to_itself(own, shuffled=True)

    assert cache_error(shuffled, own) > 0.1
    assert relative_error(score(model, live, shuffled), score(model, live, own)) > 0.1


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("llama", {}),
        ("llama", {"rope_parameters": YARN}),
        ("qwen3", {}),
        ("phi", {}),
        ("cohere", {}),
        ("glm", {}),
    ],
    ids=["llama", "yarn", "qwen3", "phi", "cohere", "glm"],
)
def test_a_models_own_prefix_gives_the_logits_of_one_run(
    tiny: Callable[..., LanguageModel], architecture: str, config: dict[str, Any]
) -> None:
    model = tiny(architecture, **config)
    ids = prose(model, 60)
    prefix, live = ids.split([48, 12], dim=1)

    with torch.no_grad():
        joint = model.module(ids, use_cache=False).logits[:, 48:]

    assert relative_error(score(model, live, prefill(model, prefix)), joint) < 1e-4
    assert relative_error(score(model, live), joint) > 0.1  # the prefix matters


def test_decoding_on_a_written_cache_leaves_ours_as_it_was(model: LanguageModel) -> None:
    own = prefill(model, prose(model, 48))
    before = snapshot(own)

    written = write(own)
    overwrite(written)
    decode_on(model, written)

    assert written.get_seq_length() == 48 + 5
    assert is_still(own, before)


def test_decoding_on_the_cache_that_was_read_leaves_ours_as_it_was(model: LanguageModel) -> None:
    own = prefill(model, prose(model, 48))
    theirs = write(own)
    ours = read(theirs, own.positions)
    before = snapshot(ours)

    overwrite(theirs)
    decode_on(model, theirs)

    assert is_still(ours, before)


def test_what_is_written_is_what_was_read(model: LanguageModel) -> None:
    own = prefill(model, prose(model, 48))

    back: KVCache = read(write(own), own.positions)

    assert is_still(back, snapshot(own))
