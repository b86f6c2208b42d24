"""The battery's picture: drawn whole, with labels that do not cover each other."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtransfer.errors import KVTransferError
from kvtransfer.hf.model import LanguageModel
from kvtransfer.steering.battery import battery
from kvtransfer.steering.battery_plot import SHAPES, apart, save_plot
from kvtransfer.steering.battery_report import BatteryReport
from kvtransfer.steering.configurations import CONFIGURATIONS
from tests.steering.test_battery import LONG, SHORT, TOPIC


@pytest.fixture(scope="module")
def report(tiny: Callable[..., LanguageModel]) -> BatteryReport:
    return battery(tiny("llama"), SHORT, LONG, topic=TOPIC, samples=2, tokens=2, persistence=0)


def test_every_configuration_has_a_shape_of_its_own() -> None:
    assert set(SHAPES) == {each.name for each in CONFIGURATIONS}
    assert len(set(SHAPES.values())) == len(SHAPES)


@pytest.mark.parametrize(("suffix", "begins"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_a_picture_is_written(
    report: BatteryReport, tmp_path: Path, suffix: str, begins: bytes
) -> None:
    path = tmp_path / f"plot{suffix}"

    save_plot(report, path)

    assert path.read_bytes().startswith(begins)


def test_what_cannot_be_written_is_refused(report: BatteryReport, tmp_path: Path) -> None:
    with pytest.raises(KVTransferError, match="cannot be written"):
        save_plot(report, tmp_path / "nowhere" / "plot.png")
    with pytest.raises(ValueError, match="ends in"):
        save_plot(report, tmp_path / "plot.txt")


@given(st.lists(st.floats(0, 30), min_size=1, max_size=13))
def test_labels_keep_their_order_and_their_distance(heights: list[float]) -> None:
    placed = apart(heights, room=1.0)

    order = sorted(range(len(heights)), key=heights.__getitem__)
    steps = [placed[b] - placed[a] for a, b in pairwise(order)]
    assert all(step > 1 - 1e-6 for step in steps)
    assert sum(placed) == pytest.approx(sum(heights), abs=1e-6)


def test_labels_with_room_stay_where_their_points_are() -> None:
    assert apart([0.0, 5.0, 2.0], room=1.0) == [0.0, 5.0, 2.0]
