"""A diagnosis finds nothing wrong with what is exact, and finds what was broken where it was."""

import io
import json
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import islice
from typing import Any

import pytest
import torch
from rich.console import Console
from sklearn.metrics import r2_score
from torch import Tensor

from kvtransfer.errors import IncompatibleModels, TextError
from kvtransfer.evaluation.evaluate import evaluate
from kvtransfer.fitting.affine import Affine
from kvtransfer.fitting.chunks import chunks
from kvtransfer.fitting.diagnose import diagnose
from kvtransfer.fitting.diagnosis import Diagnosis, Heads
from kvtransfer.fitting.fit import fit
from kvtransfer.fitting.layer_map import LayerMap
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.texts import builtin
from kvtransfer.hf.model import LanguageModel
from kvtransfer.hf.run import prefill

from ..theorems.twins import silenced, twin_of
from .conftest import MakeMapping

DEPTH, HEADS, WIDTH = 3, 2, 16
FEATURES = HEADS * WIDTH
SIZES: dict[str, Any] = {"prefix": 48, "continuation": 16, "items": 2}


@pytest.fixture(scope="module")
def model(tiny: Callable[..., LanguageModel]) -> LanguageModel:
    """No query reads its two fastest pairs of dims."""
    return silenced(tiny("llama", num_hidden_layers=DEPTH))


def identity(source: LanguageModel, target: LanguageModel) -> KVMapping:
    """Every layer from the same layer, as it is."""
    whole = Affine(torch.eye(FEATURES), torch.zeros(FEATURES))
    return KVMapping(
        source=source.spec,
        target=target.spec,
        layers=tuple(LayerMap((layer,), whole, whole) for layer in range(DEPTH)),
        rotate=target.rotary,
        target_config=target.module.config.to_dict(),
        settings={},
        quality={},
        provenance={},
    )


def change(mapping: KVMapping, layer: int, **maps: Any) -> KVMapping:
    """The same mapping with other maps in one layer."""
    layers = list(mapping.layers)
    layers[layer] = replace(layers[layer], **maps)
    return replace(mapping, layers=tuple(layers))


def noisy(dims: slice | list[int], *, seed: int = 0) -> Affine:
    """The identity, with an error of some dims that depends on the token."""
    weight = torch.eye(FEATURES)
    random = torch.randn(FEATURES, FEATURES, generator=torch.Generator().manual_seed(seed))
    weight[:, dims] += 0.3 * random[:, dims]
    return Affine(weight, torch.zeros(FEATURES))


def look(mapping: KVMapping, source: LanguageModel, target: LanguageModel) -> Diagnosis:
    return diagnose(mapping, source, target, builtin("heldout"), **SIZES)


def flat(found: Diagnosis, name: str) -> Tensor:
    """One row a layer, one column a KV head."""
    return torch.tensor([getattr(layer.mapped, name) for layer in found.layers])


def assert_perfect(found: Diagnosis, *, atol: float) -> None:
    for name in ("r2_keys", "r2_values", "cosine"):
        values = flat(found, name)
        torch.testing.assert_close(values, torch.ones_like(values), rtol=0, atol=atol)
    assert found


def test_a_model_mapped_to_itself_has_nothing_wrong(model: LanguageModel) -> None:
    found = look(identity(model, model), model, model)

    assert_perfect(found, atol=1e-5)
    assert found.control == "zeroed"
    for name in ("key_concentration", "value_concentration"):
        assert bool(flat(found, name).isnan().all())  # rounding lies nowhere
        assert {getattr(layer.control, name)[0] > 0 for layer in found.layers} == {True}
    assert found.cosine is not None
    assert found.margin is not None
    assert found.cosine.value == pytest.approx(1, abs=1e-5)
    assert found.margin.value > 0.02


def test_a_fitted_mapping_to_a_gauge_twin_has_nothing_wrong(
    tiny: Callable[..., LanguageModel],
) -> None:
    model = tiny("llama", num_hidden_layers=DEPTH)
    twin = twin_of(model)
    settings = FitSettings(tokens=2048, chunk=64, batch=16, layers=1)
    fitted = fit(model, twin, builtin("fit"), settings).mapping

    found = look(fitted, model, twin)

    assert_perfect(found, atol=1e-3)
    assert found.control == "shuffled"
    raw = look(identity(model, twin), model, twin)
    assert bool((flat(raw, "cosine") < 0.9).all())
    assert bool((flat(raw, "r2_values") < 0.5).all())


