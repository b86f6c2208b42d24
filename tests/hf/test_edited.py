"""What a model reads at every step, in place of what it cached."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtransfer.errors import CacheLayoutError, WrongKind
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.edited import Edit
from kvtransfer.hf.graft import grafted
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.reader import Reader
from kvtransfer.hf.run import generate, prefill, score
from kvtransfer.steering.interventions import Ablate, Lag, Replace, Scale

IDS = torch.randint(3, 500, (2, 24), generator=torch.Generator().manual_seed(0))
LIVE, NEW = IDS[0, 20:], 8


@pytest.fixture(params=["sdpa", "eager"])
def model(request: pytest.FixtureRequest, tiny: Callable[..., LanguageModel]) -> LanguageModel:
    return tiny("llama", num_hidden_layers=3, attn_implementation=request.param)


@pytest.fixture
def prefix(model: LanguageModel) -> KVCache:
    return prefill(model, IDS[:1, :20])


def theirs(model: LanguageModel, prefix: KVCache, live: Tensor, edit: Edit | None) -> list[int]:
    """What transformers' own generate writes."""
    module: Any = model.module
    with grafted(model, prefix, edit=edit) as cache:
        mask = torch.cat((prefix.mask, torch.ones_like(live)[None]), dim=1)
        out = module.generate(
            live[None],
            cache=cache,
            attention_mask=mask,
            max_new_tokens=NEW,
            do_sample=False,
            pad_token_id=0,
        )
    return [int(token) for token in out[0, len(live) :] if token]


def ours(model: LanguageModel, prefix: KVCache, live: Tensor, edit: Edit | None) -> list[int]:
    return list(generate(model, live, prefix, max_new_tokens=NEW, edit=edit))


@pytest.mark.parametrize("write", [ours, theirs])
def test_an_edit_of_the_prefix_is_the_same_once_or_at_every_step(
    write: Callable[..., list[int]], model: LanguageModel, prefix: KVCache
) -> None:
    """Edits do not add up: each begins with what the model itself made."""
    halve = Scale(0.5, "values", tokens=(0, 20))

    every_step = write(model, prefix, LIVE, halve)

    assert every_step == write(model, halve(prefix), LIVE, None)
    assert every_step != write(model, prefix, LIVE, None)


@pytest.mark.parametrize(
    "edit", [Scale(0.5), Lag(1), Ablate("removed", layers=(1,))], ids=lambda edit: str(edit)
)
def test_ours_and_transformers_generate_read_the_same(
    edit: Edit, model: LanguageModel, prefix: KVCache
) -> None:
    assert ours(model, prefix, LIVE, edit) == theirs(model, prefix, LIVE, edit)
    assert ours(model, prefix, LIVE, edit) != ours(model, edit(prefix), LIVE, None)


def test_at_every_step_the_model_reads_the_edit_of_all_before(
    model: LanguageModel, prefix: KVCache
) -> None:
    """Step by step as by hand: each token read on the edit of a cache that was kept clean."""
    edit = Scale(0.5)
    reader = Reader.over(model, prefix, edit=edit)

    found = [reader(LIVE[None, :1])[:, -1], reader(LIVE[None, 1:])[:, -1]]

    first = score(model, LIVE[None, :1], edit(prefix))[:, -1]
    torch.testing.assert_close(found[0], first, atol=1e-5, rtol=1e-5)
    begun = Reader.over(model, edit(prefix))
    begun(LIVE[None, :1])
    layers: Any = begun.cache.layers
    whole = KVCache(
        keys=tuple(
            torch.cat((keys, layer.keys[:, :, 20:]), dim=2)
            for keys, layer in zip(prefix.keys, layers, strict=True)
        ),
        values=tuple(
            torch.cat((values, layer.values[:, :, 20:]), dim=2)
            for values, layer in zip(prefix.values, layers, strict=True)
        ),
        positions=torch.arange(21)[None],
        keys_are="cached",
        rotations=model.rotary(torch.arange(21)[None]),
        model=prefix.model,
    )
    second = score(model, LIVE[None, 1:], edit(whole))[:, -1]
    torch.testing.assert_close(found[1], second, atol=1e-5, rtol=1e-5)


def test_another_runs_whole_cache_at_every_step_is_that_run(
    model: LanguageModel, prefix: KVCache
) -> None:
    """Whatever the model itself had read: the same bits, and so the same tokens."""
    other = prefill(model, IDS[1:, :20])
    run = Reader.over(model, other)
    expected = [run(LIVE[None, :1], last=True)]
    for token in LIVE[1:]:
        expected.append(run(token[None, None], last=True))
    layers: Any = run.cache.layers
    positions = torch.arange(24)[None]
    trajectory = KVCache(
        keys=tuple(layer.keys for layer in layers),
        values=tuple(layer.values for layer in layers),
        positions=positions,
        keys_are="cached",
        rotations=model.rotary(positions),
        model=prefix.model,
    )

    reader = Reader.over(model, prefix, edit=Replace(trajectory))
    found = [reader(token[None, None], last=True) for token in LIVE]

    assert all(map(torch.equal, found, expected))
    plain = Reader.over(model, prefix)
    assert not torch.allclose(plain(LIVE[None, :1], last=True), expected[0], atol=1e-2)


