"""What attention returns from another prefix, seen from inside, and the model left as it was."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvtransfer.hf.attention import attention_outputs, watching
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
