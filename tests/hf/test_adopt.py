"""A cache from outside is taken in as it is, or refused by name; never misread."""

from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    BatchFeature,
    DynamicCache,
    EncoderDecoderCache,
    QuantizedCache,
    StaticCache,
)

from kvtransfer.errors import CacheLayoutError, IncompatibleModels
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.adopt import adopt
from kvtransfer.hf.call import cache_keyword
from kvtransfer.hf.model import LanguageModel, wrap
from kvtransfer.hf.run import prefill, score

TOKENS = 20
IDS = torch.arange(5, 5 + 3 * TOKENS, 3)[None]
Change = Callable[[Any], Any]


def filled(model: LanguageModel, cache: Any, ids: Tensor = IDS) -> Any:
    """``cache`` after transformers itself has read ``ids`` into it."""
    with torch.no_grad():
        model.module(ids, **{cache_keyword(model.module.forward): cache})
    return cache


def pairs(model: LanguageModel) -> list[tuple[Tensor, Tensor]]:
    """Keys and values a layer, as any code may have kept them."""
    return [(keys.clone(), values.clone()) for keys, values in prefill(model, IDS)]


def same(found: KVCache, own: KVCache) -> bool:
    blocks = zip((*found.keys, *found.values), (*own.keys, *own.values), strict=True)
    return all(torch.allclose(a, b, atol=1e-5) for a, b in blocks)


