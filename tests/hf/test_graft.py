"""What transformers itself does on a graft is right, or refused before it runs."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtransfer.errors import CacheLayoutError, IncompatibleModels
from kvtransfer.geometry.cache import KVCache
from kvtransfer.geometry.join import stack
from kvtransfer.hf.graft import grafted
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.relocate import relocate
from kvtransfer.hf.run import generate, prefill, score
from kvtransfer.steering.interventions import Bank, Scale

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
        says = rf"mask of shape \(1, {length}\), where the cache holds 12"
        with pytest.raises(CacheLayoutError, match=says):
            module(LIVE, cache=cache, attention_mask=ones(length))


def test_forward_refuses_other_positions(model: LanguageModel, prefix: KVCache) -> None:
    module: Any = model.module
    with grafted(model, prefix) as cache:
        with pytest.raises(CacheLayoutError, match=r"live tokens at positions \[0, 1, 2, 3\]"):
            module(LIVE, cache=cache, position_ids=torch.arange(8)[None])
        with pytest.raises(CacheLayoutError, match="no live tokens"):
            module(LIVE[:, :0], cache=cache)


def test_positional_arguments_are_looked_at_like_named_ones(
    model: LanguageModel, prefix: KVCache
) -> None:
    """transformers' order: ids, mask, positions, cache."""
    module: Any = model.module
    right = score(model, LIVE, prefix)
    for moved in (prefix, relocate(model, prefix, 100)):
        with grafted(model, moved) as cache, torch.no_grad():
            logits = module(LIVE, ones(SPAN), None, cache).logits
        torch.testing.assert_close(logits, right, atol=1e-4, rtol=1e-4)
    with grafted(model, prefix) as cache:
        with pytest.raises(CacheLayoutError, match="an attention mask of shape"):
            module(LIVE, ones(LIVE.shape[1]), None, cache)
        with pytest.raises(CacheLayoutError, match="live tokens at positions"):
            module(LIVE, None, torch.arange(8)[None], cache)


def test_the_base_model_and_copies_of_the_cache_are_looked_at_too(
    model: LanguageModel, prefix: KVCache
) -> None:
    moved = relocate(model, prefix, 100)
    module: Any = model.module
    with grafted(model, moved) as cache, torch.no_grad():
        copied = module(LIVE, cache=deepcopy(cache)).logits
        with pytest.raises(CacheLayoutError, match="an attention mask of shape"):
            module.base_model(LIVE, cache=cache, attention_mask=ones(3))

    torch.testing.assert_close(copied, score(model, LIVE, prefix), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("mask", "positions"),
    [
        (None, [[12, 15, 12, 15, 16, 17, 18, 19]]),
        ([1] * 11 + [0] + [1] * 8, None),
        ([0] * 5 + [1] * 15, None),
    ],
    ids=["shuffled in the middle", "the prefix's end hidden", "the prefix's beginning hidden"],
)
def test_nothing_is_numbered_or_hidden_in_another_way(
    model: LanguageModel, prefix: KVCache, mask: list[int] | None, positions: list[list[int]] | None
) -> None:
    module: Any = model.module
    with grafted(model, prefix) as cache, pytest.raises(CacheLayoutError) as caught:
        module(
            LIVE,
            cache=cache,
            attention_mask=None if mask is None else torch.tensor([mask]),
            position_ids=None if positions is None else torch.tensor(positions),
        )

    assert ("positions" if positions else "hides tokens of the prefix") in caught.value.message


def test_embeddings_may_be_given_for_live_tokens(model: LanguageModel, prefix: KVCache) -> None:
    module: Any = model.module
    embedded = module.get_input_embeddings()(LIVE).detach()

    with grafted(model, prefix) as cache, torch.no_grad():
        logits = module(inputs_embeds=embedded, cache=cache).logits

    torch.testing.assert_close(logits, score(model, LIVE, prefix))


def test_beams_stand_on_one_prefix(model: LanguageModel, prefix: KVCache) -> None:
    module: Any = model.module
    asked = {"num_beams": 2, "do_sample": False, "max_new_tokens": 4}
    other = prefill(model, PREFIX.flip(1))
    two = replace(
        prefix.expand(2),
        keys=tuple(map(torch.cat, zip(prefix.keys, other.keys, strict=True))),
        values=tuple(map(torch.cat, zip(prefix.values, other.values, strict=True))),
    )

    with grafted(model, prefix.expand(2)) as cache:
        found = module.generate(LIVE, cache=cache, attention_mask=ones(SPAN), **asked)
    plain = module.generate(IDS, attention_mask=ones(SPAN), **asked)
    for wrong, says in ((prefix, "batch 1 under 1 prompts of 2"), (two, "on different prefixes")):
        with grafted(model, wrong) as cache, pytest.raises(CacheLayoutError, match=says) as caught:
            module.generate(LIVE, cache=cache, attention_mask=ones(SPAN), **asked)
        assert "expand" in str(caught.value.hint)

    assert found[0, LIVE.shape[1] :].tolist() == plain[0, SPAN:].tolist()


