"""The pages of a run in a real browser: no error, every figure drawn, a phone's width, dark mode."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from experiments import runner
from experiments.config import defaults
from experiments.runner import RunResult

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
WIDTHS = {"phone": 360, "desktop": 1280}
PAGES = ("report.html", "compare.html")
# Every text of the page with its colour, its size and the first background behind it that is not transparent.
TEXTS = """() => {
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (!/^(transparent|rgba\\(.*, 0\\))$/.test(colour)) return colour;
    }
    return 'none';
  };
  const texts = [...document.querySelectorAll('body *:not(svg *):not(style)')]
    .filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()))
    .map(e => [e.tagName + ' ' + e.textContent.trim().slice(0, 40), getComputedStyle(e).color, behind(e)]);
  // Text in a plot is drawn as outlines of glyphs.
  const glyphs = [...document.querySelectorAll('svg g[id*="-text_"] use')]
    .map(e => ['glyph in ' + e.closest('figure').id, getComputedStyle(e).fill, behind(e.closest('figure'))]);
  return [...texts, ...glyphs];
}"""


# Chromium looks at files: neither Python's version nor JAX's reaches what it draws.
pytestmark = pytest.mark.once
PATIENCE = 300_000  # ms; a browser that draws in software on a busy machine takes its time


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium. Where there is none the tests are skipped, and say what to install."""
    if CHROMIUM is None:
        pytest.skip("no Chromium was found: install it (Debian: apt-get install chromium)")
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install '.[test]'"
    )
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def pages(small_run: RunResult, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report, and a comparison of the run with a copy of itself."""
    path = tmp_path_factory.mktemp("compared")
    shutil.copytree(small_run.path, path / "again")
    compared = runner.run(defaults(compare=f"{small_run.path},{path / 'again'}"), path / "out")
    return {"report.html": small_run.path / "report.html", "compare.html": compared.path / "compare.html"}


@pytest.fixture(params=[(p, s, w) for p in PAGES for s in ("light", "dark") for w in WIDTHS], ids="-".join)
def view(request: pytest.FixtureRequest, browser: Any, pages: dict[str, Path]) -> Iterator[Any]:
    """A page as opened in one colour scheme at one width; `view.problems` fills while it is used."""
    name, scheme, width = request.param
    context = browser.new_context(viewport={"width": WIDTHS[width], "height": 800}, color_scheme=scheme)
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.problems, page.scheme = [], scheme
    page.on("console", lambda message: page.problems.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("requestfailed", lambda request: page.problems.append(f"failed: {request.url}"))
    page.goto(pages[name].as_uri())
    yield page
    context.close()


def channels(colour: str) -> list[float]:
    """Red, green and blue of a computed colour, 0 to 1."""
    return [float(x) / 255 for x in colour[colour.index("(") + 1 : -1].split(",")[:3]]


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Contrast ratio as WCAG 2 defines it, 1 to 21."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_that_of_wcag() -> None:
    assert contrast("rgb(0, 0, 0)", "rgb(255, 255, 255)") == pytest.approx(21)
    assert contrast("rgb(118, 118, 118)", "rgb(255, 255, 255)") == pytest.approx(4.54, abs=0.01)


def test_a_page_is_whole_readable_and_fits(view: Any) -> None:
    assert view.problems == []
    assert view.locator(".answer").inner_text().endswith(".")
    width = view.evaluate("innerWidth")
    assert view.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"

    figures = view.locator("figure").all()
    assert len(figures) >= 2
    for figure in figures:
        box = figure.locator("svg").bounding_box()
        assert box["width"] > 250
        assert box["height"] > 80
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
        assert figure.locator("figcaption").inner_text().strip()
        pixels = matplotlib.image.imread(io.BytesIO(figure.locator("svg").screenshot()))[..., :3]
        drawn = (abs(pixels - pixels[0, 0]).max(-1) > 0.2).mean()
        assert 0.005 < drawn < 0.9, "nothing is drawn, or nothing but a block"

    texts = view.evaluate(TEXTS)
    assert sum(what.startswith("glyph") for what, _, _ in texts) > 100
    unreadable = {(what, ink, paper) for what, ink, paper in texts if contrast(ink, paper) < 4.5}
    assert unreadable == set()
    paper = view.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (luminance(paper) < 0.1) == (view.scheme == "dark")
