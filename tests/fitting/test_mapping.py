"""A mapping takes caches of its own source to its own target, also after a stay on the disk."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from kvtransfer.errors import ArtifactError, CacheLayoutError, IncompatibleModels
from kvtransfer.fitting.affine import Affine, LowRank
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill, score

IDS = torch.arange(24)[None]


def matrices(mapping: KVMapping) -> Iterator[Tensor]:
    """Every tensor of every map, in a fixed order."""
    for layer in (*mapping.layers, *mapping.shuffled):
        for each in (layer.keys, layer.values):
            assert isinstance(each, Affine | LowRank)
            yield from (
                (each.weight, each.bias)
                if isinstance(each, Affine)
                else (each.down, each.up, each.bias)
            )


@pytest.mark.parametrize("rank", [None, 4], ids=["full", "rank 4"])
def test_a_float32_mapping_comes_back_bit_for_bit(
    make_mapping: Callable[..., KVMapping],
    source: LanguageModel,
    tmp_path: Path,
    rank: int | None,
) -> None:
    mapping = make_mapping(rank=rank)
    mapping.save_pretrained(tmp_path / "m")

    loaded = KVMapping.from_pretrained(tmp_path / "m")

    assert all(map(torch.equal, matrices(loaded), matrices(mapping)))
    assert isinstance(loaded.layers[0].keys, Affine if rank is None else LowRank)
    for field in ("source", "target", "quality", "provenance", "parameters"):
        assert getattr(loaded, field) == getattr(mapping, field)
    assert loaded.settings == {**mapping.settings, "storage": "float32"}
    cache = prefill(source, IDS)
    for shuffled in (False, True):
        ours, theirs = (each(cache, shuffled=shuffled) for each in (loaded, mapping))
        assert all(map(torch.equal, (*ours.keys, *ours.values), (*theirs.keys, *theirs.values)))


def int8_step(matrix: Tensor) -> Tensor:
    """Half of 1/127 of a column's largest number, all rows being of one size."""
    rows = matrix.square().mean(1, keepdim=True).sqrt()
    return rows * (matrix / rows).abs().amax(0) / 127 / 2 * 1.001


@pytest.mark.parametrize(
    ("dtype", "bytes_per_number"), [("float32", 4), ("bfloat16", 2), ("int8", 1)]
)
def test_narrow_storage_is_as_close_as_its_step_and_as_small_as_it_says(
    make_mapping: Callable[..., KVMapping],
    tmp_path: Path,
    dtype: Literal["float32", "bfloat16", "int8"],
    bytes_per_number: int,
) -> None:
    mapping = make_mapping()
    mapping.save_pretrained(tmp_path / "m", dtype=dtype)

    loaded = KVMapping.from_pretrained(tmp_path / "m")

    for ours, theirs in zip(matrices(loaded), matrices(mapping), strict=True):
        assert ours.dtype == torch.float32
        step = {
            "float32": torch.zeros(()),
            "bfloat16": theirs.abs() * 2**-8,
            "int8": int8_step(theirs) if theirs.ndim == 2 else torch.zeros(()),
        }[dtype]
        assert bool(((ours - theirs).abs() <= (step if ours.ndim == 2 else 0)).all())
    size = (tmp_path / "m" / "tensors.safetensors").stat().st_size
    weights = sum(each.numel() for each in matrices(mapping) if each.ndim == 2)
    assert size < weights * bytes_per_number * 1.4 + 4_096


def test_a_column_of_zeros_survives_int8(
    make_mapping: Callable[..., KVMapping], tmp_path: Path
) -> None:
    mapping = make_mapping()
    first = mapping.layers[0].keys
    assert isinstance(first, Affine)
    first.weight[:, 3] = 0

    mapping.save_pretrained(tmp_path / "m", dtype="int8")

    loaded = KVMapping.from_pretrained(tmp_path / "m").layers[0].keys
    assert isinstance(loaded, Affine)
    assert not loaded.weight[:, 3].any()
    assert loaded.weight[:, 4].any()


def test_the_card_says_what_it_is_and_for_whom(
    make_mapping: Callable[..., KVMapping], tmp_path: Path
) -> None:
    mapping = make_mapping()
    mapping.save_pretrained(tmp_path / "m")

    card = (tmp_path / "m" / "README.md").read_text(encoding="utf-8")

    for fact in (mapping.source.name, mapping.target.name, mapping.source.weights, "0.25"):
        assert str(fact) in card


