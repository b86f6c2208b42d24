"""What is hidden from a layer is not there for it, whatever the model and the implementation."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from kvtransfer.errors import UnsupportedModel
from kvtransfer.geometry.cache import KVCache
from kvtransfer.geometry.join import indent, stack
from kvtransfer.hf.attention import looks
from kvtransfer.hf.call import call
from kvtransfer.hf.graft import grafted
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import generate, prefill, read_at, score
from kvtransfer.steering.interventions import Ablate, Bank
from tests.hf.architectures import MODELS

IDS = torch.randint(3, 500, (1, 40), generator=torch.Generator().manual_seed(0))
PREFIX, LIVE = IDS[:, :32], IDS[:, 32:]

OWN_ATTENTION = {"answers in tuples", "alibi"}
"""Kinds of MODELS whose attention does not go through transformers' interface."""
NO_SDPA = {"sinks and windows", "capped scores"}

CASES = [
    (kind, implementation)
    for kind in MODELS
    for implementation in ("sdpa", "eager")
    if kind not in OWN_ATTENTION | {"eager"} and (implementation == "eager" or kind not in NO_SDPA)
]


def alone(model: LanguageModel, live: Tensor, start: int) -> Tensor:
    """The logits of ``live`` with nothing before it, at positions from ``start`` on."""
    positions = torch.arange(start, start + live.shape[1])[None]
    with torch.no_grad():
        run = call(model.module, live, DynamicCache(), positions, torch.ones_like(live))
    logits: Tensor = run.logits
    return logits


@pytest.fixture(params=["sdpa", "eager"])
def model(request: pytest.FixtureRequest, tiny: Callable[..., LanguageModel]) -> LanguageModel:
    return tiny("llama", attn_implementation=request.param)


@pytest.fixture
def prefix(model: LanguageModel) -> KVCache:
    return prefill(model, PREFIX)


@pytest.mark.parametrize(("kind", "implementation"), CASES)
def test_removed_is_as_if_there_were_no_guide(
    kind: str, implementation: str, tiny: Callable[..., LanguageModel]
) -> None:
    architecture, config = MODELS[kind]
    model = tiny(architecture, attn_implementation=implementation, **config)
    prefix = prefill(model, PREFIX)

    removed = score(model, LIVE, Ablate("removed")(prefix))

    torch.testing.assert_close(removed, alone(model, LIVE, 32), atol=1e-5, rtol=1e-5)
    for zeroed in (Ablate("keys"), Ablate("values"), Ablate()):
        assert not torch.allclose(score(model, LIVE, zeroed(prefix)), removed, atol=1e-2)


def test_a_layer_neither_sees_nor_counts_what_is_hidden_from_it(
    model: LanguageModel, prefix: KVCache
) -> None:
    """Whatever stands there: other numbers change no bit of the logits."""
    blind = Ablate("removed", layers=(1, 2), heads=(1,), tokens=(4, 20))
    hidden = blind(prefix)
    assert hidden.hidden is not None
    noise = torch.randn(1, 2, 32, 16, generator=torch.Generator().manual_seed(1))
    keys, values = list(prefix.keys), list(prefix.values)
    for layer in (1, 2):
        gone = hidden.hidden[layer]
        assert gone is not None
        keys[layer] = torch.where(gone[..., None], noise, keys[layer])
        values[layer] = torch.where(gone[..., None], noise, values[layer])
    other = KVCache(
        keys=tuple(keys),
        values=tuple(values),
        positions=prefix.positions,
        keys_are="cached",
        rotations=prefix.rotations,
        model=prefix.model,
    )

    assert torch.equal(score(model, LIVE, blind(other)), score(model, LIVE, hidden))
    assert not torch.allclose(score(model, LIVE, other), score(model, LIVE, prefix), atol=1e-2)
    assert not torch.allclose(score(model, LIVE, hidden), score(model, LIVE, prefix), atol=1e-2)


def test_a_bank_of_all_layers_is_the_plain_graft_and_of_none_the_run_without(
    model: LanguageModel, prefix: KVCache
) -> None:
    plain = score(model, LIVE, prefix)

    assert torch.equal(score(model, LIVE, Bank("all")(prefix)), plain)
    none = score(model, LIVE, Bank(())(prefix))
    torch.testing.assert_close(none, alone(model, LIVE, 32), atol=1e-5, rtol=1e-5)
    mid = score(model, LIVE, Bank((1, 2))(prefix))
    assert not torch.allclose(mid, plain, atol=1e-2)
    assert not torch.allclose(mid, none, atol=1e-2)


