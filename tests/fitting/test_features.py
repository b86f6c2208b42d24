"""A target's keys may be read from the source's values too, and its values from the keys."""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch

from kvtransfer.errors import ArtifactError, UnderdeterminedFit
from kvtransfer.fitting.capture import capture
from kvtransfer.fitting.chunks import chunks
from kvtransfer.fitting.columns import Columns
from kvtransfer.fitting.features import Features, read_by, rows_of
from kvtransfer.fitting.fit import capture_texts, fit
from kvtransfer.fitting.layers import needed_rows
from kvtransfer.fitting.mapping import KVMapping
from kvtransfer.fitting.moments import Moments
from kvtransfer.fitting.pairs import PairMoments
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.solve import fit_captured
from kvtransfer.fitting.texts import builtin
from kvtransfer.hf.model import LanguageModel, load
from kvtransfer.hf.run import prefill, score
from tests.theorems.compare import relative_error
from tests.theorems.twins import twin_of

SETTINGS = FitSettings(tokens=4096, chunk=64, layers=1, batch=16, features="both")
IDS = torch.arange(5, 65, 2)[None]


def test_what_is_gathered_are_the_moments_of_keys_and_values_side_by_side(
    source: LanguageModel, target: LanguageModel
) -> None:
    sequences = list(islice(chunks(builtin("fit"), source.encode, length=32), 9))

    found = capture(source, target, sequences, tokens=256, batch=4, features="both")

    fitted = torch.stack([ids for number, ids in enumerate(sequences) if number % 8 != 1][:8])
    read, wanted = (prefill(model, fitted).content() for model in (source, target))
    x = torch.cat([rows_of(read, kind) for kind in ("keys", "values")], dim=1)
    for kind in ("keys", "values"):
        mine: Moments = getattr(found.fit, kind).dense()
        y = rows_of(wanted, kind)
        expected = Moments.of(x, y)
        width = y.shape[1]
        assert mine.n == expected.n == 256
        torch.testing.assert_close(mine.xx, expected.xx, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mine.xy[:, :width], expected.xy, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(mine.yy[:width], expected.yy, rtol=1e-5, atol=1e-5)
    keys, values = found.fit.keys, found.fit.values
    assert isinstance(keys, PairMoments) and isinstance(values, PairMoments)
    assert keys.gram is values.gram  # shared, not copied


def test_columns_are_where_the_rows_are(source: LanguageModel, target: LanguageModel) -> None:
    content = prefill(source, IDS).content()
    rows = torch.cat([rows_of(content, kind) for kind in ("keys", "values")], dim=1)
    columns = Columns(source.spec, target.spec, "both", "both")

    read = rows[:, columns.reads("values", [2, 0])]

    expected = [part for layer in (2, 0) for part in content[layer]]
    blocks = [block[0].transpose(0, 1).flatten(1) for block in expected]
    assert torch.equal(read, torch.cat(blocks, dim=1))
    assert read_by("both", "keys") == ("keys", "values")
    assert read_by("same", "keys") == ("keys",)


def test_an_exact_map_is_found_among_both(source: LanguageModel) -> None:
    twin = twin_of(source)
    prefix, live = IDS.split([20, 10], dim=1)

    found = fit(source, twin, builtin("fit"), SETTINGS)

    grafted = score(twin, live, found.mapping(prefill(source, prefix)))
    assert relative_error(grafted, score(twin, live, prefill(twin, prefix))) < 1e-4
    assert found.mapping.features == "both"
    assert found.mapping.settings["features"] == "both"


def test_both_explain_more_than_one_on_a_trained_pair() -> None:
    small, large = load("tiny-4l", dtype="float32"), load("tiny-6l", dtype="float32")
    found = {}
    for features in ("same", "both"):
        settings = FitSettings(tokens=8192, chunk=128, layers=2, batch=16, features=features)
        found[features] = fit(small, large, builtin("fit"), settings)

    assert found["both"].r2_keys > found["same"].r2_keys
    assert found["both"].r2_values > found["same"].r2_values


def test_the_control_reads_both_as_well_and_has_nothing_to_say(source: LanguageModel) -> None:
    twin = twin_of(source)
    captured = capture_texts(source, twin, builtin("fit"), SETTINGS)
    found = fit_captured(captured, source, twin, SETTINGS).mapping
    cache = prefill(source, IDS)

    own = prefill(twin, IDS)
    right, wrong = found(cache), found(cache, shuffled=True)

    assert relative_error(right.keys[1], own.keys[1]) < 1e-4
    assert relative_error(wrong.keys[1], own.keys[1]) > 0.1


def test_a_saved_mapping_reads_what_it_read(source: LanguageModel, tmp_path: Path) -> None:
    found = fit(source, twin_of(source), builtin("fit"), SETTINGS).mapping
    found.save_pretrained(tmp_path / "m")

    again = KVMapping.from_pretrained(tmp_path / "m")

    one, other = (each(prefill(source, IDS)) for each in (found, again))
    assert again.features == "both"
    assert all(map(torch.equal, (*one.keys, *one.values), (*other.keys, *other.values)))
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    for features, says in (("neither", "'features' is 'neither'"), ("same", "shape")):
        edited = config | {"features": features}
        (tmp_path / "m" / "config.json").write_text(json.dumps(edited))
        with pytest.raises(ArtifactError, match=says):
            KVMapping.from_pretrained(tmp_path / "m")


def test_a_mapping_that_does_not_say_reads_the_same_kind(
    make_mapping: Callable[..., KVMapping], tmp_path: Path
) -> None:
    """As all did, before there was a choice."""
    make_mapping().save_pretrained(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    del config["features"]
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))

    assert KVMapping.from_pretrained(tmp_path / "m").features == "same"


@pytest.mark.parametrize(("features", "rows"), [("same", 33), ("both", 65)])
def test_twice_the_features_need_twice_the_rows(
    source: LanguageModel, target: LanguageModel, features: Features, rows: int
) -> None:
    assert needed_rows(source.spec, 1, features) == rows
    settings = replace(SETTINGS, features=features, tokens=rows - 1)
    with pytest.raises(UnderdeterminedFit):
        fit(source, target, builtin("fit"), settings)
