"""Reading copies out, writing copies in; what holds no keys and values is refused by its layer."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, DynamicCache

from kvtransfer.errors import CacheLayoutError
from kvtransfer.hf.cache import read, write
from kvtransfer.hf.call import cache_keyword
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill

IDS = torch.arange(3, 15)[None]


def run(model: LanguageModel, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    with torch.no_grad():
        logits = model.module(ids, **{cache_keyword(model.module.forward): cache}).logits
    assert isinstance(logits, torch.Tensor)
    return logits


def zero(cache: DynamicCache) -> None:
    layers: Any = cache.layers
    for layer in layers:
        layer.keys.zero_()
        layer.values.zero_()


def test_decoding_on_does_not_change_what_was_read(model: LanguageModel) -> None:
    live = DynamicCache()
    run(model, IDS, live)
    positions = torch.arange(12)[None]
    value = read(live, positions)
    before = [block.clone() for block in (*value.keys, *value.values)]

    zero(live)
    run(model, IDS[:, :1], live)

    assert value.tokens == 12
    assert all(map(torch.equal, (*value.keys, *value.values), before))


def test_decoding_on_a_written_cache_does_not_change_the_value(model: LanguageModel) -> None:
    value = prefill(model, IDS)
    before = [block.clone() for block in (*value.keys, *value.values)]

    live = write(value)
    run(model, IDS[:, :2], live)
    zero(live)

    assert live.get_seq_length() == 14
    assert all(map(torch.equal, (*value.keys, *value.values), before))


def test_what_is_read_is_what_is_written(model: LanguageModel) -> None:
    value = prefill(model, IDS)

    again = read(write(value), value.positions)

    assert all(map(torch.equal, (*again.keys, *again.values), (*value.keys, *value.values)))
    assert again.keys_are == "cached"


def test_content_keys_cannot_be_written(model: LanguageModel) -> None:
    with pytest.raises(CacheLayoutError, match="carry no positions") as caught:
        write(prefill(model, IDS).content())

    assert "rotat" in str(caught.value.hint)


def test_an_empty_cache_cannot_be_read() -> None:
    with pytest.raises(CacheLayoutError, match="cache is empty"):
        read(DynamicCache(), torch.arange(0)[None])


def test_a_layer_that_keeps_a_state_is_refused_by_its_number() -> None:
    config = AutoConfig.for_model(
        "qwen3_next", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]
    )

    with pytest.raises(CacheLayoutError, match=r"layer 0 .* holds no keys and values") as caught:
        read(DynamicCache(config=config), torch.arange(4)[None])

    assert "state" in str(caught.value.hint)


def test_a_window_that_forgot_tokens_is_refused_with_both_lengths(model: LanguageModel) -> None:
    live = DynamicCache()
    run(model, IDS, live)
    second: Any = live.layers[1]
    second.keys, second.values = second.keys[:, :, -8:], second.values[:, :, -8:]

    with pytest.raises(CacheLayoutError, match=r"layer 1 .* shape \(1, 2, 8, 16\), for 12"):
        read(live, torch.arange(12)[None])