def test_rows_go_on_each_with_its_own(model: LanguageModel, prefix: KVCache) -> None:
    rows = Reader.over(model, prefix.expand(2), rows=2, edit=Lag(2))
    live = torch.stack((LIVE, LIVE.flip(0)))

    together = torch.cat([rows(live[:, :2]), rows(live[:, 2:])], dim=1)

    for row, ids in zip(together, live, strict=True):
        one = Reader.over(model, prefix, edit=Lag(2))
        alone = torch.cat([one(ids[None, :2]), one(ids[None, 2:])], dim=1)
        torch.testing.assert_close(row[None], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("write", [ours, theirs])
def test_an_edit_that_raises_leaves_cache_and_model_as_they_were(
    write: Callable[..., list[int]], model: LanguageModel, prefix: KVCache
) -> None:
    before, attributes = prefix.map(torch.clone), dict(model.module.__dict__)
    plain = write(model, prefix, LIVE, None)
    steps = 0

    def fails(cache: KVCache) -> KVCache:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise RuntimeError("in the midst of it")
        return Scale(0.5)(cache)

    with pytest.raises(RuntimeError, match="in the midst of it"):
        write(model, prefix, LIVE, fails)

    assert all(map(torch.equal, (*prefix.keys, *prefix.values), (*before.keys, *before.values)))
    assert model.module.__dict__.keys() == attributes.keys()
    assert not model.module.base_model._forward_pre_hooks
    assert not model.module.base_model._forward_hooks
    assert write(model, prefix, LIVE, None) == plain


def test_a_forward_that_raises_leaves_what_was_cached(
    model: LanguageModel, prefix: KVCache
) -> None:
    reader = Reader.over(model, prefix, edit=Scale(0.5))
    last: Any = model.module.get_submodule("model.layers.2")

    def fail(*given: Any) -> None:
        raise RuntimeError("the last layer broke")

    hook = last.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="the last layer broke"):
        reader(LIVE[None])
    hook.remove()

    fresh = Reader.over(model, prefix, edit=Scale(0.5))
    assert torch.equal(reader(LIVE[None]), fresh(LIVE[None]))


@pytest.mark.parametrize("write", [ours, theirs])
def test_an_edit_that_makes_content_keys_is_refused(
    write: Callable[..., list[int]], model: LanguageModel, prefix: KVCache
) -> None:
    with pytest.raises(CacheLayoutError, match="content keys, and a model reads cached ones"):
        write(model, prefix, LIVE, lambda cache: cache.content())
    turned = write(model, prefix, LIVE, lambda cache: cache.content().rotated(cache.rotations))
    assert turned == write(model, prefix, LIVE, None)


@pytest.mark.parametrize("write", [ours, theirs])
def test_an_edit_that_makes_no_cache_is_refused(
    write: Callable[..., list[int]], model: LanguageModel, prefix: KVCache
) -> None:
    with pytest.raises(WrongKind, match="what the edit made is None"):
        write(model, prefix, LIVE, lambda cache: None)


def test_an_edit_in_place_is_refused_and_does_not_stay(
    model: LanguageModel, prefix: KVCache
) -> None:
    def wipe(cache: KVCache) -> KVCache:
        cache.keys[0].zero_()
        return replace(cache, note="as if it were new")

    reader = Reader.over(model, prefix, edit=wipe)
    with pytest.raises(CacheLayoutError, match="keys of layer 0 were written to in place"):
        reader(LIVE[None])

    reader.edit = None
    assert torch.equal(reader(LIVE[None]), Reader.over(model, prefix)(LIVE[None]))


@pytest.mark.parametrize("write", [ours, theirs])
def test_an_edit_that_cuts_the_cache_is_refused(
    write: Callable[..., list[int]], model: LanguageModel, prefix: KVCache
) -> None:
    with pytest.raises(CacheLayoutError, match="made 1 rows of 19 tokens out of 1 of 20"):
        write(model, prefix, LIVE, lambda cache: cache.prefix(19))


def test_a_cache_that_is_elsewhere_is_refused_with_both_places(
    model: LanguageModel, prefix: KVCache
) -> None:
    with pytest.raises(CacheLayoutError, match=r"this cache is on meta, .* on cpu"):
        score(model, LIVE[None], prefix.map(lambda block: block.to("meta")))
