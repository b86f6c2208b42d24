"""A look inside a pair says what it saw, and why it did not see the rest."""

import pytest

from kvtransfer.evaluation import inside
from kvtransfer.evaluation.inside import look_inside
from kvtransfer.fitting.fit import fit
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.texts import builtin
from kvtransfer.hf.model import LanguageModel

from .conftest import identity


def test_the_mapping_that_changes_nothing_is_right_in_every_layer(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inside, "ROWS", 256)  # two layers of small heads need no more

    seen = look_inside(identity(model), model, model, builtin("heldout"), prefix=24, continuation=8)

    assert seen.diagnosis is not None
    assert seen.diagnosis.items == inside.WINDOWS
    assert seen.diagnosis.cosine is not None
    assert seen.diagnosis.cosine.value == pytest.approx(1, abs=1e-5)
    assert seen.layers is not None
    assert seen.layers.chosen == ((0,), (1,))
    assert seen.layers.rows == 256
    assert seen.layers.scores.argmax(1).tolist() == [0, 1]
    assert not seen.missing


def test_what_cannot_be_had_is_left_out_with_its_reason(
    model: LanguageModel, sibling: LanguageModel
) -> None:
    short = look_inside(identity(model), model, model, ["Too short."], prefix=24, continuation=8)
    wrong = look_inside(identity(model), model, sibling, builtin("heldout"), prefix=24)

    assert short.diagnosis is None
    assert short.layers is None
    assert "fewer than one chunk" in short.missing["diagnosis"]
    assert "fewer than one chunk" in short.missing["layers"]
    assert "diagnosis" in wrong.missing


def test_layers_that_the_target_runs_read_from_none(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inside, "ROWS", 64)
    settings = FitSettings(tokens=256, chunk=32, layers=1, start=0)
    begun = fit(model, model, builtin("fit"), settings).mapping

    seen = look_inside(begun, model, model, builtin("heldout"), prefix=24, continuation=8)

    assert seen.layers is not None
    assert seen.layers.chosen[0] == ()
    assert len(seen.layers.chosen[1]) == 1
