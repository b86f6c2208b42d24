"""A sibling's cache is read as it is but for the layers that matter."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

from kvtransfer.errors import CacheLayoutError, IncompatibleModels, TextError
from kvtransfer.guides.group_profile import profile_groups
from kvtransfer.guides.reuse import Group, lend, recompute_group, reuse
from kvtransfer.hf.model import LanguageModel, wrap
from kvtransfer.hf.run import prefill, score
from tests.theorems.compare import cache_error

IDS = torch.randint(3, 500, (2, 24), generator=torch.Generator().manual_seed(3))
ITEMS = torch.randint(3, 500, (3, 40), generator=torch.Generator().manual_seed(4))


@pytest.fixture(scope="module")
def target(tiny: Callable[..., LanguageModel]) -> LanguageModel:
    return tiny("llama")


def sibling_of(model: LanguageModel, layer: int, part: str) -> LanguageModel:
    """The same model with other weights in one part of one layer."""
    module: Any = copy.deepcopy(model.module)
    with torch.no_grad():
        weight = module.model.layers[layer].get_submodule(part).weight
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(5))
        weight += 0.3 * noise
    return wrap(module, model.tokenizer)


@pytest.fixture(scope="module")
def sibling(target: LanguageModel) -> LanguageModel:
    """Differs in the keys and values of layer 2 alone, and so in what comes after."""
    return sibling_of(target, 2, "self_attn.v_proj")


def test_nothing_recomputed_is_the_siblings_cache_bit_for_bit_and_says_so(
    sibling: LanguageModel, target: LanguageModel
) -> None:
    read = prefill(sibling, IDS)

    raw = reuse(sibling, target, IDS, None)

    assert all(map(torch.equal, (*raw.keys, *raw.values), (*read.keys, *read.values)))
    assert raw.approximate == f"read by {sibling.spec.name}"
    score(target, IDS[:, :3], raw)
    assert cache_error(raw, prefill(target, IDS)) > 0.1


def test_all_layers_from_the_embeddings_are_a_prefill(
    sibling: LanguageModel, target: LanguageModel
) -> None:
    raw, _ = lend(sibling, target, IDS)

    whole = recompute_group(target, IDS, raw, None, Group(0, 3))

    assert cache_error(whole, prefill(target, IDS)) < 1e-6
    assert whole.approximate is None


def test_the_group_is_the_targets_and_the_rest_the_siblings(
    sibling: LanguageModel, target: LanguageModel
) -> None:
    raw, own = reuse(sibling, target, IDS, None), prefill(target, IDS)

    made = reuse(sibling, target, IDS, Group(1, 2))

    # What enters layer 1 is the same in both, so the target's layers 1 and 2 come out its own.
    for layer in (1, 2):
        torch.testing.assert_close(made.values[layer], own.values[layer])
        torch.testing.assert_close(made.keys[layer], own.keys[layer])
    assert not torch.allclose(raw.values[2], own.values[2], atol=0.1)
    for layer in (0, 3):
        assert torch.equal(made.keys[layer], raw.keys[layer])
        assert torch.equal(made.values[layer], raw.values[layer])
    assert made.approximate == f"read by {sibling.spec.name}; layers 1–2 recomputed"


def test_the_profile_finds_the_layer_that_differs(
    sibling: LanguageModel, target: LanguageModel
) -> None:
    found = profile_groups(sibling, target, ITEMS, prefix=32, share=0.5)

    assert set(found.groups) == {Group(f, t) for f in range(4) for t in (f, f + 1) if t < 4}
    # Layer 3 reads what layer 2 made of its values: both of them, from the state before, are own.
    assert found.best == Group(2, 3)
    assert found.groups[found.best].max() < 1e-6 < found.reused.min()
    assert found
    assert found.of_size(1) == Group(2, 2) or found.of_size(1) == Group(3, 3)
    alone = found.recovered(found.best)
    assert alone is not None
    assert alone.value == pytest.approx(1.0, abs=1e-3)


def test_layers_of_a_cache_that_hides_tokens_are_not_recomputed(target: LanguageModel) -> None:
    """All of them recomputed would say that they are exact, and still hide tokens."""
    own = prefill(target, IDS)
    gone = torch.ones(own.keys[1].shape[:3], dtype=torch.bool)
    hiding = replace(own, hidden=(None, gone, *[None] * (len(own) - 2)), approximate="hides")

    with pytest.raises(CacheLayoutError, match="hidden in 1 of 4 layers cannot be recomputed"):
        recompute_group(target, IDS, hiding, None, Group(0, 3))


def test_each_group_of_a_profile_is_what_recomputing_it_gives(
    sibling: LanguageModel, target: LanguageModel
) -> None:
    found = profile_groups(sibling, target, ITEMS[:1], prefix=32, share=0.5)
    hidden, live = ITEMS[:1, :32], ITEMS[:1, 32:]
    own = score(target, live, prefill(target, hidden)).log_softmax(-1)
    for group, column in found.groups.items():
        here = score(target, live, reuse(sibling, target, hidden, group)).log_softmax(-1)
        expected = float((own.exp() * (own - here)).sum(-1).mean())
        assert column[0] == pytest.approx(expected, abs=1e-5)


def test_a_profile_is_a_table_and_json(sibling: LanguageModel, target: LanguageModel) -> None:
    found = profile_groups(sibling, target, ITEMS, prefix=32, share=0.5)
    console = Console(width=100, record=True, file=None, quiet=False)
    with console.capture() as shown:
        console.print(found)

    document = json.loads(found.to_json())

    assert "Recomputing layers 2–3 wins back 100%" in shown.get()
    assert document["best"] == [2, 3]
    assert len(document["groups"]) == 7
    assert document["reused_kl"]["n"] == 3


def test_two_models_that_are_one_have_nothing_to_recompute(target: LanguageModel) -> None:
    found = profile_groups(target, target, ITEMS[:2], prefix=32, share=0.25)

    assert not found
    assert found.recovered(found.best) is None or found.reused.max() < 1e-6


def test_what_is_no_sibling_is_refused(
    tiny: Callable[..., LanguageModel], sibling: LanguageModel, target: LanguageModel
) -> None:
    with pytest.raises(CacheLayoutError, match="2 layers"):
        lend(tiny("llama", num_hidden_layers=2), target, IDS)
    with pytest.raises(IncompatibleModels, match="reads other tokens"):
        lend(replace(sibling, spec=replace(sibling.spec, tokenizer="another")), target, IDS)
    with pytest.raises(IncompatibleModels, match="96 numbers a token, and 64"):
        lend(tiny("llama", hidden_size=96), target, IDS, layers=(1,))
    with pytest.raises(CacheLayoutError, match="turned otherwise"):
        linear = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
        lend(tiny("llama", rope_parameters=linear), target, IDS)
    with pytest.raises(CacheLayoutError, match="positions 5 to 28 for 24 tokens"):
        moved = prefill(target, IDS)
        moved = replace(moved, positions=moved.positions + 5, rotations=None)
        recompute_group(target, IDS, moved, None, Group(0, 1))


@pytest.mark.parametrize("group", [(2, 1), (-1, 3)])
def test_a_group_is_layers_in_order(group: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="are no group"):
        Group(*group)


def test_bad_profiles_are_refused(sibling: LanguageModel, target: LanguageModel) -> None:
    with pytest.raises(TextError, match="40 tokens, of which 40"):
        profile_groups(sibling, target, ITEMS, prefix=40)
    with pytest.raises(TextError, match="no text"):
        profile_groups(sibling, target, [], prefix=4)
    for share in (0.1, 1.5):
        with pytest.raises(ValueError, match=f"a share of {share}"):
            profile_groups(sibling, target, ITEMS, prefix=4, share=share)
    with pytest.raises(ValueError, match="no group of 3 layers"):
        profile_groups(sibling, target, ITEMS[:1], prefix=32, share=0.5).of_size(3)