@pytest.mark.parametrize(
    "edit", [Scale(3.0, "values"), Scale(3.0, "keys", layers=(1,)), Bank((1,))], ids=str
)
def test_beams_stand_on_one_prefix_in_every_block(
    edit: Callable[[KVCache], KVCache], model: LanguageModel, prefix: KVCache
) -> None:
    """Beams change rows, so that a prefix of one row would be read by another."""
    module: Any = model.module
    asked = {"num_beams": 2, "do_sample": False, "max_new_tokens": 4}
    mask = ones(SPAN)

    with (
        grafted(model, stack([prefix, edit(prefix)])) as cache,
        pytest.raises(CacheLayoutError, match="on different prefixes"),
    ):
        module.generate(LIVE, cache=cache, attention_mask=mask, **asked)
    with grafted(model, edit(prefix).expand(2)) as cache:
        module.generate(LIVE, cache=cache, attention_mask=mask, **asked)


def test_another_batch_than_the_prefixs_is_refused(model: LanguageModel, prefix: KVCache) -> None:
    module: Any = model.module
    says = "2 rows of live tokens on a prefix of batch 1"
    with grafted(model, prefix) as cache, pytest.raises(CacheLayoutError, match=says):
        module(LIVE.repeat(2, 1), cache=cache)
    with pytest.raises(CacheLayoutError, match="batch 2 under one prompt"):
        list(generate(model, LIVE[0], prefix.expand(2), max_new_tokens=1))


def test_grafts_within_grafts_leave_each_other_alone(model: LanguageModel, prefix: KVCache) -> None:
    other = prefill(model, PREFIX.flip(1))
    module: Any = model.module
    with grafted(model, prefix) as outer:
        with grafted(model, other) as inner:
            second = written(model, LIVE, inner, attention_mask=ones(SPAN))
        with pytest.raises(CacheLayoutError, match="which of them are live"):
            written(model, LIVE, outer)
        first = written(model, LIVE, outer, attention_mask=ones(SPAN))

    assert first == list(generate(model, LIVE[0], prefix, max_new_tokens=6))
    assert second == list(generate(model, LIVE[0], other, max_new_tokens=6))
    assert "generate" not in vars(module)


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
    assert not module.base_model._forward_pre_hooks


def test_the_watch_ends_when_the_block_fails(model: LanguageModel, prefix: KVCache) -> None:
    with pytest.raises(RuntimeError, match="outside"), grafted(model, prefix):
        raise RuntimeError("outside")

    assert not model.module.base_model._forward_pre_hooks
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


@pytest.mark.parametrize("architecture", ["bloom", "gpt2", "gemma3_text", "gpt_neox"])
def test_other_architectures_are_grafted_alike(
    tiny: Callable[..., LanguageModel], architecture: str
) -> None:
    model = tiny(architecture, num_hidden_layers=2)
    prefix = prefill(model, PREFIX)
    module: Any = model.module

    with grafted(model, prefix) as cache, torch.no_grad():
        logits = module(LIVE, cache=cache).logits
    with grafted(model, prefix) as cache:
        found = written(model, LIVE, cache, attention_mask=ones(SPAN))

    torch.testing.assert_close(logits, score(model, LIVE, prefix), atol=1e-4, rtol=1e-4)
    assert found == list(generate(model, LIVE[0], prefix, max_new_tokens=6))


def test_blocks_are_left_in_any_order_and_the_model_is_as_it_was(model: LanguageModel) -> None:
    """As two streams that each hold one open leave theirs."""
    module: Any = model.module
    prefix = prefill(model, torch.arange(3, 13)[None])
    live = torch.arange(13, 16)[None]
    before = module.__dict__.keys() | set()
    first, second = grafted(model, prefix), grafted(model, prefix)
    first.__enter__()
    cache = second.__enter__()

    first.__exit__(None, None, None)

    with pytest.raises(CacheLayoutError, match="no attention mask"):  # the second still looks
        module.generate(live, cache=cache, max_new_tokens=2)
    second.__exit__(None, None, None)
    assert module.__dict__.keys() == before
