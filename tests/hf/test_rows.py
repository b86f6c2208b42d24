"""Padding is hidden, or it is refused: nobody reads it as if it were tokens."""

from typing import Any

import pytest
import torch
from torch import Tensor

from kvtransfer.errors import CacheLayoutError
from kvtransfer.fitting.ends import check_cache
from kvtransfer.geometry.cache import KVCache
from kvtransfer.geometry.join import stack
from kvtransfer.hf.adopt import adopt
from kvtransfer.hf.cache import write
from kvtransfer.hf.graft import grafted
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.relocate import relocate
from kvtransfer.hf.run import prefill, score

IDS = torch.arange(5, 65, 3)[None]
LIVE = IDS[:, 12:].repeat(2, 1)


@pytest.fixture
def whole(model: LanguageModel) -> KVCache:
    return stack([prefill(model, IDS[:, :12]), prefill(model, IDS[:, 3:8])])


def test_forward_hides_padding_by_itself_step_by_step(model: LanguageModel, whole: KVCache) -> None:
    module: Any = model.module
    right = score(model, LIVE, whole)

    with grafted(model, whole) as cache, torch.no_grad():
        first = module(LIVE[:, :5], cache=cache).logits
        rest = [module(LIVE[:, i : i + 1], cache=cache).logits for i in range(5, 8)]

    torch.testing.assert_close(torch.cat((first, *rest), dim=1), right, atol=1e-4, rtol=1e-4)


def shown(whole: KVCache, live: int = 8) -> Tensor:
    return torch.cat((whole.mask, torch.ones(2, live, dtype=torch.long)), dim=1)


@pytest.mark.parametrize("kind", [torch.long, torch.bool, torch.float32])
def test_a_mask_that_begins_with_the_prefixs_is_taken_in_any_dtype(
    model: LanguageModel, whole: KVCache, kind: torch.dtype
) -> None:
    module: Any = model.module
    with grafted(model, whole) as cache, torch.no_grad():
        logits = module(LIVE, cache=cache, attention_mask=shown(whole).to(kind)).logits

    torch.testing.assert_close(logits, score(model, LIVE, whole), atol=1e-4, rtol=1e-4)


def test_a_mask_that_shows_padding_or_hides_tokens_is_refused(
    model: LanguageModel, whole: KVCache
) -> None:
    module: Any = model.module
    hides = shown(whole)
    hides[1, 8] = 0
    masks = [
        (torch.ones(2, 20, dtype=torch.long), "shows padding of the prefix"),
        (hides, "hides tokens of the prefix"),
        (torch.zeros(2, 1, 8, 20), "does not say token by token"),
    ]
    for mask, says in masks:
        with grafted(model, whole) as cache, pytest.raises(CacheLayoutError, match=says) as caught:
            module(LIVE, cache=cache, attention_mask=mask)
        assert caught.value.hint
    with grafted(model, whole) as cache, pytest.raises(CacheLayoutError, match="shows padding"):
        module.generate(LIVE, cache=cache, attention_mask=masks[0][0], max_new_tokens=2)


def test_positions_that_count_padding_are_refused(model: LanguageModel, whole: KVCache) -> None:
    module: Any = model.module
    with (
        grafted(model, whole) as cache,
        pytest.raises(CacheLayoutError, match=r"live tokens at positions \[12, 13, 14, 15\]"),
    ):
        module(LIVE, cache=cache, position_ids=torch.arange(12, 20).expand(2, -1))


def test_beams_of_one_prompt_stand_on_one_row_s_prefix(
    model: LanguageModel, whole: KVCache
) -> None:
    module: Any = model.module
    mask = torch.ones(1, 20, dtype=torch.long)
    with grafted(model, whole) as cache, pytest.raises(CacheLayoutError, match="on different"):
        module.generate(LIVE[:1], cache=cache, attention_mask=mask, num_beams=2)
    with (
        grafted(model, whole) as cache,
        pytest.raises(CacheLayoutError, match="batch 2 under 2 prompts of 3 beams") as caught,
    ):
        module.generate(LIVE, cache=cache, attention_mask=shown(whole), num_beams=3)
    assert "stack([cache.expand(3), …])" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (torch.ones(2, 7), r"shape \(2, 7\) over live tokens of shape \(2, 8\)"),
        (torch.full((2, 8), 2), "a mask of"),
        (torch.tensor([[1] * 8, [1] * 6 + [0] * 2]), "not at the left"),
        (torch.tensor([[1] * 8, [1, 0, 1, 1, 1, 1, 1, 1]]), "not at the left"),
        (torch.tensor([[1] * 8, [0] * 8]), "not at the left"),
    ],
    ids=["length", "numbers", "right", "hole", "nothing"],
)
def test_prompts_are_padded_at_the_left(
    model: LanguageModel, whole: KVCache, mask: Tensor, says: str
) -> None:
    for prefix in (whole, None):
        with pytest.raises(CacheLayoutError, match=says) as caught:
            score(model, LIVE, prefix, mask=mask.long())
        assert caught.value.hint


def test_what_cannot_hide_padding_refuses_it(model: LanguageModel, whole: KVCache) -> None:
    for act in (
        lambda: write(whole),
        lambda: relocate(model, whole, 3),
        lambda: adopt(model, whole, IDS[:, :12].repeat(2, 1)),
        lambda: check_cache(whole, model.spec, model.spec),
    ):
        with pytest.raises(CacheLayoutError, match=r"padded by \[0, 7\] columns") as caught:
            act()
        assert caught.value.hint
    assert write(whole, masked=True).get_seq_length() == 12


def test_the_longest_row_must_end_within_the_models_positions(model: LanguageModel) -> None:
    long, short = prefill(model, IDS.repeat(1, 26)[:, :508]), prefill(model, IDS)
    whole = stack([short, long])

    assert score(model, LIVE[:, :4], whole).shape[1] == 4
    with pytest.raises(CacheLayoutError, match=r"513 tokens, .* at most 512"):
        score(model, LIVE[:, :5], whole)
    # The short row has room for as many again, and is still no longer than the batch's columns.
    assert score(model, LIVE[:1, :5], short).shape[1] == 5
