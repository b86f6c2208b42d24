"""A picture of layer scores, and the same in the terminal."""

import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from torch import Tensor

from kvtransfer.errors import KVTransferError
from kvtransfer.fitting.heatmap import LayerScores, save_heatmap

CHOSEN = ((0, 1), (1, 2), (4,))


def scores() -> Tensor:
    """Three target layers of five source layers; one is worse than the mean."""
    rows = [
        [0.79, 0.50, 0.30, 0.10, 0.00],
        [0.20, 0.60, 0.55, 0.30, -0.20],
        [0.05, 0.10, 0.30, 0.40, 0.70],
    ]
    return torch.tensor(rows, dtype=torch.float64)


def saved(path: Path, values: Tensor, chosen: tuple[tuple[int, ...], ...] | None = None) -> Path:
    save_heatmap(values, path, source="small", target="large", chosen=chosen)
    return path


def pixels(path: Path) -> NDArray[np.uint8]:
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB"))


def shown(value: LayerScores, *, width: int = 100) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(value)
    return console.export_text().splitlines()


def test_the_ending_says_which_kind_of_picture(tmp_path: Path) -> None:
    png, svg = (saved(tmp_path / name, scores(), CHOSEN) for name in ("a.png", "a.SVG"))

    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text()
    assert min(pixels(png).shape[:2]) > 300
    with pytest.raises(ValueError, match=r"ends in \.png or \.svg, not '\.bmp'"):
        saved(tmp_path / "a.bmp", scores())


def test_what_was_not_looked_at_is_left_blank_and_said_to_be(tmp_path: Path) -> None:
    seen = scores()
    seen[0, 3:] = seen[2, :2] = float("-inf")

    lines = shown(LayerScores(seen, "small", "large", CHOSEN))
    blank = pixels(saved(tmp_path / "a.png", seen, CHOSEN))

    (first, *_, last) = [line for line in lines if "··" in line]
    assert first.count("·") == 4
    assert "0.790" in first
    assert last.count("·") == 4
    assert "· not looked at" in "\n".join(lines)
    assert "not looked at" not in "\n".join(shown(LayerScores(scores(), "small", "large", CHOSEN)))
    white = [
        int((each == 255).all(-1).sum())
        for each in (blank, pixels(saved(tmp_path / "b.png", scores())))
    ]
    assert white[0] > white[1] + 1000
    with pytest.raises(ValueError, match="or −∞ where a band left them out"):
        LayerScores(torch.full((2, 2), float("-inf")), "small", "large")


def test_the_same_scores_make_the_same_picture_and_others_another(tmp_path: Path) -> None:
    first, again, changed = (
        pixels(saved(tmp_path / f"{name}.png", values))
        for name, values in (("a", scores()), ("b", scores()), ("c", scores().flip(0)))
    )

    assert np.array_equal(first, again)
    assert not np.array_equal(first, changed)


def test_chosen_layers_are_framed_each_in_its_own_cell(tmp_path: Path) -> None:
    one = pixels(saved(tmp_path / "one.png", scores(), ((0,), (), ())))
    other = pixels(saved(tmp_path / "other.png", scores(), ((4,), (), ())))

    across = np.flatnonzero((one != other).any((0, 2)))
    down = np.flatnonzero((one != other).any((1, 2)))

    assert across.min() < one.shape[1] / 3 < one.shape[1] / 2 < across.max()
    assert down.max() < one.shape[0] / 2  # both in the first row, which is on top


def test_better_is_lighter_so_grey_reads_alike(tmp_path: Path) -> None:
    """Also without colour vision: luminance rises along the colours of the scale."""
    from matplotlib import colormaps

    from kvtransfer.fitting.heatmap import COLOURS

    colours = colormaps[COLOURS](np.linspace(0, 1, 64))[:, :3]
    luminance = colours @ np.array([0.2126, 0.7152, 0.0722])

    assert bool((np.diff(luminance) > 0).all())
    assert not bool((np.diff(colormaps["jet"](np.linspace(0, 1, 64))[:, :3].sum(1)) > 0).all())


@pytest.mark.parametrize("shape", [(1, 1), (2, 48), (40, 3)], ids=str)
def test_any_number_of_layers_can_be_drawn(shape: tuple[int, int], tmp_path: Path) -> None:
    values = torch.linspace(-3, 1, shape[0] * shape[1]).view(shape)

    saved(tmp_path / "a.png", values)

    lines = shown(LayerScores(values, "small", "large"), width=160)
    assert sum(line.startswith("│") for line in lines) == shape[0]


def test_drawing_leaves_the_state_of_pyplot_alone(tmp_path: Path) -> None:
    from matplotlib import pyplot

    before, figures, backend = dict(pyplot.rcParams), pyplot.get_fignums(), pyplot.get_backend()

    saved(tmp_path / "a.png", scores())

    assert dict(pyplot.rcParams) == before
    assert (pyplot.get_fignums(), pyplot.get_backend()) == (figures, backend)


def test_without_matplotlib_there_is_a_hint_and_still_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(KVTransferError, match="not installed") as caught:
        saved(tmp_path / "a.png", scores())

    assert caught.value.hint == "pip install 'matplotlib>=3.9'"
    assert list(tmp_path.iterdir()) == []
    assert any("█" in line for line in shown(LayerScores(scores(), "small", "large")))


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(KVTransferError, match=r"absent.a\.png cannot be written"):
        saved(tmp_path / "absent" / "a.png", scores())


@pytest.mark.parametrize(
    ("values", "chosen", "message"),
    [
        (torch.zeros(0, 3), None, "at least one"),
        (torch.full((3, 5), float("nan")), None, "finite"),
        (torch.zeros(3, 5), ((0,), (1,)), "3 target layers"),
        (torch.zeros(3, 5), ((0,), (1,), (5,)), "below 5"),
    ],
    ids=["empty", "nan", "too few", "no such layer"],
)
def test_scores_that_are_no_scores_are_refused(
    values: Tensor, chosen: tuple[tuple[int, ...], ...] | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        saved(tmp_path / "a.png", values, chosen)
    with pytest.raises(ValueError, match=message):
        LayerScores(values, "small", "large", chosen)


def test_the_terminal_shows_shades_choices_and_the_best() -> None:
    lines = shown(LayerScores(scores(), "small", "large", CHOSEN))

    assert "small → large" in lines[0]
    rows = [line.strip("│").split("│") for line in lines if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["0", "█•▓•░░", "0", "0.790"],
        ["1", "░░▓•▓•░░", "1", "0.600"],
        ["2", "░░▒▒█•", "4", "0.700"],
    ]
    assert "• chosen" in " ".join(lines)
    plain = shown(LayerScores(scores(), "small", "large"))
    assert not any("•" in line for line in plain)
