"""A spoilt prefix must be read as one: else nobody is reading the cache.

On a pair of gauge twins, where the mapped prefix as it is gives the native logits exactly.
"""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from kvtransfer.fitting.fit import fit
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.texts import builtin
from kvtransfer.geometry.cache import KVCache
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill, score
from kvtransfer.steering.edit import Intervention
from kvtransfer.steering.interventions import Ablate, ForgetRotation

from .compare import relative_error
from .prose import prose
from .twins import twin_of


@pytest.fixture(scope="module")
def model(tiny: Callable[..., LanguageModel]) -> LanguageModel:
    return tiny()


@pytest.fixture(scope="module")
def twin(model: LanguageModel) -> LanguageModel:
    return twin_of(model)


@pytest.fixture(scope="module")
def mapping(model: LanguageModel, twin: LanguageModel) -> KVMapping:
    settings = FitSettings(tokens=4096, chunk=64, layers=1, batch=16)
    return fit(model, twin, builtin("fit"), settings).mapping


@pytest.fixture(scope="module")
def prefix(model: LanguageModel) -> Tensor:
    return prose(model, 48)


@pytest.fixture(scope="module")
def live(model: LanguageModel) -> Tensor:
    return prose(model, 12, skip=48)


@pytest.fixture(scope="module")
def mapped(model: LanguageModel, mapping: KVMapping, prefix: Tensor) -> KVCache:
    return mapping(prefill(model, prefix))


@pytest.fixture(scope="module")
def native(twin: LanguageModel, prefix: Tensor, live: Tensor) -> Tensor:
    """The twin's logits on its own cache."""
    return score(twin, live, prefill(twin, prefix))


def test_no_edit_costs_nothing(
    twin: LanguageModel, mapped: KVCache, live: Tensor, native: Tensor
) -> None:
    assert relative_error(score(twin, live, mapped), native) < 1e-4


@pytest.mark.parametrize(
    "edit", [Ablate("keys"), Ablate("values"), Ablate(), ForgetRotation()], ids=repr
)
def test_a_spoilt_prefix_is_far_from_the_native_one(
    edit: Intervention, twin: LanguageModel, mapped: KVCache, live: Tensor, native: Tensor
) -> None:
    assert relative_error(score(twin, live, edit(mapped)), native) > 0.1


def test_maps_fitted_on_shuffled_rows_are_far_from_the_native_prefix(
    model: LanguageModel,
    twin: LanguageModel,
    mapping: KVMapping,
    prefix: Tensor,
    live: Tensor,
    native: Tensor,
) -> None:
    shuffled = mapping(prefill(model, prefix), shuffled=True)

    assert relative_error(score(twin, live, shuffled), native) > 0.1


def test_without_a_prefix_the_logits_are_far_from_the_native_ones(
    twin: LanguageModel, live: Tensor, native: Tensor
) -> None:
    assert relative_error(score(twin, live), native) > 0.1


@pytest.mark.parametrize("part", [Ablate("keys"), Ablate()], ids=repr)
def test_zeroed_keys_still_take_their_share_of_the_softmax(
    part: Ablate, twin: LanguageModel, mapped: KVCache, live: Tensor
) -> None:
    removed = score(twin, live)

    assert relative_error(score(twin, live, part(mapped)), removed) > 0.1


def test_n_zeroed_tokens_take_n_times_the_share_of_one(
    twin: LanguageModel, mapped: KVCache, live: Tensor
) -> None:
    """The live tokens keep Z of Z + n, where Z is the sum of their own exponentials."""
    kept = [
        size_of_attention(twin, live, Ablate()(mapped.prefix(tokens))) for tokens in (0, 1, 8, 48)
    ]

    one, eight, all_of_them = (kept[0] / size - 1 for size in kept[1:])

    assert relative_error(8 * one, eight) < 1e-4
    assert relative_error(48 * one, all_of_them) < 1e-4
    assert all_of_them.max() > 1  # more than half of the softmax


def size_of_attention(model: LanguageModel, live: Tensor, prefix: KVCache) -> Tensor:
    """Per live token and query head, the length of what attention returns at layer 0."""
    returned: list[Tensor] = []

    def note(module: nn.Module, given: tuple[Tensor]) -> None:
        returned.append(given[0])

    layers: Any = model.module.base_model.layers
    hook = layers[0].self_attn.o_proj.register_forward_pre_hook(note)
    score(model, live, prefix)
    hook.remove()
    size: Tensor = returned[0].unflatten(-1, (-1, model.spec.layers[0].value_dim)).norm(dim=-1)
    return size
