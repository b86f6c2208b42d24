"""A prefix moved is a prefix read there, or it is said why it cannot be moved."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kvtransfer.errors import CacheLayoutError, IncompatibleModels, RotationError
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.relocate import relocate
from kvtransfer.hf.run import prefill, score
from tests.theorems.ropes import LONGROPE

IDS = torch.arange(5, 65, 3)[None]
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}


def test_moving_there_and_back_changes_nothing(model: LanguageModel) -> None:
    cache = prefill(model, IDS)

    moved = relocate(model, cache, 200)
    back = relocate(model, moved, 0)

    assert torch.equal(moved.positions, cache.positions + 200)
    assert moved.model == model.spec.identity
    assert not torch.allclose(moved.keys[0], cache.keys[0], atol=0.1)
    for near, exact in zip(back.keys, cache.keys, strict=True):
        torch.testing.assert_close(near, exact, atol=1e-5, rtol=1e-5)
    assert all(map(torch.equal, moved.values, cache.values))
    assert relocate(model, cache, 0) is cache
    assert relocate(model, cache.prefix(0), 7).tokens == 0


def test_a_moved_prefix_gives_the_same_logits(model: LanguageModel) -> None:
    prefix, live = IDS.split([12, 8], dim=1)
    cache = prefill(model, prefix)

    torch.testing.assert_close(
        score(model, live, relocate(model, cache, 300)),
        score(model, live, cache),
        atol=1e-4,
        rtol=1e-4,
    )


def test_a_moved_prefix_is_as_exact_as_it_was_and_a_graft_as_approximate(
    model: LanguageModel,
) -> None:
    cache = prefill(model, IDS)
    graft = replace(cache, approximate="read without the text before it")

    assert relocate(model, cache, 200).approximate is None
    assert relocate(model, graft, 200).approximate == "read without the text before it"


@pytest.mark.parametrize(
    ("architecture", "says"), [("gpt2", "inside keys and values"), ("bloom", "attention scores")]
)
def test_positions_that_no_rotation_carries_cannot_be_changed(
    tiny: Callable[..., LanguageModel], architecture: str, says: str
) -> None:
    model = tiny(architecture)
    cache = prefill(model, IDS)

    with pytest.raises(RotationError, match=says) as caught:
        relocate(model, cache, 8)

    assert "prefill the text" in str(caught.value.hint)
    assert relocate(model, cache, 0) is cache


def test_chunks_are_counted_from_0(tiny: Callable[..., LanguageModel]) -> None:
    model = tiny("llama4_text", attention_chunk_size=8)

    with pytest.raises(RotationError, match="chunks of 8 positions"):
        relocate(model, prefill(model, IDS), 8)


def test_no_move_crosses_the_length_at_which_the_table_changes(
    tiny: Callable[..., LanguageModel],
) -> None:
    model = tiny("llama", rope_parameters=LONGROPE)
    cache = prefill(model, IDS)
    assert relocate(model, cache, 128 - 20).tokens == 20

    with pytest.raises(RotationError, match=r"an end at 20 to one at 129 it crosses 128 tokens"):
        relocate(model, cache, 129 - 20)


@pytest.mark.parametrize(
    ("rope", "limit"), [(LONGROPE, 128), (DYNAMIC, 64)], ids=["longrope", "dynamic"]
)
def test_no_text_is_read_on_across_that_length(
    tiny: Callable[..., LanguageModel], rope: dict[str, object], limit: int
) -> None:
    more = {"max_position_embeddings": 64} if rope is DYNAMIC else {}
    model = tiny("llama", rope_parameters=rope, **more)
    ids = torch.arange(limit + 20)[None] % 500 + 3
    cache = prefill(model, ids[:, : limit - 4])
    assert score(model, ids[:, :4], cache).shape[1] == 4

    with pytest.raises(CacheLayoutError, match=f"changes beyond {limit}") as caught:
        score(model, ids[:, :5], cache)

    assert str(limit) in str(caught.value.hint)
    whole = prefill(model, ids)  # in one go it is turned by one table, which travels with it
    with pytest.raises(CacheLayoutError, match=f"changes beyond {limit}"):
        score(model, ids[:, :2], whole.prefix(limit - 8))


@pytest.mark.parametrize("rope", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_a_prefix_that_was_cut_from_a_longer_text_is_not_moved(
    tiny: Callable[..., LanguageModel], rope: dict[str, object]
) -> None:
    more = {"max_position_embeddings": 64} if rope is DYNAMIC else {}
    model = tiny("llama", rope_parameters=rope, **more)
    long = prefill(model, torch.arange(150)[None] % 500 + 3)

    with pytest.raises(CacheLayoutError, match="another table") as caught:
        relocate(model, long.prefix(20), 8)

    assert "cut from a longer text" in str(caught.value.hint)


def test_beyond_the_length_longrope_reads_on_and_dynamic_does_not(
    tiny: Callable[..., LanguageModel],
) -> None:
    ids = torch.arange(160)[None] % 500 + 3
    long = tiny("llama", rope_parameters=LONGROPE)
    with torch.no_grad():
        joint = long.module(ids).logits[:, 150:]

    split = score(long, ids[:, 150:], prefill(long, ids[:, :150]))

    torch.testing.assert_close(split, joint, atol=1e-4, rtol=1e-4)
    grows = tiny("llama", rope_parameters=DYNAMIC, max_position_embeddings=64)
    with pytest.raises(CacheLayoutError, match="dynamic"):
        score(grows, ids[:, 150:], prefill(grows, ids[:, :150]))


def test_it_must_be_the_models_own_cache_and_end_within_its_context(
    model: LanguageModel, tiny: Callable[..., LanguageModel]
) -> None:
    cache = prefill(model, IDS)

    with pytest.raises(IncompatibleModels):
        relocate(tiny("llama", num_hidden_layers=2, seed=5), cache, 3)
    with pytest.raises(CacheLayoutError, match="at most 512"):
        relocate(model, cache, 500)
    with pytest.raises(RotationError, match="no position -1"):
        relocate(model, cache, -1)
    with pytest.raises(RotationError, match="no record"):
        relocate(model, replace(cache, rotations=None), 3)
