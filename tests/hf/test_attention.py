"""What attention returns from another prefix, seen from inside, and the model left as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvtransfer.hf.attention import (
    Attend,
    Look,
    attention_heads,
    attention_outputs,
    looks,
    watching,
)
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill, score
from kvtransfer.measures.agreement import cosine

IDS = torch.randint(3, 500, (1, 24), generator=torch.Generator().manual_seed(0))
PREFIX, LIVE = IDS[:, :16], IDS[:, 16:]
IMPLEMENTATIONS = ("sdpa", "eager")


@pytest.fixture(params=IMPLEMENTATIONS)
def watched(request: pytest.FixtureRequest, tiny: Callable[..., LanguageModel]) -> LanguageModel:
    return tiny("llama", num_hidden_layers=2, attn_implementation=request.param)


PRISTINE = dict(ALL_ATTENTION_FUNCTIONS)
"""As transformers has it, before anything was watched."""


def test_own_cache_has_cosine_one_and_a_zeroed_or_foreign_one_less(watched: LanguageModel) -> None:
    own = prefill(watched, PREFIX)
    others = {
        "own": own,
        "noisy": own.map(lambda block: block + 0.05 * block.std() * torch.randn_like(block)),
        "zeroed": own.map(torch.zeros_like),
        "negative": own.map(torch.neg),
    }

    _, found = attention_outputs(watched, LIVE, own, others, cosine)

    torch.testing.assert_close(found["own"], torch.ones(2))
    assert bool((found["noisy"] < 1).all())
    assert bool((found["noisy"] > 0.9).all())
    assert bool((found["zeroed"] < found["noisy"] - 0.1).all())
    assert bool((found["negative"] < found["noisy"] - 0.1).all())


def test_watching_changes_no_logit(watched: LanguageModel) -> None:
    own = prefill(watched, PREFIX)

    logits, _ = attention_outputs(watched, LIVE, own, {"zeroed": own.map(torch.zeros_like)}, cosine)

    assert torch.equal(logits, score(watched, LIVE, own))


def test_sdpa_and_eager_see_the_same(tiny: Callable[..., LanguageModel]) -> None:
    seen = []
    for name in IMPLEMENTATIONS:
        model = tiny("llama", num_hidden_layers=2, attn_implementation=name)
        assert model.module.config._attn_implementation == name
        own = prefill(model, PREFIX)
        zeroed = {"zeroed": own.map(torch.zeros_like)}
        seen.append(attention_outputs(model, LIVE, own, zeroed, cosine)[1]["zeroed"])

    torch.testing.assert_close(seen[0], seen[1], rtol=1e-4, atol=1e-4)


def test_a_prefix_exchanged_at_a_layer_gives_what_a_run_on_it_gives_there(
    watched: LanguageModel,
) -> None:
    """At the first layer nothing before it differs: queries are those of a run on the other."""
    own, other = prefill(watched, PREFIX), prefill(watched, PREFIX.flip(1))
    outputs: dict[str, list[torch.Tensor]] = {"exchanged": [], "run": []}

    def keep(changed: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        outputs["exchanged"].append(changed)
        return cosine(changed, output)

    attention_outputs(watched, LIVE, own, {"other": other}, keep)

    def see(layer: int, attend: Any, keys: Any, values: Any, output: torch.Tensor) -> None:
        outputs["run"].append(output)

    with watching(watched.module, see):
        score(watched, LIVE, other)

    torch.testing.assert_close(outputs["exchanged"][0], outputs["run"][0], rtol=1e-4, atol=1e-4)


def test_the_watched_function_is_put_back(watched: LanguageModel) -> None:
    own = prefill(watched, PREFIX)

    attention_outputs(watched, LIVE, own, {"own": own}, cosine)

    assert dict(ALL_ATTENTION_FUNCTIONS) == PRISTINE


def test_the_watched_function_is_put_back_also_after_an_error(watched: LanguageModel) -> None:
    own = prefill(watched, PREFIX)

    def fail(changed: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("in the middle of a layer")

    with pytest.raises(RuntimeError, match="in the middle of a layer"):
        attention_outputs(watched, LIVE, own, {"own": own}, fail)

    assert dict(ALL_ATTENTION_FUNCTIONS) == PRISTINE
    assert torch.equal(score(watched, LIVE, own), score(watched, LIVE, own))


def test_watchers_nest_and_a_users_own_function_survives(watched: LanguageModel) -> None:
    name = str(watched.module.config._attn_implementation)
    seen: list[int] = []

    def see(layer: int, *rest: Any) -> None:
        seen.append(layer)

    with watching(watched.module, see):
        outer = ALL_ATTENTION_FUNCTIONS[name]
        with watching(watched.module, see):
            score(watched, LIVE)
        assert ALL_ATTENTION_FUNCTIONS[name] is outer
        score(watched, LIVE)

    assert sorted(seen) == [0, 0, 0, 1, 1, 1]
    assert dict(ALL_ATTENTION_FUNCTIONS) == PRISTINE


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "gqa": ("llama", {}),
    "mha": ("llama", {"num_key_value_heads": 4}),
    "windows": ("mistral", {"sliding_window": 8}),
    "softcapped": ("gemma2", {"attn_logit_softcapping": 2.0, "attn_implementation": "eager"}),
    "sinks": ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 2}),
}


@pytest.fixture(params=SHAPES)
def shaped(request: pytest.FixtureRequest, tiny: Callable[..., LanguageModel]) -> LanguageModel:
    architecture, config = SHAPES[request.param]
    return tiny(architecture, num_hidden_layers=2, **config)


def test_weights_times_values_is_what_attention_returned(shaped: LanguageModel) -> None:
    own, layers = prefill(shaped, PREFIX), list[int]()

    def see(layer: int, attend: Attend, keys: Tensor, values: Tensor, output: Tensor) -> None:
        layers.append(layer)
        weights = attend.weights(keys, values)
        heads = values.repeat_interleave(weights.shape[1] // values.shape[1], dim=1)
        torch.testing.assert_close((weights @ heads).transpose(1, 2), output, rtol=1e-4, atol=1e-5)
        assert bool((weights >= 0).all())
        assert bool((weights[0, :, 0, -1] == 0).all())  # the first live token, of the last

    with watching(shaped.module, see):
        score(shaped, LIVE, own)

    assert layers == [0, 1]


def by_hand(look: Look, keys: Tensor) -> Tensor:
    """Attention of the last query, which sees everything."""
    heads = keys.repeat_interleave(look.query.shape[1] // keys.shape[1], dim=1)
    scores = look.query[:, :, -1:] @ heads.mT / keys.shape[-1] ** 0.5
    weights: Tensor = scores.softmax(-1)[:, :, 0]
    return weights


def test_queries_and_cached_keys_stand_in_one_space(watched: LanguageModel) -> None:
    """Or their softmax would not be the weights; content keys would not do."""
    own, whole = prefill(watched, PREFIX), prefill(watched, IDS)

    for layer, look in enumerate(looks(watched, LIVE, own)):
        assert look is not None
        assert look.weights.shape == (1, 4, 8, 24)
        torch.testing.assert_close(
            look.weights[:, :, -1], by_hand(look, whole.keys[layer]), rtol=1e-3, atol=1e-4
        )
        turned_back = by_hand(look, whole.content().keys[layer])
        assert not torch.allclose(look.weights[:, :, -1], turned_back, atol=0.01)


def test_shares_sum_to_one_unless_a_sink_takes_some(shaped: LanguageModel) -> None:
    for look in looks(shaped, LIVE, prefill(shaped, PREFIX)):
        assert look is not None
        sums = look.weights.sum(-1)
        if shaped.spec.architecture == "gpt_oss":
            assert float(sums.min()) < 0.999
            assert float(sums.max()) < 1 + 1e-5
        else:
            torch.testing.assert_close(sums, torch.ones_like(sums))


def test_a_kv_head_is_read_by_the_query_heads_of_its_group_only(watched: LanguageModel) -> None:
    own = prefill(watched, PREFIX)

    def without_second(block: Tensor) -> Tensor:
        return block * torch.tensor([1.0, 0.0])[:, None, None]

    _, found = attention_heads(watched, LIVE, own, {"cut": own.map(without_second)}, cosine)

    for heads in found["cut"]:
        assert heads is not None
        torch.testing.assert_close(heads[:2], torch.ones(2))
        assert bool((heads[2:] < 0.95).all())


def test_the_mean_over_query_heads_is_what_attention_outputs_returns(
    watched: LanguageModel,
) -> None:
    own = prefill(watched, PREFIX)
    zeroed = {"zeroed": own.map(torch.zeros_like)}

    _, heads = attention_heads(watched, LIVE, own, zeroed, cosine)
    _, means = attention_outputs(watched, LIVE, own, zeroed, cosine)

    for layer, each in enumerate(heads["zeroed"]):
        assert each is not None
        assert float(each.mean()) == pytest.approx(float(means["zeroed"][layer]))


def test_a_layer_that_goes_another_way_is_not_seen(tiny: Callable[..., LanguageModel]) -> None:
    """Bloom computes its attention itself."""
    model = tiny("bloom", num_hidden_layers=2)
    own = prefill(model, PREFIX)

    _, found = attention_outputs(model, LIVE, own, {"own": own}, cosine)

    assert looks(model, LIVE, own) == (None, None)
    assert bool(found["own"].isnan().all())