def test_zeroed_keys_take_their_share_and_removed_tokens_none(
    model: LanguageModel, prefix: KVCache
) -> None:
    def mass(cache: KVCache) -> Tensor:
        seen = looks(model, LIVE, cache)
        return torch.stack(
            [look.weights[..., :32].sum(dim=-1).mean() for look in seen if look is not None]
        )

    zeroed, removed, bank = (
        mass(edit(prefix)) for edit in (Ablate("keys"), Ablate("removed"), Bank((1,)))
    )

    assert bool((zeroed > 0.05).all())
    assert not removed.any()
    assert bank.nonzero().flatten().tolist() == [1]


@pytest.mark.parametrize("live", [LIVE, LIVE[:, :1]], ids=["several", "one"])
def test_generating_sees_no_more_than_scoring_does(
    live: Tensor, model: LanguageModel, prefix: KVCache
) -> None:
    bank = Bank((0, 3))(prefix)
    module: Any = model.module
    options: Any = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}

    ours = list(generate(model, live[0], bank, max_new_tokens=6))
    with grafted(model, bank) as cache:
        mask = torch.cat((bank.mask, torch.ones_like(live)), dim=1)
        theirs = module.generate(live, cache=cache, attention_mask=mask, **options)
    with grafted(model, bank.expand(3)) as cache:
        beams = module.generate(
            live,
            cache=cache,
            attention_mask=mask,
            num_beams=3,
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )

    assert theirs[0, live.shape[1] :].tolist()[: len(ours)] == ours
    assert ours != list(generate(model, live[0], prefix, max_new_tokens=6))
    best = beams.sequences[0]
    log_chances = score(model, best[None, :-1], bank)[0].log_softmax(dim=-1)
    written = log_chances[live.shape[1] - 1 :].gather(1, best[live.shape[1] :, None])
    torch.testing.assert_close(
        float(beams.sequences_scores[0]), float(written.mean()), atol=1e-4, rtol=0
    )


def test_rows_of_a_batch_hide_each_their_own(model: LanguageModel, prefix: KVCache) -> None:
    short = prefill(model, IDS[:, 3:20])
    rows = [Bank((1,))(prefix), short, Ablate("removed", tokens=(0, 5))(short)]

    batch = score(model, LIVE.expand(3, -1), stack(rows))

    for row, cache in zip(batch, rows, strict=True):
        torch.testing.assert_close(row[None], score(model, LIVE, cache), atol=1e-4, rtol=1e-4)


def test_threads_hide_each_their_own(model: LanguageModel, prefix: KVCache) -> None:
    caches = [prefix, Bank((1,))(prefix), Ablate("removed", layers=(2,))(prefix)] * 2
    expected = [score(model, LIVE, cache) for cache in caches]

    with ThreadPoolExecutor(len(caches)) as pool:
        for _ in range(5):
            found = list(pool.map(lambda cache: score(model, LIVE, cache), caches))
            assert all(map(torch.equal, found, expected))
    assert not torch.allclose(expected[0], expected[1], atol=1e-2)


def test_an_indented_prefix_is_read_as_where_it_stands(model: LanguageModel) -> None:
    there = read_at(model, PREFIX, torch.arange(5, 37)[None])

    wide = indent(there, 5)

    assert wide.tokens == 37
    assert wide.positions[0].tolist() == list(range(37))
    torch.testing.assert_close(
        score(model, LIVE, wide), score(model, LIVE, there), atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(
        score(model, LIVE, wide), score(model, LIVE, prefill(model, PREFIX)), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("kind", sorted(OWN_ATTENTION))
def test_a_model_whose_attention_cannot_hide_says_so(
    kind: str, tiny: Callable[..., LanguageModel]
) -> None:
    architecture, config = MODELS[kind]
    model = tiny(architecture, **config)
    bank = Bank((1,))(prefill(model, PREFIX))

    with pytest.raises(UnsupportedModel, match=r"layers 0, 2, 3 of .* saw what was to be hidden"):
        score(model, LIVE, bank)


def test_an_implementation_without_such_masks_is_refused_by_name(model: LanguageModel) -> None:
    bank = Bank((1,))(prefill(model, PREFIX))
    config: Any = model.module.config
    before = config._attn_implementation
    config._attn_implementation = "flex_attention"
    try:
        with pytest.raises(UnsupportedModel, match="flex_attention"):
            score(model, LIVE, bank)
        with pytest.raises(UnsupportedModel, match="flex_attention"), grafted(model, bank):
            pass
    finally:
        config._attn_implementation = before
