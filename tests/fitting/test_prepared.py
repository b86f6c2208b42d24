"""A prepared mapping is the mapping, in another layout: bit for bit, or as near as its weights."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvtransfer.errors import CacheLayoutError, IncompatibleModels
from kvtransfer.fitting.affine import Affine, Corrected, LowRank, Map, PerHead
from kvtransfer.fitting.fit import fit
from kvtransfer.fitting.layer_map import LayerMap
from kvtransfer.fitting.network import Mlp
from kvtransfer.fitting.prepared import Int8Matrix, PreparedMapping, Weights
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.texts import builtin
from kvtransfer.fitting.transfer import mapped
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill
from kvtransfer.hf.start import begin

from .conftest import MakeMapping

NEAR: dict[Weights, float] = {"bfloat16": 0.02, "int8": 0.03}
"""Of the size of a block, what its rounding costs."""


@pytest.fixture
def cache(source: LanguageModel) -> KVCache:
    return prefill(source, torch.arange(14).view(2, 7) + 20)


def blocks(cache: KVCache) -> tuple[Tensor, ...]:
    return (*cache.keys, *cache.values)


def apart(a: KVCache, b: KVCache) -> float:
    return max(float((x - y).norm() / y.norm()) for x, y in zip(blocks(a), blocks(b), strict=True))


def test_in_float32_it_is_the_mapping_bit_for_bit(
    make_mapping: MakeMapping, cache: KVCache
) -> None:
    mapping = make_mapping()

    made, wanted = PreparedMapping.of(mapping)(cache), mapping(cache)

    assert all(map(torch.equal, blocks(made), blocks(wanted)))
    assert (made.model, made.approximate) == (wanted.model, wanted.approximate)
    assert torch.equal(made.positions, wanted.positions)


@pytest.mark.parametrize(("weights", "near"), NEAR.items())
def test_in_fewer_bytes_it_is_nearly_the_mapping(
    make_mapping: MakeMapping, cache: KVCache, weights: Weights, near: float
) -> None:
    mapping = make_mapping()
    whole, small = PreparedMapping.of(mapping), PreparedMapping.of(mapping, weights)

    error = apart(small(cache), mapping(cache))

    assert 0 < error < near
    assert small.nbytes < 0.6 * whole.nbytes


def test_a_kind_of_small_weights_is_not_lost_beside_one_of_large(
    make_mapping: MakeMapping, cache: KVCache
) -> None:
    """Keys are read from keys with weights of hundreds, values from all with weights near one: on
    one scale some of the latter would round to nothing."""
    drawn = torch.Generator().manual_seed(1)
    like = make_mapping()

    def layer(sources: tuple[int, ...]) -> LayerMap:
        size = (64 * len(sources), 32)
        keys, values = (torch.randn(size, generator=drawn) for _ in range(2))
        is_key = (torch.arange(size[0]) // 32 % 2 == 0)[:, None]
        return LayerMap(
            sources,
            Affine(keys * torch.where(is_key, 300.0, 0.01), torch.zeros(32)),
            Affine(values, torch.zeros(32)),
        )

    mapping = replace(like, layers=(layer((0, 2)), layer((1,))), features="both", shuffled=())

    error = apart(PreparedMapping.of(mapping, "int8")(cache), mapping(cache))

    assert error < NEAR["int8"]
    keys, values = mapping.layers[1].keys, mapping.layers[1].values
    assert isinstance(keys, Affine)
    assert isinstance(values, Affine)
    held = Int8Matrix.of(torch.cat([keys.weight, values.weight], dim=1))
    back = (held.wide(torch.float32) * held.columns)[:, 32:]
    assert float((back - values.weight).norm() / values.weight.norm()) > 10 * NEAR["int8"]


@pytest.mark.parametrize("asked", [{"features": "both"}, {"before": 2}, {"start": 0}], ids=str)
def test_whatever_a_map_reads(
    source: LanguageModel, target: LanguageModel, cache: KVCache, asked: dict[str, Any]
) -> None:
    ids = torch.arange(14).view(2, 7) + 20
    settings = FitSettings(tokens=1_500, chunk=24, layers=2, **asked)
    mapping = fit(source, target, builtin("fit"), settings).mapping
    start = None if mapping.start is None else begin(target, ids, layers=mapping.start)

    made = PreparedMapping.of(mapping)(cache, start=start)

    # One product of both kinds may round otherwise than two.
    assert apart(made, mapping(cache, start=start)) < 1e-5
    by_transfer = mapped(PreparedMapping.of(mapping), cache, target, ids)
    assert all(map(torch.equal, blocks(by_transfer), blocks(made)))


def per_head(weight: Tensor, bias: Tensor) -> PerHead:
    reads = torch.stack([torch.arange(h, len(weight), 2) for h in (0, 1, 0, 1)])
    return PerHead(reads, torch.stack([weight[r, :8] for r in reads]), bias)


FORMS: dict[str, Callable[[Tensor, Tensor], Map]] = {
    "low rank": lambda weight, bias: LowRank(weight[:, :3], weight[:3], bias),
    "per head": per_head,
    "corrected": lambda weight, bias: Corrected(
        Affine(weight, bias), LowRank(weight[:, :2], weight[2:4], bias)
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_linear_form_becomes_a_matrix(
    make_mapping: MakeMapping, cache: KVCache, form: str
) -> None:
    like = make_mapping()

    def other(fitted: Map) -> Map:
        assert isinstance(fitted, Affine)
        return FORMS[form](fitted.weight, fitted.bias)

    mapping = replace(
        like,
        layers=tuple(
            replace(layer, keys=other(layer.keys), values=other(layer.values))
            for layer in like.layers
        ),
    )

    assert apart(PreparedMapping.of(mapping)(cache), mapping(cache)) < 1e-5


def test_layers_come_in_order_before_the_last_is_made(
    make_mapping: MakeMapping, cache: KVCache
) -> None:
    mapping = make_mapping()
    prepared = PreparedMapping.of(mapping)

    first = next(prepared.layers(cache))

    wanted = mapping(cache).content()
    assert torch.allclose(first[0], wanted.keys[0], atol=1e-4)
    assert torch.equal(first[1], wanted.values[0])


def test_what_cannot_be_prepared_is_refused(make_mapping: MakeMapping) -> None:
    mapping = make_mapping()
    layer = mapping.layers[0]
    sizes = {
        "mean": (64,),
        "scale": (64,),
        "direct": (64, 32),
        "inner": (64, 4),
        "inner_bias": (4,),
    }
    sizes |= {"middle": (4, 4), "middle_bias": (4,), "outer": (4, 32), "bias": (32,)}
    network = Mlp(**{name: torch.ones(size) for name, size in sizes.items()})

    with pytest.raises(ValueError, match="network"):
        PreparedMapping.of(
            replace(mapping, layers=(replace(layer, keys=network), *mapping.layers[1:]))
        )


def test_another_models_cache_is_refused(
    make_mapping: MakeMapping, tuned: LanguageModel, target: LanguageModel, cache: KVCache
) -> None:
    prepared = PreparedMapping.of(make_mapping(), "bfloat16")

    with pytest.raises(IncompatibleModels):
        prepared(prefill(tuned, torch.tensor([[20, 21]])))
    with pytest.raises(CacheLayoutError):
        prepared(replace(cache, keys=cache.keys[:2], values=cache.values[:2], rotations=None))


def test_a_prepared_mapping_has_no_control(
    make_mapping: MakeMapping, target: LanguageModel, cache: KVCache
) -> None:
    ids = torch.arange(14).view(2, 7) + 20

    with pytest.raises(ValueError, match="control"):
        mapped(PreparedMapping.of(make_mapping()), cache, target, ids, shuffled=True)