FORMS: dict[str, Callable[[LanguageModel], Any]] = {
    "dynamic": lambda m: filled(m, DynamicCache()),
    "dynamic by config": lambda m: filled(m, DynamicCache(config=m.module.config)),
    "static": lambda m: filled(m, StaticCache(config=m.module.config, max_cache_len=64)),
    "tuple of tuples": lambda m: tuple(pairs(m)),
    "list of lists": lambda m: [list(pair) for pair in pairs(m)],
    "iterated": lambda m: list(filled(m, DynamicCache())),
    "stacked": lambda m: [torch.stack(pair) for pair in pairs(m)],
    "old object": lambda m: SimpleNamespace(
        key_cache=[k for k, _ in pairs(m)], value_cache=[v for _, v in pairs(m)]
    ),
    "old object as a mapping": lambda m: BatchFeature(
        {"key_cache": [k for k, _ in pairs(m)], "value_cache": [v for _, v in pairs(m)]}
    ),
    "model output": lambda m: UserDict(past_key_values=filled(m, DynamicCache())),
    "output of an old model": lambda m: {"past_key_values": tuple(pairs(m)), "logits": None},
    "layered by hand": lambda m: DynamicCache(pairs(m)),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_same_cache_is_read_alike(model: LanguageModel, form: str) -> None:
    own = prefill(model, IDS)

    found = adopt(model, FORMS[form](model), IDS)

    assert same(found, own)
    assert found.model == model.spec.identity
    assert found.note is None
    live = IDS[:, :4]
    torch.testing.assert_close(score(model, live, found), score(model, live, own))
    torch.testing.assert_close(found.content().keys, own.content().keys)


def test_an_adopted_cache_shares_no_memory_with_what_it_was_read_from(model: LanguageModel) -> None:
    outside = pairs(model)
    found = adopt(model, outside, IDS)

    for keys, values in outside:
        keys.zero_()
        values.zero_()

    assert same(found, prefill(model, IDS))
    found.require_unchanged()


def test_a_quantised_cache_is_dequantised_and_says_so(model: LanguageModel) -> None:
    outside = filled(model, QuantizedCache("fp8", model.module.config))
    before = outside.get_seq_length()

    found = adopt(model, outside, IDS)

    assert found.note == "dequantised from a Fp8QuantizedLayer"
    assert found.note in repr(found)
    assert found.content().note == found.note
    own = prefill(model, IDS)
    for near, exact in zip((*found.keys, *found.values), (*own.keys, *own.values), strict=True):
        assert 1e-4 < (near - exact).norm() / exact.norm() < 0.06  # three bits of mantissa
    assert outside.get_seq_length() == before  # reading counts nothing


def test_a_quantised_cache_of_another_text_is_refused_all_the_same(model: LanguageModel) -> None:
    outside = filled(model, QuantizedCache("fp8", model.module.config), IDS.flip(1))

    with pytest.raises(CacheLayoutError, match="are not what"):
        adopt(model, outside, IDS)


def test_a_static_cache_that_ran_on_is_read_to_its_length(model: LanguageModel) -> None:
    outside = StaticCache(config=model.module.config, max_cache_len=64)
    filled(model, outside, IDS[:, :12])
    filled(model, outside, IDS[:, 12:])

    assert same(adopt(model, outside, IDS), prefill(model, IDS))


def test_a_prefix_at_other_positions_is_adopted_there(model: LanguageModel) -> None:
    outside, positions = DynamicCache(), torch.arange(40, 40 + TOKENS)[None]
    with torch.no_grad():
        model.module(
            IDS,
            position_ids=positions,
            attention_mask=torch.ones_like(IDS),
            **{cache_keyword(model.module.forward): outside},
        )

    found = adopt(model, outside, IDS, start=40)

    assert torch.equal(found.positions, positions)
    torch.testing.assert_close(
        found.content().keys[0], prefill(model, IDS).content().keys[0], atol=1e-5, rtol=1e-5
    )
    with pytest.raises(CacheLayoutError, match="keys of layer 0 are not what"):
        adopt(model, outside, IDS)


def every(change: Callable[[Tensor], Tensor]) -> Change:
    """The same change to every block of a list of pairs."""
    return lambda layers: [(change(keys), change(values)) for keys, values in layers]


def only_keys(change: Callable[[Tensor], Tensor]) -> Change:
    return lambda layers: [(change(keys), values) for keys, values in layers]


def hand_built(layers: list[tuple[Tensor, Tensor]]) -> DynamicCache:
    """Layers with their tensors put in by hand, so that they say they hold nothing."""
    cache = DynamicCache([(keys[:, :, :1], values[:, :, :1]) for keys, values in layers])
    inside: Any = cache.layers
    for layer, (keys, values) in zip(inside, layers, strict=True):
        layer.keys, layer.values, layer.is_initialized = keys, values, False
    return cache


MISTAKES: dict[str, tuple[Change, str]] = {
    "none at all": (lambda layers: None, "there is no cache: None"),
    "a number": (lambda layers: 7, "a int is no cache"),
    "a text": (lambda layers: "cache", "a str is no cache"),
    "an empty tuple": (lambda layers: (), "this cache is empty"),
    "an empty mapping": (lambda layers: {}, "a dict is no cache"),
    "a mapping of its own kind": (lambda layers: dict(enumerate(layers)), "a dict is no cache"),
    "an encoder-decoder's": (
        lambda layers: EncoderDecoderCache(DynamicCache(), DynamicCache()),
        "EncoderDecoderCache holds two",
    ),
    "an old encoder-decoder's": (lambda layers: [(*p, *p) for p in layers], "of 4 parts"),
    "keys alone": (lambda layers: [keys for keys, _ in layers], "layer 0 is a Tensor of 1 parts"),
    "an old object with a layer too many": (
        lambda layers: SimpleNamespace(
            key_cache=[k for k, _ in layers], value_cache=[v for _, v in layers[1:]]
        ),
        "key_cache has 2 layers, value_cache 1",
    ),
    "a layer more than the model has": (
        lambda layers: [*layers, layers[0]],
        r"has 3 layers, .* has 2",
    ),
    "a layer that was never run": (
        lambda layers: [layers[0], ([], [])],
        r"layer 1 \(legacy\) holds no keys",
    ),
    "layers that report no tokens": (hand_built, "holds 20 tokens and says that it holds 0"),
    "heads for tokens": (every(lambda b: b.transpose(1, 2)), r"looks like \(batch, tokens"),
    "three dims": (every(lambda b: b[0]), r"of shape \(2, 20, 16\)"),
    "integers": (every(lambda b: (100 * b).to(torch.int8)), "are torch.int8 of shape"),
    "another dtype": (every(lambda b: b.bfloat16()), r"is torch.bfloat16, .* in torch.float32"),
    "keys and values of two dtypes": (only_keys(lambda b: b.double()), "several dtypes"),
    "a token less": (every(lambda b: b[:, :, 1:]), r"shape \(1, 2, 19, 16\)"),
    "a token more": (every(lambda b: torch.cat((b, b[:, :, :1]), 2)), r"shape \(1, 2, 21, 16\)"),
    "a head less": (every(lambda b: b[:, :1]), "layer 0: 1 heads"),
    "halves of heads": (every(lambda b: b[..., :8]), "8 key dims"),
    "another batch": (every(lambda b: b.repeat(2, 1, 1, 1)), r"shape \(2, 2, 20, 16\)"),
    "other layers' order": (lambda layers: layers[::-1], "keys of layer 0 are not what"),
    "keys as values": (lambda layers: [p[::-1] for p in layers], "keys of layer 0 are not what"),
    "bits of another dtype": (
        every(lambda b: b.half().view(torch.bfloat16).float()),
        "keys of layer 0 are not what",
    ),
    "not a number": (
        only_keys(lambda b: torch.full_like(b, float("nan"))),
        "keys of layer 0 are not all finite",
    ),
    "tokens out of order": (every(lambda b: b.flip(2)), "keys of layer 0 are not what"),
    "one token exchanged far behind": (
        every(lambda b: torch.cat((b[:, :, :-1], b[:, :, :1]), 2)),
        "keys of layer 0 are not what",
    ),
    "the second layer's values": (
        lambda layers: [layers[0], (layers[1][0], layers[1][1] + layers[0][1])],
        "values of layer 1 are not what",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_not_this_models_cache_is_refused_by_name(
    model: LanguageModel, mistake: str
) -> None:
    change, says = MISTAKES[mistake]

    with pytest.raises(CacheLayoutError, match=says) as caught:
        adopt(model, change(pairs(model)), IDS)

    assert caught.value.hint


def test_a_layout_with_as_many_heads_as_tokens_is_refused_though_its_shape_fits(
    model: LanguageModel,
) -> None:
    ids = IDS[:, :2]  # two tokens, two heads
    right = [tuple(pair) for pair in prefill(model, ids)]
    wrong = [(keys.transpose(1, 2), values.transpose(1, 2)) for keys, values in right]
    assert all(torch.Size([1, 2, 2, 16]) == block.shape for pair in wrong for block in pair)

    assert same(adopt(model, right, ids), prefill(model, ids))
    with pytest.raises(CacheLayoutError, match="keys of layer 0 are not what") as caught:
        adopt(model, wrong, ids)

    assert "laid out" in str(caught.value.hint)


def test_keys_rotated_twice_or_not_at_all_are_refused(model: LanguageModel) -> None:
    own = prefill(model, IDS)
    assert own.rotations is not None
    twice = tuple(r.apply(k) for r, k in zip(own.rotations, own.keys, strict=True) if r is not None)

    for keys in (twice, own.content().keys):
        with pytest.raises(CacheLayoutError, match="keys of layer 0 are not what") as caught:
            adopt(model, list(zip(keys, own.values, strict=True)), IDS)
        assert "rotated twice or not at all" in str(caught.value.hint)


def test_a_siblings_cache_is_refused_though_it_has_the_same_shape(
    model: LanguageModel, tiny: Callable[..., LanguageModel]
) -> None:
    sibling = tiny("llama", num_hidden_layers=2, seed=5)

    with pytest.raises(CacheLayoutError, match="another model's") as caught:
        adopt(model, pairs(sibling), IDS)

    assert model.spec.name in caught.value.message


def test_a_window_that_forgot_is_refused_with_both_lengths(
    tiny: Callable[..., LanguageModel],
) -> None:
    model = tiny("mistral", num_hidden_layers=2, sliding_window=8)
    config = model.module.config

    kept = adopt(model, filled(model, DynamicCache()), IDS)
    assert same(kept, prefill(model, IDS))

    for forgetful, held in (
        (DynamicCache(config=config), 7),
        (StaticCache(config=config, max_cache_len=64), 8),
    ):
        with pytest.raises(CacheLayoutError, match=f"it holds {held} of 20 tokens") as caught:
            adopt(model, filled(model, forgetful), IDS)
        assert "plain DynamicCache()" in str(caught.value.hint)


def test_a_padded_batch_is_refused(model: LanguageModel) -> None:
    ids, mask = IDS.repeat(2, 1), torch.ones(2, TOKENS, dtype=torch.long)
    outside = filled(model, DynamicCache(), ids)
    assert adopt(model, outside, ids, mask=mask).batch == 2

    mask[1, :3] = 0

    with pytest.raises(CacheLayoutError, match=r"lets \[20, 17\] tokens through"):
        adopt(model, outside, ids, mask=mask)


def test_a_state_is_no_cache(model: LanguageModel) -> None:
    config = AutoConfig.for_model(
        "qwen3_next", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
    )

    with pytest.raises(CacheLayoutError, match=r"layer 0 \(LinearAttentionLayer\) holds no keys"):
        adopt(model, DynamicCache(config=config), IDS)


def test_a_cache_turned_by_the_long_table_is_adopted(tiny: Callable[..., LanguageModel]) -> None:
    from tests.theorems.ropes import LONGROPE

    model = tiny("llama", num_hidden_layers=2, rope_parameters=LONGROPE)
    ids = torch.arange(200)[None] % 500 + 3  # beyond the 128 tokens of the short table

    found = adopt(model, filled(model, DynamicCache(), ids), ids)

    assert same(found, prefill(model, ids))


def test_an_unsigned_cache_is_not_read_on(model: LanguageModel) -> None:
    """By hand, anything can be called a cache; only what was seen to be the model's is read."""
    own = prefill(model, IDS)
    by_hand = KVCache(keys=own.keys, values=own.values, positions=own.positions, keys_are="cached")

    with pytest.raises(IncompatibleModels, match="does not say which model") as caught:
        score(model, IDS[:, :3], by_hand)

    assert "adopt(model, cache, ids)" in str(caught.value.hint)


def test_wrapping_a_bfloat16_model_compares_as_loosely_as_its_numbers_are(
    model: LanguageModel,
) -> None:
    from copy import deepcopy

    narrow = wrap(deepcopy(model.module).bfloat16(), model.tokenizer)

    found = adopt(narrow, filled(narrow, DynamicCache()), IDS)

    assert found.dtype == torch.bfloat16
    with pytest.raises(CacheLayoutError, match="are not what"):
        adopt(narrow, filled(narrow, DynamicCache(), IDS.flip(1)), IDS)


def test_the_whole_text_can_be_read_again(model: LanguageModel) -> None:
    """Deep layers of late tokens are taken on trust, unless one asks."""
    own = prefill(model, IDS)
    late = [block.clone() for block in own.values]
    late[1][:, :, 15] += 1.0
    outside = list(zip(own.keys, late, strict=True))

    assert adopt(model, outside, IDS).tokens == TOKENS
    with pytest.raises(CacheLayoutError, match="values of layer 1 are not what"):
        adopt(model, outside, IDS, whole=True)
    assert same(adopt(model, list(own), IDS, whole=True), own)


def test_beyond_a_switch_over_every_layer_is_compared(tiny: Callable[..., LanguageModel]) -> None:
    from tests.theorems.ropes import LONGROPE

    model = tiny("llama", num_hidden_layers=3, rope_parameters=LONGROPE)
    ids = torch.arange(150)[None] % 500 + 3
    first, second, third = prefill(model, ids)

    with pytest.raises(CacheLayoutError, match="keys of layer 1 are not what"):
        adopt(model, [first, third, second], ids)


def test_one_wrong_row_of_a_batch_is_enough(model: LanguageModel) -> None:
    ids = torch.cat([IDS.roll(i, 1) for i in range(16)])
    outside = [(k.clone(), v.clone()) for k, v in prefill(model, ids)]
    for keys, values in outside:
        keys[7] *= 1.05
        values[7] *= 1.05

    with pytest.raises(CacheLayoutError, match="keys of layer 0 are not what"):
        adopt(model, outside, ids)


def test_a_value_is_adopted_as_it_is(model: LanguageModel) -> None:
    own = prefill(model, IDS)

    assert same(adopt(model, own, IDS), own)
    with pytest.raises(CacheLayoutError, match="content keys"):
        adopt(model, own.content(), IDS)
