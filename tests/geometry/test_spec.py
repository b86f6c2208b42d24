"""A spec survives JSON, and a malformed one is refused."""

import json
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.errors import ArtifactError
from kvtransfer.geometry.spec import LayerSpec, ModelSpec, RotationSpec

NUMBERS = st.integers(1, 512)
ROTATIONS = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["default", "llama3", "yarn", "longrope"]),
        "theta": st.none() | st.floats(1, 1e7),
        "rotary_dim": st.just(2),
        "pairing": st.sampled_from(["half", "interleaved", "unknown"]),
        "scaling": st.sampled_from(
            [(), (("factor", 4.0),), (("long_factor", (1.0, 2.5)), ("short_factor", None))]
        ),
        "fixed_up_to": st.none() | NUMBERS,
    }
)
LAYERS = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["full", "sliding", "chunked", "latent"]),
        "kv_heads": NUMBERS,
        "key_dim": st.integers(2, 512),
        "value_dim": NUMBERS,
        "window": st.none() | NUMBERS,
        "rotation": st.none() | ROTATIONS,
    }
)
SPECS = st.fixed_dictionaries(
    {
        "name": st.text(max_size=8),
        "architecture": st.just("llama"),
        "layers": st.lists(LAYERS, min_size=1, max_size=4),
        "dtype": st.sampled_from(["float32", "bfloat16"]),
        "positions": st.sampled_from(["rotary", "learned", "alibi", "none", "unknown"]),
        "tokenizer": st.none() | st.just("0123456789abcdef"),
        "weights": st.none() | st.just("fedcba9876543210"),
    }
)


def made(described: dict[str, Any]) -> ModelSpec:
    """A spec from its fields (a strategy must not make one: the type checker draws at random)."""
    layers = tuple(
        LayerSpec(**(each | {"rotation": each["rotation"] and RotationSpec(**each["rotation"])}))
        for each in described["layers"]
    )
    return ModelSpec(**(described | {"layers": layers}))


def spec(*layers: LayerSpec, **more: Any) -> ModelSpec:
    one = LayerSpec(kind="full", kv_heads=2, key_dim=16, value_dim=16)
    given: dict[str, Any] = {"name": "m", "architecture": "llama", "dtype": "float32"}
    return ModelSpec(layers=layers or (one,), **({"positions": "none"} | given | more))


@settings(max_examples=40)
@given(SPECS)
def test_a_spec_comes_back_from_json_as_it_went(described: dict[str, Any]) -> None:
    original = made(described)

    assert ModelSpec.from_dict(json.loads(json.dumps(original.to_dict()))) == original


@settings(max_examples=40)
@given(SPECS)
def test_numbers_per_token_are_those_of_the_layers_that_keep_any(described: dict[str, Any]) -> None:
    kept = [each for each in described["layers"] if each["kind"] != "latent"]

    expected = sum(each["kv_heads"] * (each["key_dim"] + each["value_dim"]) for each in kept)

    assert made(described).numbers_per_token == expected


def test_a_llamas_numbers_per_token() -> None:
    """Llama-3-8B: 32 layers × 8 heads × 128 dims × keys and values, 128 KiB in bfloat16."""
    layer = LayerSpec(kind="full", kv_heads=8, key_dim=128, value_dim=128)

    assert spec(*(layer,) * 32).numbers_per_token * 2 == 128 * 1024


def test_seeing_the_weights_changes_nothing_else() -> None:
    unseen = spec(tokenizer="t")

    seen = unseen.seen_with(weights="w", dtype="bfloat16")

    assert (seen.weights, seen.dtype) == ("w", "bfloat16")
    assert seen == spec(tokenizer="t", weights="w", dtype="bfloat16")


@pytest.mark.parametrize("layers", [[], None, [{}], [7], "full"])
def test_malformed_layers_are_refused(layers: Any) -> None:
    with pytest.raises(ArtifactError, match="spec is malformed") as caught:
        ModelSpec.from_dict(spec().to_dict() | {"layers": layers})

    assert caught.value.hint


def test_a_model_needs_layers_and_a_layer_needs_heads() -> None:
    with pytest.raises(ValueError, match="at least one layer"):
        ModelSpec(name="m", architecture="a", layers=(), dtype="float32", positions="none")
    with pytest.raises(ValueError, match="layer 0 has an empty head"):
        spec(LayerSpec(kind="full", kv_heads=2, key_dim=0, value_dim=16))


@pytest.mark.parametrize("dims", [0, 1, 7, -2])
def test_rotated_dims_come_in_pairs(dims: int) -> None:
    with pytest.raises(ValueError, match=f"{dims} rotated dims"):
        RotationSpec(type="default", theta=10_000.0, rotary_dim=dims, pairing="half")


def test_no_more_dims_are_rotated_than_a_key_has() -> None:
    turn = RotationSpec(type="default", theta=10_000.0, rotary_dim=18, pairing="half")

    with pytest.raises(ValueError, match="layer 0 rotates 18 of 16 key dims"):
        spec(LayerSpec(kind="full", kv_heads=2, key_dim=16, value_dim=16, rotation=turn))


def test_specs_need_no_torch() -> None:
    code = "import sys, kvtransfer.geometry.spec; print('torch' in sys.modules)"

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "False"
