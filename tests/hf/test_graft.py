"""What transformers itself does on a graft is right, or refused before it runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtransfer.errors import CacheLayoutError, IncompatibleModels
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.graft import grafted
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.relocate import relocate
from kvtransfer.hf.run import generate, prefill, score

IDS = torch.arange(5, 65, 3)[None]
PREFIX, LIVE = IDS[:, :12], IDS[:, 12:]
SPAN = IDS.shape[1]


@pytest.fixture
def prefix(model: LanguageModel) -> KVCache:
    return prefill(model, PREFIX)


def written(model: LanguageModel, ids: Tensor, cache: Any, **more: Any) -> list[int]:
    """What transformers' own generate adds, greedily."""
    module: Any = model.module
    out = module.generate(ids, cache=cache, do_sample=False, max_new_tokens=6, **more)
    return list(map(int, out[0, ids.shape[1] :]))


def ones(length: int) -> Tensor:
    return torch.ones(1, length, dtype=torch.long)


def test_generate_writes_on_a_graft_what_we_write(model: LanguageModel, prefix: KVCache) -> None:
    with grafted(model, prefix) as cache:
        found = written(model, LIVE, cache, attention_mask=ones(SPAN))

    assert found == list(generate(model, LIVE[0], prefix, max_new_tokens=6))
    assert found == written(model, IDS, None, attention_mask=ones(SPAN))


def test_forward_gives_on_a_graft_the_logits_that_we_give(
    model: LanguageModel, prefix: KVCache
) -> None:
    module: Any = model.module
    for mask in (None, ones(SPAN)):
        with grafted(model, prefix) as cache, torch.no_grad():
            logits = module(LIVE, cache=cache, attention_mask=mask).logits
        torch.testing.assert_close(logits, score(model, LIVE, prefix))


def test_a_moved_prefix_is_read_on_from_where_it_ends(
    model: LanguageModel, prefix: KVCache
) -> None:
    moved = relocate(model, prefix, 100)
    module: Any = model.module
    with grafted(model, moved) as cache:
        found = written(model, LIVE, cache, attention_mask=ones(SPAN))
    with grafted(model, moved) as cache, torch.no_grad():
        logits = module(LIVE, cache=cache).logits

    assert found == list(generate(model, LIVE[0], prefix, max_new_tokens=6))
    torch.testing.assert_close(logits, score(model, LIVE, prefix), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("ids", "mask"),
    [
        (LIVE, None),
        (LIVE, LIVE.shape[1]),
        (LIVE, PREFIX.shape[1]),
        (LIVE, SPAN + 1),
        (LIVE, SPAN - 1),
        (IDS, SPAN),
        (IDS, None),
        (LIVE[:, :0], None),
        (LIVE[:, :0], PREFIX.shape[1]),
    ],
    ids=[
        "live alone without a mask",
        "a mask over live",
        "a mask over the prefix",
        "one too long",
        "one too short",
        "the prefix once more",
        "the prefix once more without a mask",
        "nothing",
        "nothing with a mask",
    ],
)
def test_generate_is_not_left_to_guess_what_is_live(
    model: LanguageModel, prefix: KVCache, ids: Tensor, mask: int | None
) -> None:
    named = {} if mask is None else {"attention_mask": ones(mask)}

    with grafted(model, prefix) as cache:
        with pytest.raises(CacheLayoutError) as caught:
            written(model, ids, cache, **named)
        assert cache.get_seq_length() == prefix.tokens  # refused before anything ran

    assert caught.value.hint
    assert ("no live tokens" if ids.shape[1] == 0 else "which of them are live") in str(
        caught.value
    )


def test_without_the_watch_generate_would_have_dropped_live_tokens(
    model: LanguageModel, prefix: KVCache
) -> None:
    """The reason for all this: live tokens alone, more of them than the prefix has, no mask."""
    from kvtransfer.hf.cache import write

    short = prefill(model, PREFIX[:, :2])
    silent = written(model, LIVE, write(short))

    assert silent != list(generate(model, LIVE[0], short, max_new_tokens=6))


@pytest.mark.parametrize("length", [LIVE.shape[1], PREFIX.shape[1], SPAN + 1, SPAN - 1])
def test_forward_refuses_a_mask_of_another_length(
    model: LanguageModel, prefix: KVCache, length: int
) -> None:
    module: Any = model.module
    with grafted(model, prefix) as cache:
        says = f"a mask over {length}|mask over {length} tokens, where the cache holds 12"
        with pytest.raises(CacheLayoutError, match=says):
            module(LIVE, cache=cache, attention_mask=ones(length))


def test_forward_refuses_other_positions(model: LanguageModel, prefix: KVCache) -> None:
    module: Any = model.module
    with grafted(model, prefix) as cache:
        with pytest.raises(CacheLayoutError, match="live tokens at positions 0 to 7"):
            module(LIVE, cache=cache, position_ids=torch.arange(8)[None])
        with pytest.raises(CacheLayoutError, match="no live tokens"):
            module(LIVE[:, :0], cache=cache)


def test_a_graft_serves_one_prompt(model: LanguageModel, prefix: KVCache) -> None:
    with grafted(model, prefix) as cache:
        first = written(model, LIVE, cache, attention_mask=ones(SPAN))
        with pytest.raises(CacheLayoutError, match="where the cache holds 25 tokens"):
            written(model, LIVE, cache, attention_mask=ones(SPAN))
    with grafted(model, prefix) as cache:
        assert written(model, LIVE, cache, attention_mask=ones(SPAN)) == first


def test_other_calls_of_the_model_are_left_alone(model: LanguageModel, prefix: KVCache) -> None:
    module: Any = model.module
    before = module.generate

    with grafted(model, prefix), torch.no_grad():
        alone = module(LIVE).logits
        assert written(model, LIVE, None, attention_mask=ones(LIVE.shape[1]))

    torch.testing.assert_close(alone, score(model, LIVE))
    assert module.generate == before  # and after it, the model is as it was
    assert not module._forward_pre_hooks


def test_the_watch_ends_when_the_block_fails(model: LanguageModel, prefix: KVCache) -> None:
    with pytest.raises(RuntimeError, match="outside"), grafted(model, prefix):
        raise RuntimeError("outside")

    assert not model.module._forward_pre_hooks
    assert "generate" not in vars(model.module)


def test_a_siblings_prefix_is_not_grafted(
    model: LanguageModel, tiny: Callable[..., LanguageModel]
) -> None:
    sibling = tiny("llama", num_hidden_layers=2, seed=5)

    with (
        pytest.raises(IncompatibleModels, match="fingerprint"),
        grafted(model, prefill(sibling, PREFIX)),
    ):
        raise AssertionError("unreachable")


def test_a_padded_batch_of_prompts_on_one_prefix_is_read_right(
    model: LanguageModel, prefix: KVCache
) -> None:
    """Left-padded prompts, masked: each row continues as it would alone."""
    module: Any = model.module
    short = LIVE[0, 3:]
    rows = torch.stack((LIVE[0], torch.cat((torch.zeros(3, dtype=torch.long), short))))
    mask = torch.ones(2, SPAN, dtype=torch.long)
    mask[1, 12:15] = 0

    with grafted(model, prefix.expand(2)) as cache:
        out = module.generate(
            rows, cache=cache, attention_mask=mask, do_sample=False, max_new_tokens=4
        )

    for row, prompt in zip(out, (LIVE[0], short), strict=True):
        alone = list(generate(model, prompt, prefix, max_new_tokens=4))
        assert row[len(LIVE[0]) :].tolist()[: len(alone)] == alone
