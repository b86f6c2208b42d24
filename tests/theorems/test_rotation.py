"""Rotations come out of keys exactly, go back in, and are all that a position does to a key."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import DynamicCache

from kvtransfer.errors import RotationError
from kvtransfer.geometry.cache import KVCache
from kvtransfer.geometry.rotation import Rotation
from kvtransfer.geometry.spec import Pairing
from kvtransfer.hf.cache import read
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.call import cache_keyword
from kvtransfer.hf.run import prefill

from .compare import cache_error, is_still, relative_error, snapshot
from .prose import prose
from .ropes import LINEAR, LLAMA3, LONGROPE, YARN

MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "default": ("llama", {}, "k_proj"),
    "linear": ("llama", {"rope_parameters": LINEAR}, "k_proj"),
    "llama3": ("llama", {"rope_parameters": LLAMA3}, "k_proj"),
    "yarn": ("llama", {"rope_parameters": YARN}, "k_proj"),
    "longrope": ("llama", {"rope_parameters": LONGROPE}, "k_proj"),
    "k-norm": ("qwen3", {}, "k_norm"),
    "partial": ("phi", {}, "k_proj"),
    "interleaved": ("cohere", {}, "k_proj"),
    "interleaved-partial": ("glm", {}, "k_proj"),
    "by-layer-type": ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 2}, "k_norm"),
    "some-layers-without": ("smollm3", {}, "k_proj"),
}


@pytest.fixture(params=MODELS)
def case(
    request: pytest.FixtureRequest, tiny: Callable[..., LanguageModel]
) -> tuple[LanguageModel, str]:
    """A model, and the module whose output is rotated."""
    architecture, config, made_by = MODELS[request.param]
    return tiny(architecture, **config), made_by


def prefill_at(model: LanguageModel, ids: Tensor, start: int) -> KVCache:
    """What the model itself caches of ``ids`` at positions from ``start`` on."""
    positions = start + torch.arange(ids.shape[1])[None]
    cache = DynamicCache()
    with torch.no_grad():
        model.module(
            ids,
            position_ids=positions,
            attention_mask=torch.ones_like(ids),
            **{cache_keyword(model.module.forward): cache},
        )
    return read(cache, positions, rotations=model.rotary(positions))


def moved(model: LanguageModel, cache: KVCache, start: int) -> KVCache:
    """The same tokens, turned to positions from ``start`` on."""
    positions = start + torch.arange(cache.tokens)[None]
    content = replace(cache.content(), positions=positions)
    return content.rotated(model.rotary(positions))


def test_content_keys_are_what_the_projection_made(case: tuple[LanguageModel, str]) -> None:
    """The one test that would catch a wrong convention, not just a wrong inverse."""
    model, made_by = case
    made: list[Tensor] = []

    def note(module: nn.Module, given: Any, output: Tensor) -> None:
        made.append(output)

    hooks = [
        part.register_forward_hook(note)
        for name, part in model.module.named_modules()
        if name.endswith(made_by)
    ]
    cache = prefill(model, prose(model, 48))
    for hook in hooks:
        hook.remove()

    assert len(made) == len(cache)
    for keys, raw, layer in zip(cache.content().keys, made, model.spec.layers, strict=True):
        if raw.shape != keys.shape:  # Gemma 3 alone has moved the heads forward by then
            raw = raw.view(1, 48, layer.kv_heads, layer.key_dim).transpose(1, 2)
        assert relative_error(keys, raw) < 1e-6


def test_the_other_pairing_would_give_other_keys(case: tuple[LanguageModel, str]) -> None:
    model, _ = case
    cache = prefill(model, prose(model, 48))
    assert cache.rotations is not None
    wrong = replace(cache, rotations=tuple(map(with_the_other_pairing, cache.rotations)))

    for right, other, rotation in zip(
        cache.content().keys, wrong.content().keys, cache.rotations, strict=True
    ):
        assert rotation is None or relative_error(other, right) > 0.1


def with_the_other_pairing(rotation: Rotation | None) -> Rotation | None:
    if rotation is None:
        return None
    return replace(rotation, pairing="half" if rotation.pairing == "interleaved" else "interleaved")


@pytest.mark.parametrize(
    ("name", "rotary_dim"), [("partial", 8), ("interleaved-partial", 8), ("default", 16)]
)
def test_dims_beyond_the_rotary_ones_are_cached_as_they_were_made(
    tiny: Callable[..., LanguageModel], name: str, rotary_dim: int
) -> None:
    architecture, config, _ = MODELS[name]
    model = tiny(architecture, **config)
    cache = prefill(model, prose(model, 48))

    content = cache.content()

    for cached, turned_back in zip(cache.keys, content.keys, strict=True):
        assert torch.equal(cached[..., rotary_dim:], turned_back[..., rotary_dim:])
        assert relative_error(cached[..., :rotary_dim], turned_back[..., :rotary_dim]) > 0.1


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("temperature", [1.0, 1.37], ids=["turned", "stretched"])
@given(
    pairs=st.integers(1, 8),
    passed=st.integers(0, 8),
    tokens=st.integers(1, 6),
    seed=st.integers(0, 2**16),
)
def test_undo_inverts_apply(
    pairing: Pairing, temperature: float, pairs: int, passed: int, tokens: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    angle = 100 * torch.rand(2, tokens, pairs, generator=random)
    rotation = Rotation(temperature * angle.cos(), temperature * angle.sin(), pairing)
    keys = torch.randn(2, 3, tokens, 2 * pairs + passed, generator=random)

    turned = rotation.apply(keys)

    assert relative_error(rotation.undo(turned), keys) < 1e-6
    assert torch.equal(turned[..., 2 * pairs :], keys[..., 2 * pairs :])
    assert torch.equal(rotation.undo(keys)[..., 2 * pairs :], keys[..., 2 * pairs :])
    norms = turned[..., : 2 * pairs].norm(dim=-1), keys[..., : 2 * pairs].norm(dim=-1)
    torch.testing.assert_close(norms[0], temperature * norms[1])


def test_taking_a_rotation_out_and_putting_it_back_changes_nothing(
    case: tuple[LanguageModel, str],
) -> None:
    model, _ = case
    cache = prefill(model, prose(model, 48))

    back = cache.content().rotated(model.rotary(cache.positions))

    assert cache_error(back, cache) < 1e-6


def test_keys_are_rotated_once_and_undone_once(tiny: Callable[..., LanguageModel]) -> None:
    model = tiny()
    cache = prefill(model, prose(model, 8))
    before = snapshot(cache)

    with pytest.raises(RotationError, match="rotated already"):
        cache.rotated(model.rotary(cache.positions))
    with pytest.raises(RotationError, match="content keys already"):
        cache.content().content()
    assert is_still(cache, before)


@pytest.mark.parametrize(("p", "q"), [(0, 100), (37, 5), (12, 12)])
def test_layer_0_moves_from_p_to_q_as_if_read_there(
    case: tuple[LanguageModel, str], p: int, q: int
) -> None:
    model, _ = case
    ids = prose(model, 24)
    here, there = prefill_at(model, ids, p), prefill_at(model, ids, q)

    arrived = moved(model, here, q)

    assert relative_error(arrived.keys[0], there.keys[0]) < 1e-5
    assert torch.equal(arrived.values[0], there.values[0])
    if p != q:
        assert relative_error(here.keys[0], there.keys[0]) > 0.1


def test_under_other_text_only_layer_0_moves(tiny: Callable[..., LanguageModel]) -> None:
    """Deeper layers have seen what came before: there, moving a cache is an approximation."""
    model = tiny()
    before, ids = prose(model, 72).split([48, 24], dim=1)
    whole = prefill(model, torch.cat((before, ids), dim=1))

    arrived = moved(model, prefill(model, ids), 48)

    assert relative_error(arrived.keys[0], whole.keys[0][:, :, 48:]) < 1e-5
    assert relative_error(arrived.keys[1], whole.keys[1][:, :, 48:]) > 0.1
