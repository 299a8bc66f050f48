"""The page of ``memckpt report``, looked at in a real browser: light and dark, on a phone and on a desk."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.monitoring.reports import everything, write
from tests.support.trainings.cli_harness import invoke

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium (Debian's package) is installed"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        # The sandbox needs rights that a container or root has not; the page is our own.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run")
    write(run, everything())
    assert invoke("report", run)[0] == 0
    return run / "report.html"


@pytest.mark.parametrize("width", [360, 1400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_page(browser: Any, page_file: Path, scheme: str, width: int) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    page = context.new_page()
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(page_file.as_uri())
    assert said == []
    assert [url[:80] for url in asked if not url.startswith(("file:", "data:"))] == []
    # Nothing is wider than the window; wide tables scroll by themselves.
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # Every picture is drawn, and is the one for this theme and width.
    drawn = page.evaluate("[...document.images].map(one => [one.complete, one.naturalWidth, one.currentSrc])")
    assert len(drawn) >= 7
    assert all(complete and natural > 0 for complete, natural, _ in drawn)
    sources = page.evaluate(
        "[...document.querySelectorAll('picture')].map(one => [...one.querySelectorAll('source')].map(s => s.srcset)"
        ".concat([one.querySelector('img').src]))"
    )
    place = {("dark", 360): 0, ("light", 360): 1, ("dark", 1400): 2, ("light", 1400): 3}[scheme, width]
    assert [current for _, _, current in drawn] == [each[place] for each in sources]
    # Text can be read on its background, everywhere (WCAG AA asks for 4.5).
    assert min(page.evaluate(CONTRASTS)) >= 4.5
    # The list of events opens.
    assert not page.is_visible("#events table")
    page.click("#events summary")
    assert page.is_visible("#events table")
    assert len(page.screenshot(full_page=True)) > 10_000
    context.close()


CONTRASTS = """() => {
  const channel = value => (value /= 255) <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
  const numbers = color => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const paper = one => {
    for (; one; one = one.parentElement) {
      const found = numbers(getComputedStyle(one).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll("h1, h2, p, dt, dd, small, th, td, td span, summary, footer")].map(one => {
    const [above, below] = [light(numbers(getComputedStyle(one).color)), light(paper(one))];
    return (Math.max(above, below) + 0.05) / (Math.min(above, below) + 0.05);
  });
}"""
