"""Steering adds a vector to a token's content, and to nothing else."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtransfer.errors import IncompatibleModels, RotationError, SteeringError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.geometry.join import stack
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill, score
from kvtransfer.steering.chain import chain
from kvtransfer.steering.extract import extract
from kvtransfer.steering.interventions import Steer
from kvtransfer.steering.vector import CacheVector

from .conftest import PAIRS

Tiny = Callable[..., LanguageModel]

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
MODELS: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "yarn, which stretches": ("llama", {"rope_parameters": YARN}),
    "a quarter of the dims turned": ("gpt_neox", {"rotary_pct": 0.25}),
    "interleaved": ("cohere", {}),
    "no rotation in one layer": ("smollm3", {"no_rope_layers": [1, 1, 0, 1]}),
    "learned positions": ("gpt2", {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512}),
}


def ids(model: LanguageModel, text: str) -> Tensor:
    return model.encode(text)[None]


@pytest.fixture(scope="module")
def cache(model: LanguageModel) -> KVCache:
    return prefill(model, ids(model, "The harbour empties twice a day"))


def blocks(cache: KVCache) -> tuple[Tensor, ...]:
    return (*cache.keys, *cache.values)


def test_a_strength_of_zero_is_the_cache_itself(cache: KVCache, vector: CacheVector) -> None:
    assert Steer(vector, 0.0)(cache) is cache
    assert Steer(vector, key_strength=0.0, value_strength=0.0)(cache) is cache
    assert Steer(vector, layers=())(cache) is cache
    assert not torch.equal(Steer(vector, 1e-3)(cache).values[1], cache.values[1])


def test_only_the_last_token_changes_and_the_caller_keeps_the_cache(
    cache: KVCache, vector: CacheVector
) -> None:
    before = cache.map(torch.clone)

    steered = Steer(vector, 2.0)(cache)

    assert all(map(torch.equal, blocks(cache), blocks(before)))
    for new, old in zip(blocks(steered), blocks(cache), strict=True):
        assert torch.equal(new[:, :, :-1], old[:, :, :-1])
    # In layer 0 nothing but the token itself is seen, and all pairs end in one token.
    changed = zip(
        (*steered.keys[1:], *steered.values[1:]), (*cache.keys[1:], *cache.values[1:]), strict=True
    )
    assert not any(torch.equal(new[:, :, -1], old[:, :, -1]) for new, old in changed)
    assert steered.tokens == cache.tokens  # nothing more to attend to in any later step
    assert "Steer(" in str(steered.approximate)


@pytest.mark.parametrize("kind", MODELS)
def test_it_is_added_to_the_content_whatever_turns_the_keys(tiny: Tiny, kind: str) -> None:
    name, config = MODELS[kind]
    model = tiny(name, **config)
    found = extract(model, PAIRS[:2]).vector
    cache = prefill(model, ids(model, "The harbour empties twice a day"))

    steered = Steer(found, 1.5, tokens=(3, None))(cache)

    contents = zip(steered.content().keys, cache.content().keys, found.keys, strict=True)
    for new, old, direction in contents:
        wanted = old.clone()
        wanted[:, :, 3:] += 1.5 * direction[None, :, None]
        torch.testing.assert_close(new, wanted, atol=2e-5, rtol=1e-5)
    for new, old, direction in zip(steered.values, cache.values, found.values, strict=True):
        torch.testing.assert_close(new[:, :, 3:] - old[:, :, 3:], (1.5 * direction)[None, :, None]
                                   .expand_as(old[:, :, 3:]), atol=1e-5, rtol=1e-5)  # fmt: skip


def test_a_direction_is_turned_where_its_token_stands(cache: KVCache, vector: CacheVector) -> None:
    added = Steer(vector)(cache).keys[2][:, :, -1] - cache.keys[2][:, :, -1]

    assert not torch.allclose(added[0], vector.keys[2], atol=1e-3)
    torch.testing.assert_close(added.norm(dim=-1)[0], vector.keys[2].norm(dim=-1))


@pytest.mark.parametrize("kind", MODELS)
def test_there_and_back_is_the_cache_again(tiny: Tiny, kind: str) -> None:
    name, config = MODELS[kind]
    model = tiny(name, **config)
    found = extract(model, PAIRS[:2]).vector
    cache = prefill(model, ids(model, "The harbour empties twice a day"))

    back = chain(Steer(found), Steer(-found))(cache)

    for new, old in zip(blocks(back), blocks(cache), strict=True):
        torch.testing.assert_close(new, old, atol=1e-5, rtol=1e-5)
    assert all(map(torch.equal, blocks(Steer(-found)(cache)), blocks(Steer(found, -1.0)(cache))))


def test_as_cached_it_is_added_unturned(cache: KVCache, vector: CacheVector) -> None:
    turned, plain = Steer(vector)(cache), Steer(vector, space="cached")(cache)

    for layer, (keys, values) in enumerate(plain):
        torch.testing.assert_close(
            keys[:, :, -1] - cache.keys[layer][:, :, -1],
            vector.keys[layer].expand(len(keys), -1, -1),
            atol=1e-5,
            rtol=1e-5,
        )
        assert torch.equal(values, turned.values[layer])
    # Not in layer 0, where a key is of its token alone, and the pairs end in the same one.
    assert not torch.allclose(plain.keys[2], turned.keys[2], atol=1e-3)


def test_strengths_add_up(cache: KVCache, vector: CacheVector) -> None:
    once_more = chain(Steer(vector, 0.5), Steer(vector, 1.5))(cache)

    for new, old in zip(blocks(once_more), blocks(Steer(2 * vector)(cache)), strict=True):
        torch.testing.assert_close(new, old, atol=1e-5, rtol=1e-5)


def test_keys_and_values_have_strengths_of_their_own(cache: KVCache, vector: CacheVector) -> None:
    keys, values = Steer(vector, value_strength=0.0)(cache), Steer(vector, key_strength=0.0)(cache)

    assert all(map(torch.equal, keys.values, cache.values))
    assert all(map(torch.equal, values.keys, cache.keys))
    both = chain(Steer(vector, value_strength=0.0), Steer(vector, key_strength=0.0))(cache)
    assert all(map(torch.equal, blocks(both), blocks(Steer(vector)(cache))))
    assert not torch.equal(keys.keys[2], cache.keys[2])


def test_the_vector_of_one_pair_makes_one_prompt_the_other(model: LanguageModel) -> None:
    """Where only the last token differs, that is the whole of their difference."""
    positive, negative, live = (
        ids(model, text) for text in ("the tide comes at 1", "the tide comes at 7", " and")
    )
    assert torch.equal(positive[:, :-1], negative[:, :-1])
    found = extract(model, [("the tide comes at 1", "the tide comes at 7")]).vector

    steered = score(model, live, Steer(found)(prefill(model, negative)))

    wanted = score(model, live, prefill(model, positive))
    torch.testing.assert_close(steered, wanted, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(score(model, live, prefill(model, negative)), wanted, atol=0.1)


def test_rows_of_a_batch_are_steered_as_they_are_alone(
    model: LanguageModel, vector: CacheVector
) -> None:
    alone = [prefill(model, ids(model, text)) for text in ("The tide", "The harbour empties twice")]

    together = Steer(vector)(stack(alone))

    for row, each in enumerate(alone):
        for new, old in zip(blocks(together), blocks(Steer(vector)(each)), strict=True):
            torch.testing.assert_close(new[row, :, -1], old[0, :, -1])


def test_content_keys_are_steered_as_they_are(cache: KVCache, vector: CacheVector) -> None:
    steered = Steer(vector)(cache.content())

    assert steered.keys_are == "content"
    torch.testing.assert_close(steered.keys[2][0, :, -1] - cache.content().keys[2][0, :, -1],
                               vector.keys[2], atol=1e-5, rtol=1e-5)  # fmt: skip


def test_half_precision_is_rounded_once(cache: KVCache, vector: CacheVector) -> None:
    half = cache.to(dtype=torch.bfloat16)

    steered = Steer(vector, 1 / 3)(half)

    wanted = (half.values[2][0, :, -1].float() + vector.values[2] / 3).bfloat16()
    assert torch.equal(steered.values[2][0, :, -1], wanted)


# What cannot be


@pytest.mark.parametrize("name", ["strength", "key_strength", "value_strength"])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_strength_that_is_no_number_is_refused(
    vector: CacheVector, name: str, wrong: float
) -> None:
    given: Any = {name: wrong}
    with pytest.raises(SteeringError, match=f"{name} is (nan|inf)"):
        Steer(vector, **given)


def test_the_vector_of_another_model_is_refused(other: LanguageModel, vector: CacheVector) -> None:
    cache = prefill(other, ids(other, "The tide"))

    with pytest.raises(IncompatibleModels, match="and this vector is for") as caught:
        Steer(vector)(cache)
    assert str(other.spec.identity) in caught.value.message
    assert str(vector.identity) in caught.value.message
    with pytest.raises(IncompatibleModels):
        Steer(vector, 0.0)(cache)  # also where it would add nothing


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"num_hidden_layers": 2}, "the cache has 2 layers, the vector 4"),
        ({"num_key_value_heads": 4}, "the cache has keys of 4 × 16 .* the vector keys of 2 × 16"),
        ({"head_dim": 8}, "the cache has keys of 2 × 8"),
    ],
)
def test_a_vector_of_another_size_is_refused(
    tiny: Tiny, vector: CacheVector, config: dict[str, int], said: str
) -> None:
    model = tiny("llama", **config)
    cache = replace(prefill(model, ids(model, "The tide")), model=None)  # nobody says whose it is

    with pytest.raises(SteeringError, match=said):
        Steer(vector)(cache)


def test_a_layer_or_token_that_is_not_there_is_refused(cache: KVCache, vector: CacheVector) -> None:
    with pytest.raises(SteeringError, match="no layer 9"):
        Steer(vector, layers="9")(cache)
    with pytest.raises(SteeringError, match="choose none"):
        Steer(vector, tokens=(500, None))(cache)


def test_keys_that_nobody_knows_how_to_turn_are_refused(
    cache: KVCache, vector: CacheVector
) -> None:
    with pytest.raises(RotationError, match="no record"):
        Steer(vector)(replace(cache, rotations=None))
    Steer(vector, key_strength=0.0)(replace(cache, rotations=None))