def test_a_mapping_saved_without_its_control_says_so_when_asked_for_it(
    make_mapping: Callable[..., KVMapping], source: LanguageModel, tmp_path: Path
) -> None:
    make_mapping(shuffled=False).save_pretrained(tmp_path / "m")
    loaded = KVMapping.from_pretrained(tmp_path / "m")
    cache = prefill(source, IDS)

    loaded(cache)
    with pytest.raises(ArtifactError, match="without its shuffled control"):
        loaded(cache, shuffled=True)


def test_cached_and_content_keys_are_mapped_to_the_same(
    make_mapping: Callable[..., KVMapping], source: LanguageModel
) -> None:
    mapping, cache = make_mapping(), prefill(source, IDS)

    cached, content = mapping(cache), mapping(cache.content())

    assert cached.keys_are == content.keys_are == "cached"
    assert all(map(torch.equal, cached.keys, content.keys))


def test_what_is_mapped_is_the_targets_to_read(
    make_mapping: Callable[..., KVMapping], source: LanguageModel, target: LanguageModel
) -> None:
    mapped = make_mapping()(prefill(source, IDS))

    assert [block.shape for block in mapped.keys] == [(1, 4, 24, 8)] * 2
    assert mapped.model == target.spec.identity
    assert torch.equal(mapped.positions, torch.arange(24)[None])
    assert score(target, IDS[:, :3], mapped).shape == (1, 3, 512)


def test_each_token_is_mapped_by_itself(
    make_mapping: Callable[..., KVMapping], source: LanguageModel
) -> None:
    mapping, cache = make_mapping(), prefill(source, IDS)

    whole, part = mapping(cache).prefix(9), mapping(cache.prefix(9))

    for a, b in zip((*whole.keys, *whole.values), (*part.keys, *part.values), strict=True):
        torch.testing.assert_close(a, b)


def test_a_bfloat16_cache_is_mapped_in_float32_and_given_back_in_bfloat16(
    make_mapping: Callable[..., KVMapping], source: LanguageModel
) -> None:
    mapping, narrow = make_mapping(), prefill(source, IDS).to(dtype=torch.bfloat16)

    mapped, exact = mapping(narrow), mapping(narrow.to(dtype=torch.float32))

    assert mapped.dtype == torch.bfloat16
    for a, b in zip(mapped.values, exact.values, strict=True):
        assert torch.equal(a, b.to(torch.bfloat16))  # rounded once, at the end


def test_another_models_cache_is_refused_by_fingerprint(
    make_mapping: Callable[..., KVMapping],
    source: LanguageModel,
    tiny: Callable[..., LanguageModel],
) -> None:
    other = tiny("llama", seed=9, num_hidden_layers=3)

    with pytest.raises(IncompatibleModels) as caught:
        make_mapping()(prefill(other, IDS))

    assert str(other.spec.weights) in caught.value.message
    assert str(source.spec.weights) in caught.value.message


def misshaped(cache: KVCache, change: str) -> KVCache:
    if change == "layers":
        return replace(cache, keys=cache.keys[:2], values=cache.values[:2], rotations=None)
    blocks = {"heads": slice(0, 1), "tokens": slice(None)}.get(change, slice(None))
    keys = tuple(block[:, blocks] for block in cache.keys)
    values = tuple(block[:, blocks] for block in cache.values)
    if change == "key width":
        keys = tuple(block[..., :8] for block in keys)
    if change == "value width":
        values = tuple(block[..., :8] for block in values)
    return replace(cache, keys=keys, values=values, rotations=None, keys_are="content")


@pytest.mark.parametrize("change", ["layers", "heads", "key width", "value width"])
def test_a_cache_of_another_shape_is_refused_though_nobody_knows_its_model(
    make_mapping: Callable[..., KVMapping], source: LanguageModel, change: str
) -> None:
    anonymous = replace(misshaped(prefill(source, IDS), change), model=None)

    with pytest.raises(CacheLayoutError, match="this cache has") as caught:
        make_mapping()(anonymous)

    assert caught.value.hint


