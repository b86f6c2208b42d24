"""A pair of tiny models of different shapes, and a random mapping between them."""

from collections.abc import Callable

import pytest
import torch

from kvtransfer.fitting.affine import Affine, LowRank, Map
from kvtransfer.fitting.layer_map import LayerMap
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.hf.model import LanguageModel

MakeMapping = Callable[..., KVMapping]


@pytest.fixture(scope="session")
def source(tiny: Callable[..., LanguageModel]) -> LanguageModel:
    """Three layers of two heads of 16."""
    return tiny("llama", seed=1, num_hidden_layers=3)


@pytest.fixture(scope="session")
def target(tiny: Callable[..., LanguageModel]) -> LanguageModel:
    """Two layers of four heads of 8."""
    return tiny("qwen3", seed=2, num_hidden_layers=2, num_key_value_heads=4, head_dim=8)


@pytest.fixture(scope="session")
def tuned(tiny: Callable[..., LanguageModel]) -> LanguageModel:
    """Other weights in the source's shape."""
    return tiny("llama", seed=8, num_hidden_layers=3)


@pytest.fixture(scope="session")
def make_mapping(source: LanguageModel, target: LanguageModel) -> MakeMapping:
    """Random maps from ``source`` to ``target``, whole or of a rank."""

    def make(*, rank: int | None = None, shuffled: bool = True) -> KVMapping:
        random = torch.Generator().manual_seed(0)

        def one(p: int, q: int = 32) -> Map:
            weight, bias = torch.randn(p, q, generator=random), torch.randn(q, generator=random)
            if rank is None:
                return Affine(weight, bias)
            return LowRank(weight[:, :rank].clone(), weight[:rank].clone(), bias)

        def layers() -> tuple[LayerMap, ...]:
            return LayerMap((0, 2), one(64), one(64)), LayerMap((1,), one(32), one(32))

        return KVMapping(
            source=source.spec,
            target=target.spec,
            layers=layers(),
            rotate=target.rotary,
            target_config=target.module.config.to_dict(),
            shuffled=layers() if shuffled else (),
            settings={"solver": "none", "layers": "auto", "tokens": 0},
            quality={"held-out R² of keys": 0.25},
            provenance={"command": "pytest", "commit": None},
        )

    return make
