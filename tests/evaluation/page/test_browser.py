"""The page in a real browser: it renders, asks nothing of the network, and nothing overflows."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Dialog, sync_playwright

from kvtransfer.evaluation.figure import Curve, Figure, Series
from kvtransfer.evaluation.report import EvalReport
from kvtransfer.report import Estimate

from .conftest import Turns, inside, report

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")

WIDTHS = (400, 1400)

OUTSIDE = """() => [...document.body.querySelectorAll("*")].filter(e => {
    if (e.closest(".unseen, .patterns, defs, title")) return false;
    for (let p = e.parentElement; p; p = p.parentElement)
        if (p.classList.contains("scroll")) return false;
    const box = e.getBoundingClientRect();
    return box.width && (box.left < -0.5 || box.right > innerWidth + 0.5);
}).map(e => e.outerHTML.slice(0, 120))"""
"""Elements beyond the sides of the window that stand in no box which is meant to scroll."""

CLIPPED = """() => [...document.querySelectorAll("span, dd, dt, p, li, h1, h2, h3, h4, th, td, b")]
    .filter(e => !e.closest(".unseen")
        && getComputedStyle(e).overflowX !== "visible" && e.scrollWidth > e.clientWidth + 1)
    .map(e => e.outerHTML.slice(0, 120))"""
"""Text that is cut off."""

MEETING = """() => {
    const found = [];
    for (const group of document.querySelectorAll(".scale > div, .levels, .ticks, .bar, .legend")) {
        const boxes = [...group.children].filter(e => e.tagName !== "svg")
            .map(e => { const r = document.createRange(); r.selectNodeContents(e);
                        return [e.textContent, r.getBoundingClientRect()]; });
        for (let i = 0; i < boxes.length; i++) for (let j = i + 1; j < boxes.length; j++) {
            const [a, b] = [boxes[i][1], boxes[j][1]];
            if (a.left < b.right - 0.5 && b.left < a.right - 0.5
                && a.top < b.bottom - 3 && b.top < a.bottom - 3)
                found.push([boxes[i][0], boxes[j][0]]);
        }
    }
    return found;
}"""
"""Labels of one picture that lie over each other."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        if os.environ.get("KVTRANSFER_NEEDS_BROWSER"):
            pytest.fail(f"none of {', '.join(NAMES)} is installed, and one is needed here")
        pytest.skip(f"none of {', '.join(NAMES)} is installed")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def files(
    usual_page: str, hostile_page: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pages")
    pages = {
        "usual": usual_page,
        "hostile": hostile_page,
        "small": report(guides=None).to_html(inside=inside(4, 6)),
        "bare": report(text=None, guides=None).to_html(),
    }
    made = {}
    for name, page in pages.items():
        made[name] = root / f"{name}.html"
        made[name].write_text(page, encoding="utf-8")
    return made


def looked_at(browser: Browser, file: Path, width: int, scheme: Any, script: str) -> Any:
    """What a script finds, of a page that must not say or ask anything meanwhile."""
    said: list[str] = []

    def dismissed(dialog: Dialog) -> None:
        said.append(dialog.message)
        dialog.dismiss()

    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", dismissed)
    page.on("request", lambda request: said.append(request.url))
    try:
        page.goto(file.as_uri())
        for summary in page.query_selector_all("summary"):
            summary.click()
        found = page.evaluate(script)
    finally:
        page.close()
    asked = [each for each in said if each not in (file.as_uri(), "data:,")]
    assert not asked
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["usual", "hostile", "small", "bare"])
def test_it_fits(
    browser: Browser, files: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    script = (
        f"() => [document.scrollingElement.scrollWidth <= innerWidth, ({OUTSIDE})(),"
        f" ({CLIPPED})(), ({MEETING})()]"
    )

    fits, outside, clipped, meeting = looked_at(browser, files[name], width, scheme, script)

    assert outside == []
    assert clipped == []
    assert meeting == []
    assert fits


class Long(Turns):
    """A curve whose last place has a number of several digits."""

    def figures(self) -> tuple[Figure, ...]:
        points = ((64.0, Estimate(0.5, 0.4, 0.6, 8)), (4096.0, Estimate(0.4, 0.3, 0.5, 8)))
        return (
            Curve(
                title="Long", x="tokens", y="gap", series=(Series(name="mapped", points=points),)
            ),
        )


def test_numbers_below_a_curve_stay_in_one_line(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "curve.html"
    page = report(guides=None).with_part("turns", Long()).to_html()
    file.write_text(page, encoding="utf-8")
    script = """() => [...document.querySelectorAll(".ticks span")]
        .map(e => [e.textContent, e.getClientRects()[0].height < 24])"""

    found = looked_at(browser, file, 400, "light", script)

    assert found == [["64", True], ["4096", True]]


def test_what_does_not_fit_would_be_seen(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "bad.html"
    file.write_text(
        "<!doctype html><meta charset=utf-8><div class=ticks><span style='position:absolute'>one"
        "</span><span style='position:absolute'>two</span></div><p style='width:2000px'>wide</p>"
        "<p style='width:30px;overflow:hidden;white-space:nowrap'>a text that is cut</p>"
    )
    script = f"() => [({OUTSIDE})().length, ({CLIPPED})().length, ({MEETING})().length]"

    assert looked_at(browser, file, 400, "light", script) == [1, 1, 1]


@pytest.mark.parametrize("width", WIDTHS)
def test_bars_are_drawn_as_long_as_their_numbers(
    browser: Browser, files: dict[str, Path], usual: EvalReport, width: int
) -> None:
    script = """() => {
        const bars = document.querySelector(".chart").querySelectorAll(".bar");
        return Object.fromEntries([...bars].map(bar => {
            const [fill, track] = [".fill", ".track"].map(
                s => bar.querySelector(s).getBoundingClientRect());
            return [bar.querySelector("b").textContent, fill.width / track.width];
        }));
    }"""

    drawn = looked_at(browser, files["usual"], width, "light", script)

    assert usual.text is not None
    for name in ("own", "mapped", "source", "unrotated"):
        gap = usual.text.estimates(name)["gap_recovered"]
        assert gap is not None
        # The stroke adds a pixel.
        assert drawn[name] == pytest.approx(gap.value * drawn["own"], abs=0.012)


def test_the_schemes_differ_and_the_answer_is_seen_without_scrolling(
    browser: Browser, files: dict[str, Path]
) -> None:
    script = """() => [getComputedStyle(document.body).backgroundColor,
        document.querySelector(".ask").getBoundingClientRect().bottom]"""

    light, dark = (
        looked_at(browser, files["usual"], 400, scheme, script) for scheme in ("light", "dark")
    )

    assert light[0] != dark[0]
    assert light[1] < 900


def test_one_click_takes_the_command(browser: Browser, files: dict[str, Path]) -> None:
    page = browser.new_page()
    page.goto(files["usual"].as_uri())
    page.click(".command")

    taken = page.evaluate("getSelection().toString()").strip()
    page.close()

    assert taken == "kvtransfer eval a b --report 'out of the way.html'"


def test_it_prints(browser: Browser, files: dict[str, Path]) -> None:
    page = browser.new_page(viewport={"width": 740, "height": 900})
    page.emulate_media(media="print")
    page.goto(files["usual"].as_uri())

    # In print nothing scrolls: boxes that do on the screen must fit, too.
    wide = page.evaluate(
        """() => [...document.querySelectorAll(".scroll > *")]
            .filter(e => e.getBoundingClientRect().right > innerWidth + 0.5)
            .map(e => e.outerHTML.slice(0, 80))"""
    )
    pages = page.pdf(format="A4")
    page.close()

    assert wide == []
    assert pages.startswith(b"%PDF")