def test_ends_are_checked_with_a_hint_for_the_reverse_direction(
    make_mapping: Callable[..., KVMapping],
    source: LanguageModel,
    target: LanguageModel,
    tiny: Callable[..., LanguageModel],
) -> None:
    mapping, other = make_mapping(), tiny("llama", seed=9).spec

    mapping.check_ends(source.spec, target.spec)
    with pytest.raises(IncompatibleModels) as reversed_:
        mapping.check_ends(target.spec, source.spec)
    with pytest.raises(IncompatibleModels) as foreign:
        mapping.check_ends(source.spec, other)

    assert "one direction" in str(reversed_.value.hint)
    assert "fit a mapping for this pair" in str(foreign.value.hint)
    assert "the target's weights" in foreign.value.message
    for fingerprint in (target.spec.weights, other.weights):
        assert str(fingerprint) in foreign.value.message


def test_other_weights_of_the_same_shape_can_be_insisted_on_and_are_noted(
    make_mapping: Callable[..., KVMapping],
    source: LanguageModel,
    target: LanguageModel,
    tuned: LanguageModel,
) -> None:
    mapping = make_mapping()
    with pytest.raises(IncompatibleModels):
        mapping(prefill(tuned, IDS))

    insisted = mapping.insisting_on(tuned.spec, target.spec)

    insisted.check_ends(tuned.spec, target.spec)
    mapped = insisted(prefill(tuned, IDS))
    (note,) = insisted.notes
    for fingerprint in (source.spec.weights, tuned.spec.weights):
        assert str(fingerprint) in note
    assert mapped.note == note
    assert score(target, IDS[:, :3], mapped).shape[1] == 3
    assert mapping.insisting_on(source.spec, target.spec).notes == ()


def test_no_insisting_makes_another_shape_fit(
    make_mapping: Callable[..., KVMapping], source: LanguageModel, target: LanguageModel
) -> None:
    with pytest.raises(IncompatibleModels, match="only weights may differ") as caught:
        make_mapping().insisting_on(target.spec, target.spec)

    assert "the source of this mapping has" in caught.value.message


def test_a_cache_that_names_no_model_is_not_mapped(
    make_mapping: Callable[..., KVMapping], source: LanguageModel
) -> None:
    with pytest.raises(IncompatibleModels, match="does not say which model made it"):
        make_mapping()(replace(prefill(source, IDS), model=None))


def test_what_was_said_of_a_cache_is_said_of_the_mapped_one(
    make_mapping: Callable[..., KVMapping], source: LanguageModel
) -> None:
    noted = replace(prefill(source, IDS), note="dequantised from four bits")

    assert make_mapping()(noted).note == "dequantised from four bits"


def test_a_mapped_cache_says_that_it_is_one_after_what_was_amiss_before(
    make_mapping: Callable[..., KVMapping], source: LanguageModel
) -> None:
    mapping, read = make_mapping(), prefill(source, IDS)
    graft = replace(read, approximate="read without the text before it")

    assert mapping(read).approximate == f"mapped from {source.spec.name}"
    assert (
        mapping(graft).approximate
        == f"read without the text before it; mapped from {source.spec.name}"
    )


@pytest.mark.parametrize("end", ["source", "target"])
def test_the_same_weights_under_another_config_are_no_end_of_a_mapping(
    make_mapping: Callable[..., KVMapping],
    source: LanguageModel,
    target: LanguageModel,
    tiny: Callable[..., LanguageModel],
    end: str,
) -> None:
    mapping = make_mapping()
    if end == "source":
        other = tiny("llama", seed=1, num_hidden_layers=3, rms_norm_eps=0.5)
        assert other.spec.weights == source.spec.weights
        with pytest.raises(IncompatibleModels):
            mapping(prefill(other, IDS))
        ends = other.spec, target.spec
    else:
        other = tiny(
            "qwen3", seed=2, num_hidden_layers=2, num_key_value_heads=4, head_dim=8,
            hidden_act="relu",
        )  # fmt: skip
        assert other.spec.weights == target.spec.weights
        with pytest.raises(IncompatibleModels, match="fingerprint"):
            score(other, IDS[:, :3], mapping(prefill(source, IDS)))
        ends = source.spec, other.spec
    with pytest.raises(IncompatibleModels):
        mapping.check_ends(*ends)
    assert mapping.insisting_on(*ends).notes
