"""A mapping with a start: the target's first layers are its own, and the others read its state."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtransfer.errors import ArtifactError, CacheLayoutError, IncompatibleModels
from kvtransfer.fitting.fit import fit
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.texts import builtin
from kvtransfer.fitting.transfer import mapped, transfer
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill, score
from kvtransfer.hf.start import begin
from tests.theorems.compare import cache_error, is_still, relative_error, snapshot
from tests.theorems.prose import prose
from tests.theorems.twins import twin_of

SETTINGS = FitSettings(tokens=2048, chunk=64, batch=16, layers=1, start=1)


@pytest.fixture(scope="module")
def model(tiny: Callable[..., LanguageModel]) -> LanguageModel:
    return tiny("llama")


@pytest.fixture(scope="module")
def twin(model: LanguageModel) -> LanguageModel:
    return twin_of(model)


@pytest.fixture(scope="module")
def mapping(model: LanguageModel, twin: LanguageModel) -> KVMapping:
    return fit(model, twin, builtin("fit"), SETTINGS).mapping


@pytest.fixture(scope="module")
def ids(model: LanguageModel) -> torch.Tensor:
    return prose(model, 60)


def test_an_exact_map_is_found_beside_a_start(
    mapping: KVMapping, model: LanguageModel, twin: LanguageModel, ids: torch.Tensor
) -> None:
    prefix, live = ids.split([48, 12], dim=1)
    own = prefill(twin, prefix)

    made = transfer(mapping, model, twin, prefix)

    assert (mapping.start, mapping.first, len(mapping.layers)) == (1, 2, 2)
    assert cache_error(made, own) < 1e-4
    native = score(twin, live, own)
    assert relative_error(score(twin, live, made), native) < 1e-4
    raw = replace(prefill(model, prefix), model=twin.spec.weights)
    assert relative_error(score(twin, live, raw), native) > 0.1
    assert mapping.settings["start"] == 1


def test_the_first_layers_are_the_targets_own_whatever_the_maps(
    mapping: KVMapping, model: LanguageModel, twin: LanguageModel, ids: torch.Tensor
) -> None:
    own = prefill(twin, ids)

    made, control = (
        transfer(mapping, model, twin, ids, shuffled=shuffled) for shuffled in (False, True)
    )

    for layer in range(2):
        for cache in (made, control):
            torch.testing.assert_close(cache.keys[layer], own.keys[layer])
            assert torch.equal(cache.values[layer], own.values[layer])
    for layer in (2, 3):
        assert relative_error(made.values[layer], own.values[layer]) < 1e-4
        assert relative_error(control.values[layer], own.values[layer]) > 0.1


def test_the_state_says_what_another_source_cannot(
    twin: LanguageModel, tiny: Callable[..., LanguageModel], ids: torch.Tensor
) -> None:
    """Of a model that knows other things, and so never an exact source."""
    other = tiny("llama", seed=5)
    found = {
        start: fit(other, twin, builtin("fit"), replace(SETTINGS, start=start))
        for start in (None, 1)
    }
    alone, helped = found[None], found[1]
    of_layer = {choice.target: choice for choice in alone.layers}

    for choice in helped.layers:
        assert choice.r2_values > of_layer[choice.target].r2_values + 0.05
    begun = begin(twin, ids, layers=1)
    cache = prefill(other, ids)
    right, wrong = (
        helped.mapping(cache, start=start)
        for start in (begun, replace(begun, state=begun.state.flip(1)))
    )
    own = prefill(twin, ids)
    for layer in (2, 3):
        near, far = ((made.values[layer] - own.values[layer]).norm() for made in (right, wrong))
        assert float(near) < float(far)
    larger = replace(begun, state=3 * begun.state)  # its size says nothing
    torch.testing.assert_close(helped.mapping(cache, start=larger).keys[3], right.keys[3])


def test_a_saved_mapping_starts_where_it_started(
    mapping: KVMapping,
    model: LanguageModel,
    twin: LanguageModel,
    ids: torch.Tensor,
    tmp_path: Path,
) -> None:
    mapping.save_pretrained(tmp_path / "m")

    loaded = KVMapping.from_pretrained(tmp_path / "m")

    assert loaded.start == 1
    for shuffled in (False, True):
        one, other = (
            transfer(each, model, twin, ids, shuffled=shuffled) for each in (loaded, mapping)
        )
        assert is_still(one, snapshot(other))
    half = mapping.rounded("bfloat16")
    assert half.start == 1
    assert 0 < cache_error(transfer(half, model, twin, ids), prefill(twin, ids)) < 0.1


@pytest.mark.parametrize(
    ("start", "says"),
    [
        (4, "'start' is '4', and the target has 4 layers"),
        (-1, "'start' is '-1'"),
        ("1", "'start' is '1'"),
        (True, "'start' is 'True'"),
        (0, "no table of 3 target layers"),
        (None, "no table of 4 target layers"),
    ],
)
def test_a_config_that_starts_elsewhere_is_refused(
    mapping: KVMapping, tmp_path: Path, start: Any, says: str
) -> None:
    mapping.save_pretrained(tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"start": start}))

    with pytest.raises(ArtifactError) as caught:
        KVMapping.from_pretrained(tmp_path / "m")
    assert says in caught.value.message
    assert caught.value.hint


def test_a_start_that_is_missing_or_too_much_is_refused(
    mapping: KVMapping,
    make_mapping: Callable[..., KVMapping],
    source: LanguageModel,
    target: LanguageModel,
    model: LanguageModel,
    twin: LanguageModel,
    ids: torch.Tensor,
) -> None:
    with pytest.raises(CacheLayoutError, match="after 1 of its layers, and that was not") as caught:
        mapping(prefill(model, ids))
    assert "begin(target, ids, layers=1)" in str(caught.value.hint)

    with pytest.raises(CacheLayoutError, match="has no start, and one of 1 layers was") as caught:
        make_mapping()(prefill(source, ids), start=begin(target, ids, layers=1))
    assert caught.value.hint == "leave start out"


def test_a_start_of_something_else_is_refused(
    mapping: KVMapping, model: LanguageModel, twin: LanguageModel, ids: torch.Tensor
) -> None:
    cache = prefill(model, ids)

    mapping(cache, start=begin(twin, ids, layers=1))
    with pytest.raises(CacheLayoutError, match="starts with 1 layers, and one of 2 was") as caught:
        mapping(cache, start=begin(twin, ids, layers=2))
    assert "layers=1" in str(caught.value.hint)
    with pytest.raises(IncompatibleModels, match=str(model.spec.weights)):
        mapping(cache, start=begin(model, ids, layers=1))
    for other in (ids[:, :-1], ids.expand(2, -1)):
        with pytest.raises(CacheLayoutError, match="tokens at other positions") as caught:
            mapping(cache, start=begin(twin, other, layers=1))
        assert "same ids" in str(caught.value.hint)


def test_what_was_begun_already_is_not_begun_again(
    mapping: KVMapping, model: LanguageModel, twin: LanguageModel, ids: torch.Tensor
) -> None:
    cache, begun, ran = prefill(model, ids), begin(twin, ids, layers=1), list[int]()
    inner: Any = twin.module.base_model
    hook = inner.layers[0].register_forward_hook(lambda *_: ran.append(1))
    try:
        one = mapped(mapping, cache, twin, ids, start=begun)
        assert not ran
        other = mapped(mapping, cache, twin, ids)
        assert ran
    finally:
        hook.remove()

    assert is_still(one, snapshot(other))


def test_a_transfer_of_a_mapping_without_a_start_runs_the_source_alone(
    make_mapping: Callable[..., KVMapping],
    source: LanguageModel,
    target: LanguageModel,
    ids: torch.Tensor,
) -> None:
    mapping, ran = make_mapping(), list[int]()
    hook = target.module.register_forward_hook(lambda *_: ran.append(1))
    inner: Any = target.module.base_model
    below = inner.layers[0].register_forward_hook(lambda *_: ran.append(1))
    try:
        made = transfer(mapping, source, target, ids)
    finally:
        hook.remove()
        below.remove()

    assert not ran
    assert is_still(made, snapshot(mapping(prefill(source, ids))))
    with pytest.raises(IncompatibleModels, match="one direction"):
        transfer(mapping, target, source, ids)


@pytest.mark.parametrize("start", [0, 2])
def test_a_start_of_any_depth_is_exact(
    model: LanguageModel, twin: LanguageModel, ids: torch.Tensor, start: int
) -> None:
    found = fit(model, twin, builtin("fit"), replace(SETTINGS, start=start)).mapping

    assert len(found.layers) == 3 - start
    assert cache_error(transfer(found, model, twin, ids), prefill(twin, ids)) < 1e-4
