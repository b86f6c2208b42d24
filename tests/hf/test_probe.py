"""The self-test measures what positions do to keys, and refuses a model that does other things."""

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from kvtransfer.errors import UnsupportedModel
from kvtransfer.geometry.spec import LayerSpec, ModelSpec, Pairing, PositionScheme, RotationSpec
from kvtransfer.hf.probe import self_test
from kvtransfer.hf.spec import spec_of

from ..conftest import SIZES
from ..theorems.ropes import LINEAR, LLAMA3, LONGROPE, YARN

DEFAULT: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "default": DEFAULT,
    "linear": LINEAR,
    "dynamic": DYNAMIC,
    "llama3": LLAMA3,
    "yarn": YARN,
    "longrope": LONGROPE,
}
BROKEN = 2
"""The layer that does something else than the rest."""


def built(
    architecture: str = "llama", *, dtype: torch.dtype = torch.float32, **config: Any
) -> PreTrainedModel:
    """A random model with norms and biases that are not all alike."""
    described = AutoConfig.for_model(architecture, **(SIZES | config))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module: PreTrainedModel = AutoModelForCausalLM.from_config(described, dtype=dtype).eval()
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
    return module


def believed(module: PreTrainedModel) -> ModelSpec:
    """The spec as its config tells it."""
    return spec_of(module.config, name="tiny")


def attention(module: PreTrainedModel, layer: int = BROKEN) -> Any:
    decoder: Any = module.base_model
    return decoder.layers[layer].self_attn


def changed(spec: ModelSpec, layer: int | None = None, **fields: Any) -> ModelSpec:
    """The spec with other fields in one layer, or in all."""
    return replace(
        spec,
        layers=tuple(
            replace(each, **fields) if layer in (None, index) else each
            for index, each in enumerate(spec.layers)
        ),
    )


def with_rotation(spec: ModelSpec, layer: int | None = None, **fields: Any) -> ModelSpec:
    """The spec with other beliefs on how one layer's keys turn, or all layers'."""

    def other(index: int, each: LayerSpec) -> LayerSpec:
        if each.rotation is None or layer not in (None, index):
            return each
        return replace(each, rotation=replace(each.rotation, **fields))

    return replace(spec, layers=tuple(other(*pair) for pair in enumerate(spec.layers)))


# Attention that is broken on purpose

Change = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Positions, and the cosines and sines that the rotary module made of them; those to take."""


def retabled(module: PreTrainedModel, change: Change) -> None:
    """Give one layer other cosines and sines than the rotary module made."""
    decoder: Any = module.base_model
    asked: list[Tensor] = []

    def note(part: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        asked.append(named["position_ids"] if "position_ids" in named else given[1])

    def exchange(
        part: nn.Module, given: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        cos, sin = named["position_embeddings"]
        tables = tuple(table.to(cos.dtype) for table in change(asked[-1], cos, sin))
        return given, named | {"position_embeddings": tables}

    decoder.rotary_emb.register_forward_pre_hook(note, with_kwargs=True)
    attention(module).register_forward_pre_hook(exchange, with_kwargs=True)


OWN = 10_000.0 ** -(torch.arange(8) / 8)
"""The frequencies of the tiny model."""


def tables(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    angle = (positions[..., None] * frequencies).repeat(1, 1, 2)
    return angle.cos(), angle.sin()


def its_own(positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return tables(positions, OWN)


def not_at_all(positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ones_like(cos), torch.zeros_like(sin)


def backwards(positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return cos, -sin


def by_another_theta(positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return tables(positions, 20_000.0 ** -(torch.arange(8) / 8))


def as_yarn_would(positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The four slowest pairs turn at a quarter of their speed."""
    return tables(positions, torch.where(torch.arange(8) < 4, OWN, OWN / 4))


