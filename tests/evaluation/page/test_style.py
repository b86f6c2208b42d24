"""Everything can be read in both schemes: contrast, from the colours as they are written."""

import re
from pathlib import Path

import pytest

from kvtransfer.evaluation.page import page

STYLE = Path(page.__file__).with_name("style.css").read_text(encoding="utf-8")
READABLE = 4.5
"""WCAG 2.2, 1.4.3, level AA."""


def schemes() -> dict[str, dict[str, str]]:
    blocks = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    light, dark, printed = (dict(re.findall(r"--(\w+): (#\w{6})", block)) for block in blocks)
    return {"light": light, "dark": light | dark, "print": light | printed}


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_black_on_white_is_the_most_there_is() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") < READABLE


@pytest.mark.parametrize("scheme", ["light", "dark", "print"])
@pytest.mark.parametrize("ground", ["paper", "panel"])
@pytest.mark.parametrize("ink", ["ink", "quiet", "accent", "good", "bad", "care"])
def test_text_can_be_read(scheme: str, ground: str, ink: str) -> None:
    colours = schemes()[scheme]

    assert contrast(colours[ink], colours[ground]) >= READABLE


@pytest.mark.parametrize("scheme", ["light", "dark", "print"])
def test_marked_words_can_be_read(scheme: str) -> None:
    colours = schemes()[scheme]

    assert contrast(colours["ink"], colours["mark"]) >= READABLE
    assert contrast(colours["quiet"], colours["mark"]) >= READABLE


@pytest.mark.parametrize("scheme", ["light", "dark", "print"])
def test_every_shade_can_be_read_on_and_they_go_one_way(scheme: str) -> None:
    colours = schemes()[scheme]
    shades = [luminance(colours[f"s{i}"]) for i in range(10)]

    assert all(contrast(colours[f"s{i}"], colours[f"t{i}"]) >= READABLE for i in range(10))
    # So that a grey print tells the same order.
    assert shades == sorted(shades, reverse=scheme != "dark")


def test_nothing_is_loaded_and_every_colour_is_one_that_was_measured() -> None:
    assert "url(" not in STYLE.replace("url(#hatch)", "")
    assert "@import" not in STYLE
    rules = re.sub(r":root \{.*?\}", "", STYLE, flags=re.DOTALL)
    assert not re.findall(r"#[0-9a-f]{3,6}\b", rules)
