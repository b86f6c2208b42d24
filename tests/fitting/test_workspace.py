"""Where moments lie, and in how many readings they are gathered, changes nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvtransfer.errors import KVTransferError
from kvtransfer.fitting.capture import Capture, capture
from kvtransfer.fitting.fit import fit
from kvtransfer.fitting.settings import FitSettings
from kvtransfer.fitting.texts import builtin
from kvtransfer.fitting.workspace import Workspace
from kvtransfer.hf.model import LanguageModel

from .kills import tensors
from .test_checkpoint import assert_equal
from .test_columns import CHUNKS

EVERYTHING: dict[str, Any] = {"attention": True, "before": (1,), "starts": (0,), "band": 1}


def taken(
    source: LanguageModel, target: LanguageModel, workspace: Workspace | None = None, **asked: Any
) -> Capture:
    return capture(source, target, CHUNKS, tokens=10_000, batch=2, workspace=workspace, **asked)


@pytest.mark.parametrize("asked", [{}, EVERYTHING], ids=["plain", "everything"])
def test_on_the_disk_they_are_what_they_are_in_memory_and_nothing_is_left_there(
    source: LanguageModel, target: LanguageModel, tmp_path: Path, asked: dict[str, Any]
) -> None:
    folder = tmp_path / "new" / "moments"

    found = taken(source, target, Workspace(moments=folder), **asked)

    assert folder.is_dir()
    assert list(folder.iterdir()) == []  # even while they are there
    assert_equal(found, taken(source, target, **asked))


@pytest.mark.parametrize("asked", [{}, EVERYTHING], ids=["plain", "everything"])
def test_two_passes_gather_what_one_does(
    source: LanguageModel, target: LanguageModel, asked: dict[str, Any]
) -> None:
    told: list[int] = []
    found = taken(source, target, Workspace(passes=2), progress=told.append, **asked)

    assert sum(told) == 2 * sum(map(len, CHUNKS))
    assert_equal(found, taken(source, target, **asked))


def test_kinds_that_are_gathered_together_are_not_gathered_apart(
    source: LanguageModel, target: LanguageModel
) -> None:
    with pytest.raises(ValueError, match="2 passes, and features 'both' are gathered together"):
        taken(source, target, Workspace(passes=2), features="both")


def test_sums_of_a_stretch_are_the_sums_of_its_batches(
    source: LanguageModel, target: LanguageModel
) -> None:
    """On a device they are in the dtype of the products: exact where that is double precision."""
    at_home = tensors(taken(source, target))
    near = Workspace(moments="device")
    double = tensors(taken(source, target, near))
    single = tensors(taken(source, target, near, products=torch.float32))

    for name, whole in at_home.items():
        scale = float(whole.double().abs().max())
        torch.testing.assert_close(double[name], whole, rtol=1e-12, atol=1e-12 * scale)
        torch.testing.assert_close(single[name], whole, rtol=1e-5, atol=1e-5 * scale)
    assert single["fit.keys.gram"].dtype == torch.float64
    assert not torch.allclose(single["fit.keys.gram"], at_home["fit.keys.gram"], rtol=1e-12)


def test_a_whole_fit_is_the_same_wherever_its_moments_lie(
    source: LanguageModel, target: LanguageModel, tmp_path: Path
) -> None:
    settings = FitSettings(tokens=512, chunk=64, layers=1)
    texts = builtin("fit")[:30]

    plain = fit(source, target, texts, settings)
    work = Workspace(moments=tmp_path / "m", passes=2, checkpoint=tmp_path / "c", every=1)
    found = fit(source, target, iter(texts), settings, workspace=work)  # to be read once only

    for mine, theirs in zip(found.mapping.layers, plain.mapping.layers, strict=True):
        assert mine.sources == theirs.sources
        assert torch.equal(mine.keys.whole(32).weight, theirs.keys.whole(32).weight)  # type: ignore[union-attr]
    assert found.moments == plain.moments
    assert list((tmp_path / "c").iterdir())  # stays until what was fitted is saved


def test_more_than_a_disk_holds_is_refused_before_anything_runs(
    source: LanguageModel, target: LanguageModel, tmp_path: Path
) -> None:
    work = Workspace(moments=tmp_path)

    work.require_room(10**6)
    with pytest.raises(KVTransferError, match=r"1000000000\.000 GB, and the disk of") as caught:
        work.require_room(10**18)
    assert "--band" in str(caught.value.hint)
    with pytest.raises(KVTransferError, match="moments cannot be kept in"):
        work.allocate(2**58)  # should another process have filled it meanwhile
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(KVTransferError, match="moments cannot be kept in") as caught:
        taken(source, target, Workspace(moments=tmp_path / "file"))
    assert "--moments" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"passes": 3}, "passes must be 1 or 2, got 3"),
        ({"passes": 0}, "passes must be 1 or 2, got 0"),
        ({"every": 0}, "batches between checkpoints must be positive, got 0"),
    ],
)
def test_what_cannot_be_is_refused(asked: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Workspace(**asked)


def test_more_source_layers_than_a_band_holds_are_refused_with_the_band_that_holds_them(
    source: LanguageModel, target: LanguageModel
) -> None:
    settings = FitSettings(tokens=512, chunk=64, layers=3, band=1)

    with pytest.raises(ValueError, match=r"3 source layers, and a band of 1 leaves some target"):
        fit(source, target, builtin("fit"), settings)
    with pytest.raises(ValueError, match="band must be ≥ 0 source layers to either side, got -1"):
        FitSettings(band=-1)