def one_place_off(positions: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the second token and on are counted from 1."""
    return tables(positions + positions.sign(), OWN)


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (not_at_all, "no rotation"),
        (backwards, "half 16d"),
        (by_another_theta, "half 16d"),
        (as_yarn_would, "half 16d"),
        (one_place_off, "half 16d"),
    ],
)
def test_a_layer_with_another_table_is_refused_with_the_size_of_the_disagreement(
    change: Change, seen: str
) -> None:
    module = built()
    spec = believed(module)
    self_test(module, spec)
    retabled(module, change)

    with pytest.raises(UnsupportedModel) as caught:
        self_test(module, spec)

    told = caught.value.message
    assert f"layer {BROKEN} of tiny" in told
    assert f"measured: {seen}." in told
    assert size_in(told, r"disagree by ([\d.e+-]+) of the largest key at position 511") > 0.1


def test_a_table_that_is_as_it_was_is_not_refused() -> None:
    """The hooks do no harm: what the tests around this one find is the change."""
    module = built()
    retabled(module, its_own)

    spec, _ = self_test(module, believed(module))

    assert spec == believed(module)


def test_a_layer_that_rotates_other_pairs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = built()
    modeling: Any = sys.modules[type(module).__module__]
    rotate = modeling.apply_rotary_pos_emb

    def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *more: Any) -> Any:
        if caller_of(attention(module)):
            return q, interleaved_turn(k, cos, sin)
        return rotate(q, k, cos, sin, *more)

    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", interleaved)

    with pytest.raises(UnsupportedModel, match=f"layer {BROKEN} of tiny") as caught:
        self_test(module, believed(module))

    assert "measured: interleaved 16d." in caught.value.message
    assert size_in(caught.value.message, r"disagree by ([\d.e+-]+)") > 0.1


def caller_of(part: Any) -> bool:
    """Whether the rotation was called from ``part``'s forward."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None and frame.f_back.f_back is not None
    return frame.f_back.f_back.f_locals.get("self") is part


def interleaved_turn(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = keys[..., 0::2], keys[..., 1::2]
    cos, sin = cos[:, None, :, :8], sin[:, None, :, :8]
    turned = torch.stack((left * cos - right * sin, right * cos + left * sin), dim=-1)
    return turned.flatten(-2)


def test_positions_in_the_values_are_refused() -> None:
    module = built()
    where: list[Tensor] = []

    def note(part: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        where.append(named["position_embeddings"][1])

    def add(part: nn.Module, given: tuple[Any, ...], output: Tensor) -> Tensor:
        return output + where[-1].repeat(1, 1, 2)

    attention(module).register_forward_pre_hook(note, with_kwargs=True)
    attention(module).v_proj.register_forward_hook(add)

    with pytest.raises(UnsupportedModel) as caught:
        self_test(module, believed(module))

    told = caught.value.message
    assert told.startswith(f"the values of layer {BROKEN} of tiny")
    assert size_in(told, r"change by ([\d.e+-]+) of the largest from position 0 to 511") > 0.1


def test_keys_with_a_weighted_norm_after_the_rotation_are_no_rotation_of_pairs() -> None:
    """What HunYuan does, in an architecture whose pairing we are not told."""
    module = built("hunyuan_v1_dense")

    with pytest.raises(UnsupportedModel, match="no rotation of pairs explains") as caught:
        self_test(module, believed(module))

    assert size_in(caught.value.message, r"the best leaves ([\d.e+-]+) of the largest key") > 0.05


def size_in(told: str, pattern: str) -> float:
    found = re.search(pattern, told)
    assert found is not None, told
    return float(found[1].rstrip("."))


# Configs that say another thing than the module does


@pytest.mark.parametrize("rotary_dim", [4, 8, 14])
def test_another_rotary_width_than_the_modules_is_refused(rotary_dim: int) -> None:
    module = built()

    with pytest.raises(UnsupportedModel, match=rf"16 numbers .* {rotary_dim} rotated dims"):
        self_test(module, with_rotation(believed(module), rotary_dim=rotary_dim))


def test_a_width_of_which_the_table_says_every_number_twice_is_refused_too() -> None:
    """A table of 8 is one of 8 pairs as well as one of 4 pairs, said twice: measuring decides."""
    module = built("phi")
    spec = believed(module)
    assert spec.layers[0].rotation is not None and spec.layers[0].rotation.rotary_dim == 8

    with pytest.raises(UnsupportedModel, match="layer 0 of tiny") as caught:
        self_test(module, with_rotation(spec, rotary_dim=16))

    assert "half 16d; measured: half 8d" in caught.value.message


def test_the_other_pairing_than_the_modules_is_refused() -> None:
    module = built()

    with pytest.raises(UnsupportedModel, match="layer 0 of tiny") as caught:
        self_test(module, with_rotation(believed(module), pairing="interleaved"))

    assert "interleaved 16d; measured: half 16d" in caught.value.message


def test_a_layer_believed_to_have_no_rope_is_refused() -> None:
    module = built()

    with pytest.raises(UnsupportedModel, match="layer 1 of tiny") as caught:
        self_test(module, changed(believed(module), 1, rotation=None))

    assert "by no rotation; measured: half 16d" in caught.value.message


def test_a_layer_believed_to_have_rope_that_has_none_is_refused() -> None:
    module = built("smollm3")
    spec = believed(module)
    assert [layer.rotation is None for layer in spec.layers] == [False, False, False, True]

    with pytest.raises(UnsupportedModel, match="layer 3 of tiny") as caught:
        self_test(module, changed(spec, 3, rotation=spec.layers[0].rotation))

    assert "half 16d; measured: no rotation" in caught.value.message


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (
            {"kv_heads": 4},
            "(32, 2, 1, 16) and values of shape (32, 2, 1, 16); its config describes"
            " (32, 4, 1, 16) and (32, 4, 1, 16)",
        ),
        ({"key_dim": 32}, "its config describes (32, 2, 1, 32) and (32, 2, 1, 16)"),
        ({"value_dim": 8}, "its config describes (32, 2, 1, 16) and (32, 2, 1, 8)"),
    ],
    ids=["kv_heads", "key_dim", "value_dim"],
)
def test_other_heads_than_the_modules_are_refused_with_both_shapes(
    fields: dict[str, Any], says: str
) -> None:
    module = built()

    with pytest.raises(UnsupportedModel, match="layer 1 of tiny") as caught:
        self_test(module, changed(believed(module), 1, **fields))

    assert says in caught.value.message


def test_another_number_of_layers_is_refused_with_both() -> None:
    module = built()
    spec = believed(module)

    with pytest.raises(UnsupportedModel, match="cache of 4 layers; its config describes 3"):
        self_test(module, replace(spec, layers=spec.layers[:3]))


# What the config leaves open, measuring fills in


@pytest.mark.parametrize(
    ("architecture", "pairing", "rotary_dim"),
    [
        ("llama", "half", 16),
        ("phi", "half", 8),
        ("gpt_neox", "half", 4),
        ("cohere", "interleaved", 16),
        ("glm", "interleaved", 8),
    ],
)
def test_an_unknown_pairing_is_measured(
    architecture: str, pairing: Pairing, rotary_dim: int
) -> None:
    module = built(architecture)
    known = believed(module)

    spec, rotary = self_test(module, with_rotation(known, pairing="unknown"))

    assert spec == known
    turns = {
        (layer.rotation.pairing, layer.rotation.rotary_dim)
        for layer in spec.layers
        if layer.rotation is not None
    }
    assert turns == {(pairing, rotary_dim)}
    rotations = rotary(torch.arange(3)[None])
    assert all(each is not None and each.pairing == pairing for each in rotations)


@pytest.mark.parametrize("architecture", ["smollm3", "cohere2", "exaone4", "llama4_text"])
def test_layers_without_rope_are_found(architecture: str) -> None:
    module = built(architecture)
    known = believed(module)
    rotation = known.layers[0].rotation
    assert rotation is not None

    # As if the config said nothing of it.
    spec, _ = self_test(module, changed(known, rotation=replace(rotation, pairing="unknown")))

    assert [layer.rotation is None for layer in spec.layers] == [False, False, False, True]
    assert spec.positions == "rotary"


def test_a_model_none_of_whose_layers_turns_has_no_positions() -> None:
    module = built("smollm3", no_rope_layers=[0, 0, 0, 0])
    unsure = RotationSpec(type="default", theta=10_000.0, rotary_dim=16, pairing="unknown")

    spec, rotary = self_test(module, changed(believed(module), rotation=unsure))

    assert spec.positions == "none"
    assert rotary(torch.arange(3)[None]) == (None,) * 4


@pytest.mark.parametrize(("architecture", "positions"), [("gpt2", "learned"), ("bloom", "alibi")])
def test_positions_that_are_known_to_sit_elsewhere_are_left_alone(
    architecture: str, positions: PositionScheme
) -> None:
    module = built(architecture, n_layer=4, n_head=4, n_embd=64)

    spec, _ = self_test(module, believed(module))

    assert spec == believed(module)
    assert spec.positions == positions


def test_learned_positions_that_nobody_told_us_of_are_refused() -> None:
    module = built("gpt2", n_layer=4, n_head=4, n_embd=64)

    with pytest.raises(UnsupportedModel, match=r"values of layer 0 of tiny .* change by"):
        self_test(module, replace(believed(module), positions="unknown"))


# What is no disagreement


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rope", ROPES)
def test_rounding_is_no_disagreement(rope: str, dtype: torch.dtype) -> None:
    module = built(rope_parameters=ROPES[rope], dtype=dtype)

    spec, _ = self_test(module, believed(module))

    assert spec == believed(module)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rope", ROPES)
def test_nor_is_it_with_the_module_cast_after_loading(rope: str, dtype: torch.dtype) -> None:
    """Its frequencies are then rounded too; the model turns its keys by just those."""
    module: Any = built(rope_parameters=ROPES[rope])
    module.to(dtype=dtype)

    spec, _ = self_test(module, believed(module))

    assert spec == believed(module)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "change", [not_at_all, backwards, by_another_theta, as_yarn_would, one_place_off]
)
def test_rounding_hides_no_disagreement(change: Change, dtype: torch.dtype) -> None:
    module = built(dtype=dtype)
    retabled(module, change)

    with pytest.raises(UnsupportedModel, match=f"layer {BROKEN} of tiny"):
        self_test(module, believed(module))