def test_layers_that_the_target_runs_itself_are_right_and_need_beat_nothing(
    source: LanguageModel, target: LanguageModel
) -> None:
    settings = FitSettings(tokens=1024, chunk=64, batch=16, layers=1, start=0)
    started = fit(source, target, builtin("fit"), settings).mapping

    found = look(started, source, target)

    first, second = found.layers
    assert (first.sources, len(second.sources)) == ((), 1)
    assert min(*first.mapped.r2_keys, *first.mapped.r2_values, *first.mapped.cosine) > 1 - 1e-5
    assert first.mapped.mean("cosine") == first.control.mean("cosine")
    assert second.mapped.mean("r2_values") < 0.99
    assert bool(found) == bool(second)


def test_an_error_in_one_head_is_found_in_that_head(model: LanguageModel) -> None:
    second = slice(WIDTH, 2 * WIDTH)

    broken = change(identity(model, model), 1, values=noisy(second))
    found = look(broken, model, model)

    assert found.layers[1].worst == 1
    for name in ("r2_values", "cosine"):
        values = flat(found, name)
        assert float(values[1, 1]) < 0.95
        values[1, 1] = 1.0
        torch.testing.assert_close(values, torch.ones_like(values), rtol=0, atol=1e-5)
    assert float(flat(found, "r2_keys").min()) > 1 - 1e-5
    assert flat(found, "value_concentration").isnan().logical_not().nonzero().tolist() == [[1, 1]]


def pairs(rotation: Any, *which: int) -> list[int]:
    """The dims of some rotated pairs, of both heads."""
    half = rotation.rotary_dim // 2
    return [h * WIDTH + p + side for h in range(HEADS) for p in which for side in (0, half)]


def test_an_error_where_no_query_looks_lowers_r2_and_nothing_else(model: LanguageModel) -> None:
    rotation = model.spec.layers[0].rotation
    silent, read = pairs(rotation, 0, 1), pairs(rotation, 3, 4)

    unread, heard = (
        look(change(identity(model, model), 1, keys=noisy(dims)), model, model).layers[1]
        for dims in (silent, read)
    )

    assert unread.mapped.mean("r2_keys") < 0.9
    assert unread.mapped.mean("cosine") > 1 - 1e-5
    assert max(unread.mapped.key_concentration) < 1e-4
    assert heard.mapped.mean("cosine") < 0.99
    assert min(heard.mapped.key_concentration) > 0.3


def test_the_cosine_is_that_of_an_evaluation_on_the_same_text(
    make_mapping: MakeMapping, source: LanguageModel, target: LanguageModel
) -> None:
    mapping = make_mapping()

    found = look(mapping, source, target)

    evaluated = evaluate(
        source,
        target,
        mapping,
        texts=builtin("heldout"),
        conditions=("mapped", "shuffled"),
        **SIZES,
    ).text
    assert evaluated is not None
    ours = found.cosine
    theirs = evaluated.estimates("mapped")["attention_cosine"]
    control = evaluated.estimates("shuffled")["attention_cosine"]
    assert ours is not None
    assert theirs is not None
    assert control is not None
    assert found.margin is not None
    assert ours.value == pytest.approx(theirs.value, abs=1e-6)
    assert found.margin.value == pytest.approx(theirs.value - control.value, abs=1e-6)


def test_r2_is_scikit_learns_over_the_tokens_of_all_items(
    make_mapping: MakeMapping, source: LanguageModel, target: LanguageModel
) -> None:
    mapping = make_mapping()
    found = look(mapping, source, target)

    windows = islice(chunks(builtin("heldout"), target.encode, length=64), 2)
    hidden = [ids[None, :47] for ids in windows]
    own = [prefill(target, ids).content() for ids in hidden]
    mapped = [mapping(prefill(source, ids)).content() for ids in hidden]
    for layer in range(2):
        for kind in ("keys", "values"):
            for head in range(4):
                y, x = (
                    torch.cat([getattr(cache, kind)[layer][0, head] for cache in caches]).double()
                    for caches in (own, mapped)
                )
                expected = r2_score(y.numpy(), x.numpy(), multioutput="variance_weighted")
                measured = getattr(found.layers[layer].mapped, f"r2_{kind}")[head]
                assert measured == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_a_mapping_that_does_worse_than_its_control_is_false(model: LanguageModel) -> None:
    right = identity(model, model)
    wrong = change(right, 2, values=Affine(-torch.eye(FEATURES), torch.zeros(FEATURES)))

    found = look(replace(wrong, shuffled=right.layers), model, model)

    assert not found
    assert "not beaten in layers 0, 1, 2" in found.sentence()
    assert look(replace(right, shuffled=wrong.layers), model, model).layers[2]
    one = look(replace(wrong, shuffled=noised(right).layers), model, model)
    assert not one
    assert [bool(layer) for layer in one.layers] == [True, True, False]
    assert "not beaten in layer 2;" in one.sentence()


