"""A start is the beginning of a prefill: the same numbers, and nothing run that is not needed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kvtransfer.errors import CacheLayoutError, UnsupportedModel
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill, score
from kvtransfer.hf.start import Start, begin, prefill_with_states, start_of, width

IDS = torch.randint(3, 500, (2, 24), generator=torch.Generator().manual_seed(0))

GPT: dict[str, Any] = {"n_layer": 4, "n_head": 4, "n_embd": 64}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "windows": (
        "gemma3_text",
        {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8},
    ),
    "windowed": ("mistral", {"sliding_window": 8}),
    "learned positions": ("gpt2", GPT),
    "partial": ("phi", {"partial_rotary_factor": 0.5}),
    "fused": ("gpt_neox", {"rotary_pct": 0.5}),
    "parallel": ("gptj", {"rotary_dim": 8}),
    "alibi": ("bloom", {}),
    "experts, as many as layers": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "some layers without": ("smollm3", {"no_rope_layer_interval": 2}),
    "eager": ("llama", {"attn_implementation": "eager"}),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tiny: Callable[..., LanguageModel]) -> LanguageModel:
    architecture, config = MODELS[request.param]
    return tiny(architecture, **config)


def layers_of(model: LanguageModel) -> nn.ModuleList:
    base = model.module.base_model
    found = getattr(base, "layers", None) or getattr(base, "h", None)
    assert isinstance(found, nn.ModuleList)
    return found


def same(one: Start, other: Start) -> bool:
    pairs = zip(
        (*one.cache.keys, *one.cache.values, one.state),
        (*other.cache.keys, *other.cache.values, other.state),
        strict=True,
    )
    first = zip(
        (*one.first.keys, *one.first.values), (*other.first.keys, *other.first.values), strict=True
    )  # of one token alone, or among others
    return (
        len(one.cache) == len(other.cache)
        and all(torch.equal(a, b) for a, b in pairs)
        and all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in first)
    )


@pytest.mark.parametrize("layers", [0, 1, 3])
def test_a_start_is_the_beginning_of_a_prefill_bit_for_bit(
    model: LanguageModel, layers: int
) -> None:
    whole, states = prefill_with_states(model, IDS, (layers,))

    begun = begin(model, IDS, layers=layers)

    assert len(begun.cache) == layers + 1
    assert begun.state.shape == (2, 24, width(model))
    assert same(begun, start_of(whole, states, layers))
    assert (len(begun.first), begun.first.tokens) == (4, 1)
    assert begun.cache.model == model.spec.identity
    assert torch.equal(begun.cache.positions, whole.positions)
    content, expected = begun.cache.content(), whole.content()
    assert all(map(torch.equal, content.keys, expected.keys[: layers + 1]))
    # And it is of this text: another has another.
    assert not same(begun, begin(model, IDS.flip(1), layers=layers))


def test_states_are_those_that_enter_the_layers_and_watching_changes_no_cache(
    model: LanguageModel,
) -> None:
    module: Any = model.module
    with torch.no_grad():
        states = module.base_model(IDS, output_hidden_states=True).hidden_states

    cache, seen = prefill_with_states(model, IDS, (2, 0))

    assert sorted(seen) == [0, 2]
    for layer in (0, 2):
        torch.testing.assert_close(seen[layer], states[layer])
    assert not torch.allclose(seen[0], seen[2], rtol=0.1)
    plain = prefill(model, IDS)
    assert all(map(torch.equal, (*cache.keys, *cache.values), (*plain.keys, *plain.values)))
    assert prefill_with_states(model, IDS, ())[1] == {}


@pytest.mark.parametrize("layers", [0, 2])
def test_later_layers_never_run_and_the_last_one_does_not_finish(
    model: LanguageModel, layers: int
) -> None:
    entered, left = list[int](), list[int]()
    hooks = []
    for index, layer in enumerate(layers_of(model)):
        hooks.append(layer.register_forward_pre_hook(lambda *_, i=index: entered.append(i)))
        hooks.append(layer.register_forward_hook(lambda *_, i=index: left.append(i)))
    try:
        begin(model, IDS, layers=layers)
        first = [0, 1, 2, 3]  # of the first token alone, afterwards
        assert entered == [*range(layers + 1), *first]
        assert left == [*range(layers), *first]
        entered.clear()
        prefill(model, IDS)
        assert entered == [0, 1, 2, 3]
    finally:
        for hook in hooks:
            hook.remove()


def hooks_of(model: LanguageModel) -> int:
    return sum(
        len(module._forward_pre_hooks) + len(module._forward_hooks)
        for module in model.module.modules()
    )


def test_the_model_is_as_it_was(model: LanguageModel) -> None:
    before = score(model, IDS)

    begin(model, IDS, layers=1)
    prefill_with_states(model, IDS, (0, 3))

    assert hooks_of(model) == 0
    assert torch.equal(score(model, IDS), before)


def test_the_model_is_as_it_was_also_after_an_error(tiny: Callable[..., LanguageModel]) -> None:
    model = tiny("llama")

    def fail(*_: Any) -> None:
        raise RuntimeError("in the middle of a layer")

    hook = layers_of(model)[1].register_forward_pre_hook(fail)
    for run in (
        lambda: begin(model, IDS, layers=2),
        lambda: prefill_with_states(model, IDS, (0,)),
    ):
        with pytest.raises(RuntimeError, match="in the middle of a layer"):
            run()
        assert hooks_of(model) == 1
    hook.remove()


@pytest.mark.parametrize("layers", [-1, 4, 99])
def test_layers_that_the_model_does_not_have_are_a_mistake(
    tiny: Callable[..., LanguageModel], layers: int
) -> None:
    model = tiny("llama")

    with pytest.raises(ValueError, match=rf"a start of {layers} layers, and .* has 4"):
        begin(model, IDS, layers=layers)
    with pytest.raises(ValueError, match=rf"a start of {layers} layers"):
        prefill_with_states(model, IDS, (0, layers))


@pytest.mark.parametrize(
    ("ids", "says"),
    [(IDS[:, :0], "empty prefix"), (torch.zeros(1, 600, dtype=torch.long), "512")],
    ids=["none", "too many"],
)
def test_what_prefill_refuses_is_refused(
    tiny: Callable[..., LanguageModel], ids: torch.Tensor, says: str
) -> None:
    model = tiny("gpt2", **GPT, n_positions=512)

    for run in (lambda: prefill(model, ids), lambda: begin(model, ids, layers=1)):
        with pytest.raises(CacheLayoutError, match=says) as caught:
            run()
        assert caught.value.hint


def test_a_model_whose_layers_cannot_be_told_apart_has_no_start(
    tiny: Callable[..., LanguageModel],
) -> None:
    model = tiny("llama")
    inner: Any = model.module.base_model
    layers = list(inner.layers)
    inner.layers = nn.Sequential(*layers)  # works as well, and is no list of layers

    prefill(model, IDS)
    with pytest.raises(UnsupportedModel, match="no list of 4 layers") as caught:
        begin(model, IDS, layers=1)
    assert "without a start" in str(caught.value.hint)