@pytest.mark.parametrize("dead", [slice(3, 4), slice(3, None, 8), slice(0, 8), slice(0, 16)])
def test_dead_dims_are_no_disagreement(dead: slice) -> None:
    """Gemma 3 has a few: its norm's weight is zero there, and zero turns as it likes."""
    module = built("qwen3")
    with torch.no_grad():
        attention(module).k_norm.weight[dead] = 0

    known = believed(module)

    assert self_test(module, known)[0] == known
    if dead != slice(0, 16):  # of keys that are all zero there is nothing to measure
        assert self_test(module, with_rotation(known, pairing="unknown"))[0] == known


# State


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_a_module_with_a_changing_table_is_left_as_it_was(rope: str) -> None:
    module: Any = built(rope_parameters=ROPES[rope])
    rotary = module.base_model.rotary_emb
    before = {name: buffer.clone() for name, buffer in rotary.named_buffers()}
    ids = torch.arange(3, 43)[None]
    with torch.no_grad():
        logits = module(ids, use_cache=False).logits

    self_test(module, believed(module))

    after = dict(rotary.named_buffers())
    assert after.keys() == before.keys()
    for name, buffer in before.items():
        assert torch.equal(after[name], buffer), name
    with torch.no_grad():
        assert torch.equal(module(ids, use_cache=False).logits, logits)
