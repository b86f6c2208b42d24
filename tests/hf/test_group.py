"""A group of layers, run from what enters it, is that part of a prefill."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kvtransfer.errors import CacheLayoutError, UnsupportedModel
from kvtransfer.hf.group import read_group
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill, score
from kvtransfer.hf.start import prefill_with_states
from tests.hf.architectures import MODELS
from tests.hf.test_start import hooks_of, layers_of

IDS = torch.randint(3, 500, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tiny: Callable[..., LanguageModel]) -> LanguageModel:
    architecture, config = MODELS[request.param]
    return tiny(architecture, **config)


def test_a_group_from_its_state_is_bit_for_bit_that_part_of_a_prefill(
    model: LanguageModel,
) -> None:
    whole, states = prefill_with_states(model, IDS, range(4))

    for first, last in ((0, 3), (1, 2), (2, 3), (3, 3)):
        made = read_group(model, IDS, states[first], first=first, last=last)
        assert len(made) == last - first + 1
        for layer, (keys, values) in enumerate(made, first):
            assert torch.equal(keys, whole.keys[layer])
            assert torch.equal(values, whole.values[layer])
    bare = read_group(model, IDS, None, first=0, last=3)
    assert all(torch.equal(keys, whole.keys[i]) for i, (keys, _) in enumerate(bare))
    # The twin: it is the state that the numbers come from.
    other = read_group(model, IDS, states[1].flip(1), first=1, last=2)
    assert not torch.allclose(other[1][0], whole.keys[2], atol=0.1)


def test_layers_before_and_after_the_group_do_not_run(
    tiny: Callable[..., LanguageModel],
) -> None:
    model = tiny("llama")
    _, states = prefill_with_states(model, IDS, (1,))
    entered, left = list[int](), list[int]()
    hooks = []
    for index, layer in enumerate(layers_of(model)):
        inner: Any = layer
        hooks.append(inner.mlp.register_forward_pre_hook(lambda *_, i=index: entered.append(i)))
        hooks.append(inner.mlp.register_forward_hook(lambda *_, i=index: left.append(i)))
    try:
        read_group(model, IDS, states[1], first=1, last=2)
    finally:
        for hook in hooks:
            hook.remove()

    # Layer 0 once, of one token, to see what it answers with.
    assert entered == left == [0, 1]


def test_the_model_is_as_it_was_also_after_an_error(tiny: Callable[..., LanguageModel]) -> None:
    model = tiny("llama")
    before = score(model, IDS)
    _, states = prefill_with_states(model, IDS, (2,))
    read_group(model, IDS, states[2], first=2, last=3)

    def fail(*_: Any) -> None:
        raise RuntimeError("in the middle of a layer")

    hook = layers_of(model)[2].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        read_group(model, IDS, states[2], first=2, last=3)
    hook.remove()

    assert hooks_of(model) == 0
    assert not any("forward" in vars(layer) for layer in layers_of(model))
    assert torch.equal(score(model, IDS), before)


def test_a_forward_of_the_layers_own_is_put_back(tiny: Callable[..., LanguageModel]) -> None:
    model = tiny("llama")
    whole, states = prefill_with_states(model, IDS, (1,))
    layer: Any = layers_of(model)[0]
    wrapped = layer.forward

    def own(*given: Any, **named: Any) -> Any:
        return wrapped(*given, **named)

    layer.forward = own
    made = read_group(model, IDS, states[1], first=1, last=1)

    assert torch.equal(made[0][0], whole.keys[1])
    assert layer.forward is own


@pytest.mark.parametrize(
    ("first", "last", "says"),
    [
        (2, 1, "layers 2 to 1 are none"),
        (0, 4, "has 4"),
        (-1, 2, "has 4"),
        (1, 2, "without a state"),
    ],
)
def test_groups_that_are_none_are_a_mistake(
    tiny: Callable[..., LanguageModel], first: int, last: int, says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        read_group(tiny("llama"), IDS, None, first=first, last=last)


def test_a_state_of_other_tokens_is_refused(tiny: Callable[..., LanguageModel]) -> None:
    model = tiny("llama")
    _, states = prefill_with_states(model, IDS, (1,))

    with pytest.raises(CacheLayoutError, match=r"\(2, 24, 64\) for ids of shape \(2, 20\)"):
        read_group(model, IDS[:, :20], states[1], first=1, last=2)
    with pytest.raises(CacheLayoutError, match="empty prefix"):
        read_group(model, IDS[:, :0], None, first=0, last=2)


def test_layers_that_cannot_be_told_apart_are_refused_with_another_way(
    tiny: Callable[..., LanguageModel],
) -> None:
    model = tiny("llama")
    _, states = prefill_with_states(model, IDS, (1,))
    inner: Any = model.module.base_model
    inner.layers = nn.Sequential(*inner.layers)

    prefill(model, IDS)
    with pytest.raises(UnsupportedModel, match="no list of 4 layers") as caught:
        read_group(model, IDS, states[1], first=1, last=2)
    assert "tokens instead" in str(caught.value.hint)
