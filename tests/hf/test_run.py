"""A model reads on from a prefix as it reads the whole, and refuses one that is not its own."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvtransfer.errors import CacheLayoutError, IncompatibleModels
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.fits import check_fits, check_padding
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import generate, prefill, score

IDS = torch.randint(3, 500, (1, 20), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("cut", [1, 7, 19])
def test_reading_on_from_a_prefix_is_reading_the_whole(model: LanguageModel, cut: int) -> None:
    whole = score(model, IDS)

    rest = score(model, IDS[:, cut:], prefill(model, IDS[:, :cut]))

    torch.testing.assert_close(rest, whole[:, cut:], rtol=1e-4, atol=1e-4)


def test_a_prefix_may_be_used_again(model: LanguageModel) -> None:
    prefix = prefill(model, IDS)

    first, second = score(model, IDS[:, :4], prefix), score(model, IDS[:, :4], prefix)

    assert torch.equal(first, second)


def test_a_prefix_matters(model: LanguageModel) -> None:
    zeroed = prefill(model, IDS).map(torch.zeros_like)

    own, other = (score(model, IDS[:, :4], each) for each in (prefill(model, IDS), zeroed))

    assert float((own - other).abs().max()) > 0.1


def test_expanded_prefixes_read_each_row_by_itself(model: LanguageModel) -> None:
    prefix, live = prefill(model, IDS), torch.stack((IDS[0, :5], IDS[0, 5:10]))

    together = score(model, live, prefix.expand(2))

    for row in range(2):
        alone = score(model, live[row : row + 1], prefix)
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-4, atol=1e-4)


def test_nothing_live_is_refused_for_a_cache_holds_no_logits(model: LanguageModel) -> None:
    for prefix in (None, prefill(model, IDS)):
        with pytest.raises(CacheLayoutError, match="no live tokens") as caught:
            score(model, IDS[:, :0], prefix)
        assert "last prompt token" in str(caught.value.hint)


def test_an_empty_prefix_is_refused(model: LanguageModel) -> None:
    with pytest.raises(CacheLayoutError, match="empty prefix"):
        prefill(model, IDS[:, :0])


def test_more_tokens_than_the_model_has_positions_for_are_refused_with_both_numbers(
    tiny: Callable[..., LanguageModel],
) -> None:
    short = tiny("llama", num_hidden_layers=1, max_position_embeddings=24)
    prefix = prefill(short, IDS)

    with pytest.raises(CacheLayoutError, match=r"30 tokens, .* at most 24"):
        prefill(short, IDS.repeat(1, 2)[:, :30])
    with pytest.raises(CacheLayoutError, match=r"25 tokens, .* at most 24"):
        score(short, IDS[:, :5], prefix)
    assert score(short, IDS[:, :4], prefix).shape[1] == 4


def test_a_model_takes_its_own_cache(model: LanguageModel) -> None:
    check_fits(model, prefill(model, IDS))


def anonymous(cache: KVCache, **changed: object) -> KVCache:
    return replace(cache, model=None, rotations=None, **changed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda c: anonymous(c, keys=c.keys[:1], values=c.values[:1]),
            r"this cache has 1 layers, .* has 2",
        ),
        (
            lambda c: anonymous(
                c, keys=tuple(k[:, :1] for k in c.keys), values=tuple(v[:, :1] for v in c.values)
            ),
            r"layer 0: 1 heads × 16 key dims .* in the cache, 2 × 16",
        ),
        (
            lambda c: anonymous(c, keys=tuple(k[..., :8] for k in c.keys)),
            r"layer 0: 2 heads × 8 key dims and 2 × 16 value dims in the cache",
        ),
        (
            lambda c: anonymous(c, values=(c.values[0], c.values[1][..., :8])),
            r"layer 1: .* 2 × 8 value dims in the cache",
        ),
        (
            lambda c: anonymous(c).to(dtype=torch.bfloat16),
            r"this cache is torch.bfloat16, .* runs in torch.float32",
        ),
    ],
    ids=["layers", "heads", "key dim", "value dim", "dtype"],
)
def test_a_cache_of_another_shape_is_refused_with_both_values(
    model: LanguageModel, change: Callable[[KVCache], KVCache], says: str
) -> None:
    with pytest.raises(CacheLayoutError, match=says) as caught:
        score(model, IDS[:, :3], change(prefill(model, IDS)))

    assert caught.value.hint


def test_a_siblings_cache_is_refused_though_it_has_the_same_shape(
    model: LanguageModel, tiny: Callable[..., LanguageModel]
) -> None:
    sibling = tiny("llama", num_hidden_layers=2, seed=5)

    with pytest.raises(IncompatibleModels) as caught:
        score(model, IDS[:, :3], prefill(sibling, IDS))

    for fingerprint in (model.spec.weights, sibling.spec.weights):
        assert str(fingerprint) in caught.value.message
    assert "mapping(cache)" in str(caught.value.hint)


def test_content_keys_are_refused(model: LanguageModel) -> None:
    with pytest.raises(CacheLayoutError, match="carry no positions"):
        score(model, IDS[:, :3], prefill(model, IDS).content())


def test_generating_is_taking_the_best_token_again_and_again(model: LanguageModel) -> None:
    prefix, live = prefill(model, IDS[:, :12]), IDS[0, 12:]

    written = list(generate(model, live, prefix, max_new_tokens=6))

    text = IDS[0].tolist()
    for token in written:
        assert token == int(score(model, torch.tensor([text]))[0, -1].argmax())
        text.append(token)
    assert (
        len(written) == 6
        or int(score(model, torch.tensor([text]))[0, -1].argmax()) == model.tokenizer.eos_token_id
    )
    assert list(generate(model, live, prefix, max_new_tokens=6)) == written


def test_generating_stops_at_the_end_of_the_sequence(
    tiny: Callable[..., LanguageModel],
) -> None:
    model = tiny("llama", num_hidden_layers=1)
    first = next(generate(model, IDS[0], max_new_tokens=1))
    model.module.generation_config.eos_token_id = first

    assert list(generate(model, IDS[0], max_new_tokens=5)) == []


def test_generating_nothing_gives_nothing(model: LanguageModel) -> None:
    assert list(generate(model, IDS[0], max_new_tokens=0)) == []


@pytest.mark.parametrize(
    ("architecture", "here", "there"),
    [
        ("mistral", {"sliding_window": 8}, {"sliding_window": 512}),
        ("qwen3", {"rms_norm_eps": 1e-6}, {"rms_norm_eps": 0.1}),
        ("llama", {"hidden_act": "silu"}, {"hidden_act": "gelu"}),
    ],
)
def test_the_same_weights_under_another_config_are_another_model(
    tiny: Callable[..., LanguageModel],
    architecture: str,
    here: dict[str, Any],
    there: dict[str, Any],
) -> None:
    one, other = (tiny(architecture, num_hidden_layers=2, **config) for config in (here, there))
    assert one.spec.weights == other.spec.weights

    with pytest.raises(IncompatibleModels, match="fingerprint") as caught:
        score(other, IDS[:, :3], prefill(one, IDS))

    assert "config computes otherwise" in str(caught.value.hint)


def test_the_same_weights_under_another_rope_are_another_model(
    tiny: Callable[..., LanguageModel],
) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    one = tiny("llama", num_hidden_layers=2)
    other = tiny("llama", num_hidden_layers=2, rope_parameters=yarn)
    cache = prefill(one, IDS)

    with pytest.raises(IncompatibleModels):
        score(other, IDS[:, :3], cache)
    with pytest.raises(CacheLayoutError, match="keys of layer 0 were turned otherwise"):
        score(other, IDS[:, :3], replace(cache, model=other.spec.weights))


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_is_refused_with_the_padding_of_each_row(
    model: LanguageModel, tiny: Callable[..., LanguageModel], side: str
) -> None:
    padded = tiny("llama", num_hidden_layers=2)
    padded = replace(padded, tokenizer=deepcopy(padded.tokenizer))
    padded.tokenizer.pad_token = padded.tokenizer.eos_token  # as most small models have it
    padded.tokenizer.padding_side = side
    rows = [[5, 6, 7, 8], [9, 10]]
    batch = padded.tokenizer.pad({"input_ids": rows}, return_tensors="pt")["input_ids"]

    for run in (lambda: prefill(padded, batch), lambda: score(padded, batch)):
        with pytest.raises(CacheLayoutError, match=r"with \[0, 2\] padding tokens"):
            run()
    check_padding(padded, batch, torch.ones_like(batch))  # a mask says better what is padding
    # A text that ends, or begins after another, is not padded.
    for texts in ([[5, 6, 7, 0], [9, 10, 11, 12]], [[0, 6, 7, 5], [9, 10, 11, 12]]):
        assert prefill(padded, torch.tensor(texts)).batch == 2
    assert prefill(model, batch).batch == 2  # its tokenizer pads with nothing
