"""A real Chromium for the tests of the page; they are skipped, with the reason, where there is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str:
    """The browser named by SPECMETER_CHROMIUM or the first on PATH; skips the test where there is none."""
    pytest.importorskip("playwright", reason="playwright is not installed (extra: dev)")
    found = os.environ.get("SPECMETER_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    return found


@contextmanager
def browser() -> Iterator[Any]:
    """A headless browser."""
    path = find_chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # Root in a container has no sandbox of its own; the pages are ours.
        chromium = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@dataclass
class Opened:
    """An opened page and what it said: console messages of warnings and errors, exceptions, and addresses asked for."""

    page: Any
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def tidy(self, path: Path) -> None:
        """Fail if the page said anything or asked for anything but itself."""
        assert not self.said, self.said
        assert {url.partition("#")[0] for url in self.asked} == {path.resolve().as_uri()}, self.asked


def open_page(chromium: Any, path: Path, width: int = 1440, dark: bool = False, **how: Any) -> Opened:
    """Open a file in a fresh window of ``width`` pixels."""
    window = chromium.new_context(
        viewport={"width": width, "height": 900}, color_scheme="dark" if dark else "light", **how
    )
    opened = Opened(window.new_page())
    opened.page.on("console", lambda m: opened.said.append(m.text) if m.type in ("error", "warning") else None)
    opened.page.on("pageerror", lambda error: opened.said.append(str(error)))
    opened.page.on("request", lambda request: opened.asked.append(request.url))
    opened.page.goto(path.resolve().as_uri())
    return opened


# Elements whose box leaves the window, and text of charts that leaves its drawing (by more than 1.5 pixels).
OVERFLOW = """() => {
  const out = [];
  const wide = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > wide) out.push("page " + document.documentElement.scrollWidth);
  for (const e of document.querySelectorAll("body *")) {
    if (e.closest(".scroll table") || e.closest("svg") || e.closest(".skip")) continue;
    const b = e.getBoundingClientRect();
    if (b.width && (b.right > wide + 1.5 || b.left < -1.5)) out.push(e.tagName + "." + e.className + " " + b.right);
  }
  for (const t of document.querySelectorAll(".chart svg text")) {
    const b = t.getBoundingClientRect(), s = t.closest("svg").getBoundingClientRect();
    const wider = b.right > s.right + 1.5 || b.left < s.left - 1.5;
    if (b.width && (wider || b.bottom > s.bottom + 1.5 || b.top < s.top - 1.5))
      out.push("text '" + t.textContent + "' " + JSON.stringify([b.left - s.left, b.right - s.right]));
  }
  return out;
}"""

# Contrast (WCAG 2.1) of chart text (4.5 wanted) and marks (3 wanted) against the page, which axe-core leaves out.
CONTRAST = """() => {
  const rgb = (c) => (c.match(/[\\d.]+/g) || []).map(Number);
  const linear = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (c) => {
    const [r, g, b] = rgb(c).slice(0, 3).map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => {
    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const back = getComputedStyle(document.body).backgroundColor;
  const low = [];
  for (const t of document.querySelectorAll(".chart svg text")) {
    const r = ratio(getComputedStyle(t).fill, back);
    if (r < 4.5) low.push("text " + t.textContent + " " + r.toFixed(2));
  }
  for (const m of document.querySelectorAll(".chart .mark")) {
    const s = getComputedStyle(m), paint = s.fill !== "none" ? s.fill : s.stroke, r = ratio(paint, back);
    if (r < 3) low.push("mark " + m.getAttribute("aria-label") + " " + paint + " " + r.toFixed(2));
  }
  return low;
}"""
