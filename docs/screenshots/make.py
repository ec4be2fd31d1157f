"""Takes the screenshots of this folder from saved runs, in a real Chromium.

specmeter demo --out DIR && specmeter check --target T --draft D --json > CHECK.json
python docs/screenshots/make.py DIR CHECK.json [RUN]

RUN is a run whose rings hold device spans; without it that picture stays as it is.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

import specmeter  # noqa: E402
from specmeter.reporters.html import write_page  # noqa: E402
from tests.support.chromium import browser, open_page  # noqa: E402

# Name, width, dark, the section at the top of the window ("" for the page's own top), height.
SHOTS = (
    ("demo-1440-light", 1440, False, "", 1320),
    ("demo-1440-cycle", 1440, False, "profile-cycle", 1250),
    ("demo-1440-timeline-dark", 1440, True, "profile-timeline", 1000),
    ("demo-800-dark", 800, True, "", 1320),
    ("demo-800-acceptance", 800, False, "profile-acceptance", 1300),
)


def main() -> None:
    """Write the PNG files."""
    with tempfile.TemporaryDirectory() as folder, browser() as chromium:
        path = write_page(specmeter.load(sys.argv[1]), Path(folder) / "page.html")
        for name, width, dark, anchor, height in SHOTS:
            page = open_page(chromium, path, width, dark).page
            page.set_viewport_size({"width": width, "height": height})
            if anchor:
                page.evaluate("(id) => document.getElementById(id).scrollIntoView()", anchor)
            page.screenshot(path=HERE / f"{name}.png")
        wiring = json.loads(Path(sys.argv[2]).read_text(encoding="utf-8"))["result"]
        write_page(specmeter.load(sys.argv[1]), path, wiring)
        open_page(chromium, path).page.locator("#wiring figure").screenshot(path=HERE / "wiring.png")
        if len(sys.argv) > 3:
            write_page(specmeter.load(sys.argv[3]), path)
            open_page(chromium, path).page.locator("#timeline").screenshot(path=HERE / "timeline-device.png")


if __name__ == "__main__":
    main()
