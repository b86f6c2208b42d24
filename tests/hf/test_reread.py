"""Tokens read again in the midst of a cache come out as in a prefill of all of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

from kvtransfer.errors import CacheLayoutError, IncompatibleModels, RotationError, UnsupportedModel
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.reread import first_layers, reread
from kvtransfer.hf.run import prefill, score
from tests.hf.architectures import MODELS
from tests.theorems.compare import cache_error, is_still, snapshot
from tests.theorems.ropes import LONGROPE

IDS = torch.randint(3, 500, (2, 24), generator=torch.Generator().manual_seed(0))
OTHER = IDS.flip(1)
ALL = torch.arange(24).expand(2, -1)
SOME = torch.tensor([[0, 3, 4, 9, 17], [1, 2, 12, 20, 23]])


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tiny: Callable[..., LanguageModel]) -> LanguageModel:
    architecture, config = MODELS[request.param]
    return tiny(architecture, **config)


@pytest.fixture
def llama(tiny: Callable[..., LanguageModel]) -> LanguageModel:
    return tiny("llama")


def test_all_tokens_of_any_cache_make_a_prefill_and_some_leave_an_exact_one(
    model: LanguageModel,
) -> None:
    right, wrong = prefill(model, IDS), prefill(model, OTHER)
    before = snapshot(wrong)

    assert cache_error(reread(model, IDS, wrong, ALL), right) < 1e-5
    assert cache_error(reread(model, IDS, right, SOME), right) < 1e-5
    # The twin: among wrong tokens, a few come out wrong.
    assert cache_error(reread(model, IDS, wrong, SOME), right) > 0.1
    assert is_still(wrong, before)


def test_tokens_that_saw_nothing_wrong_come_out_right(model: LanguageModel) -> None:
    right, wrong = prefill(model, IDS), prefill(model, OTHER)
    chosen = torch.tensor([[0, 1, 2, 3, 10]]).expand(2, -1)

    made = reread(model, IDS, wrong, chosen)

    for ours, theirs, old in zip(made.keys, right.keys, wrong.keys, strict=True):
        torch.testing.assert_close(ours[:, :, :4], theirs[:, :, :4], atol=1e-4, rtol=1e-4)
        untouched = [i for i in range(24) if i not in (0, 1, 2, 3, 10)]
        assert torch.equal(ours[:, :, untouched], old[:, :, untouched])
    late = made.keys[-1][:, :, 10] - right.keys[-1][:, :, 10]
    assert late.abs().max() > 0.1  # it attended to six wrong tokens


@pytest.mark.parametrize("after", [0, 7])
def test_first_layers_are_those_of_a_prefill(model: LanguageModel, after: int) -> None:
    right, wrong = prefill(model, IDS), prefill(model, OTHER)
    given = replace(
        wrong,
        keys=tuple(
            torch.cat((r[:, :, :after], w[:, :, after:]), 2)
            for r, w in zip(right.keys, wrong.keys, strict=True)
        ),
        values=tuple(
            torch.cat((r[:, :, :after], w[:, :, after:]), 2)
            for r, w in zip(right.values, wrong.values, strict=True)
        ),
    )

    begun = first_layers(model, IDS, given, after=after, last=1)

    for layer in (0, 1):
        torch.testing.assert_close(begun.keys[layer], right.keys[layer], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(begun.values[layer], right.values[layer], atol=1e-4, rtol=1e-4)
    assert all(map(torch.equal, begun.keys[2:], given.keys[2:]))
    assert all(map(torch.equal, begun.values[2:], given.values[2:]))


def test_the_model_and_its_masks_are_as_they_were(llama: LanguageModel) -> None:
    before, right = score(llama, IDS), prefill(llama, IDS)

    reread(llama, IDS, right, SOME)
    with pytest.raises(CacheLayoutError):
        reread(llama, IDS[:, :5], right, SOME)

    assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is sdpa_mask
    assert torch.equal(score(llama, IDS), before)


def test_a_mask_function_of_the_users_own_is_asked_and_put_back(llama: LanguageModel) -> None:
    calls: list[int] = []

    def own(*given: Any, **named: Any) -> Any:
        calls.append(1)
        return sdpa_mask(*given, **named)

    right = prefill(llama, IDS)
    ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] = own
    try:
        assert cache_error(reread(llama, IDS, right, SOME), right) < 1e-5
        assert calls
        assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is own
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]


def test_a_model_that_masks_by_itself_is_found_out(tiny: Callable[..., LanguageModel]) -> None:
    model = tiny(
        "gpt_neo",
        num_layers=4,
        attention_types=[[["global", "local"], 2]],
        window_size=8,
        num_heads=4,
    )
    right = prefill(model, IDS)

    with pytest.raises(UnsupportedModel, match=r"attention.bias is a mask of its own") as caught:
        reread(model, IDS, right, SOME)

    assert "prefill" in str(caught.value.hint)


def test_layers_that_do_not_come_out_as_they_went_in_are_found_out(llama: LanguageModel) -> None:
    right = prefill(llama, IDS)
    spoiled = replace(right, keys=(right.keys[0], right.keys[1] + 1, *right.keys[2:]))

    assert cache_error(reread(llama, IDS, right, SOME, right=4), right) < 1e-5
    with pytest.raises(UnsupportedModel, match="layer 1 comes out otherwise"):
        reread(llama, IDS, spoiled, SOME, right=2)


def test_attention_that_takes_no_mask_is_refused_by_name(llama: LanguageModel) -> None:
    right = prefill(llama, IDS)
    config: Any = llama.module.config
    ALL_MASK_ATTENTION_FUNCTIONS["blind"] = lambda **named: None
    before = config._attn_implementation
    type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping["blind"] = lambda **named: None
    config._attn_implementation = "blind"
    try:
        with pytest.raises(UnsupportedModel, match="blind takes none that says it token by token"):
            reread(llama, IDS, right, SOME)
        config._attn_implementation = "unheard-of"
        with pytest.raises(UnsupportedModel, match="transformers makes none for unheard-of"):
            reread(llama, IDS, right, SOME)
    finally:
        config._attn_implementation = before
        del ALL_MASK_ATTENTION_FUNCTIONS["blind"]
        del type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping["blind"]


def test_a_table_that_depends_on_the_length_is_refused_beyond_it(
    tiny: Callable[..., LanguageModel],
) -> None:
    model = tiny("llama", rope_parameters=LONGROPE)
    ids = torch.arange(140)[None] % 500 + 3
    short = prefill(model, ids[:, :128])
    chosen = torch.tensor([[3, 50]])
    assert cache_error(reread(model, ids[:, :128], short, chosen), short) < 1e-5

    with pytest.raises(RotationError, match=r"longrope\) beyond 128 tokens, and .* ends at 140"):
        reread(model, ids, prefill(model, ids), chosen)


def moved(cache: KVCache) -> KVCache:
    return replace(cache, positions=cache.positions.flip(1))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda c: c.prefix(20), CacheLayoutError, r"ids of shape \(2, 24\), and a cache of"),
        (KVCache.content, CacheLayoutError, "content keys"),
        (moved, CacheLayoutError, "order of their positions"),
        (lambda c: replace(c, model="abc/def"), IncompatibleModels, "abc/def"),
        (lambda c: c.to(dtype=torch.bfloat16), CacheLayoutError, "bfloat16"),
    ],
    ids=["other tokens", "content", "order", "another model's", "dtype"],
)
def test_a_cache_that_does_not_belong_is_refused(
    llama: LanguageModel,
    change: Callable[[KVCache], KVCache],
    error: type[Exception],
    says: str,
) -> None:
    with pytest.raises(error, match=says):
        reread(llama, IDS, change(prefill(llama, IDS)), SOME)