def noised(mapping: KVMapping) -> KVMapping:
    """A little wrong in every layer."""
    for layer in range(DEPTH):
        mapping = change(mapping, layer, values=noisy(slice(None)))
    return mapping


def test_attention_that_cannot_be_seen_is_unknown_and_so_not_good(
    tiny: Callable[..., LanguageModel],
) -> None:
    """Bloom computes its attention itself."""
    model = tiny("bloom", num_hidden_layers=2)
    whole = Affine(torch.eye(64), torch.zeros(64))
    layers = tuple(LayerMap((layer,), whole, whole) for layer in range(2))

    found = look(replace(identity(model, model), layers=layers), model, model)

    assert not found
    assert found.cosine is None
    assert "none could be seen" in found.sentence()
    document = json.loads(found.to_json())
    assert document["attention_cosine"] is None
    assert document["layers"][0]["mapped"]["cosine"] == {"mean": None, "heads": [None] * 4}
    assert document["layers"][0]["mapped"]["r2_keys"]["mean"] == pytest.approx(1)
    assert "–" in printed(found)


def printed(found: Diagnosis) -> str:
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(found)
    return console.export_text()


def test_json_is_stable_and_says_what_the_table_says(
    make_mapping: MakeMapping, source: LanguageModel, target: LanguageModel
) -> None:
    found, again = (look(make_mapping(), source, target) for _ in range(2))

    document, repeated = (json.loads(each.to_json()) for each in (found, again))

    document.pop("provenance"), repeated.pop("provenance")
    assert document == repeated
    assert document["n"] == 2
    assert (document["prefix_tokens"], document["continuation_tokens"]) == (48, 16)
    assert [layer["sources"] for layer in document["layers"]] == [[0, 2], [1]]
    for layer in document["layers"]:
        assert layer["mapped"].keys() == {each.name for each in fields(Heads)}
        assert all(len(each["heads"]) == 4 for each in layer["mapped"].values())
        assert f"{layer['mapped']['cosine']['mean']:.3f}" in printed(found)
    assert "shuffled" in printed(found)


def test_notes_of_the_mapping_are_told(model: LanguageModel) -> None:
    noted = replace(identity(model, model), notes=("used on request",))

    found = look(noted, model, model)

    assert "Note: used on request." in printed(found)
    assert json.loads(found.to_json())["notes"] == ["used on request"]


def test_progress_counts_items_and_a_short_text_gives_fewer(model: LanguageModel) -> None:
    told: list[int] = []
    text = model.decode(torch.cat([model.encode(text) for text in builtin("heldout")[:40]])[:200])

    found = diagnose(
        identity(model, model), model, model, [text], **SIZES | {"items": 9}, progress=told.append
    )

    assert 1 < found.items < 9
    assert told == [1] * found.items


def test_what_cannot_be_diagnosed_is_refused(
    make_mapping: MakeMapping, source: LanguageModel, target: LanguageModel
) -> None:
    mapping = make_mapping()
    with pytest.raises(IncompatibleModels, match="this mapping goes"):
        diagnose(mapping, target, source, builtin("heldout"))
    with pytest.raises(TextError, match="fewer than one chunk"):
        diagnose(mapping, source, target, ["too short"])
    for sizes in ({"prefix": 1}, {"continuation": 0}, {"items": 0}):
        with pytest.raises(ValueError, match="at least 2, 1 and 1"):
            diagnose(mapping, source, target, builtin("heldout"), **SIZES | sizes)


def test_a_head_that_does_not_vary_is_explained_or_not() -> None:
    from kvtransfer.fitting.diagnose import _Explained

    still = torch.ones(2, 5, 3)
    tally = _Explained()
    tally.add(still, torch.stack((still[0], still[1] + 0.1)))

    assert tally.r2().tolist() == [1.0, 0.0]
