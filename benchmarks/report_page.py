"""What the report page costs: seconds to make, megabytes, and seconds until a real Chromium has opened it.

    python benchmarks/report_page.py [--ranks 10] [--cycles 100000] [--repeats 5]

Makes the tables of a run as large as asked (five spans a cycle) in a temporary folder; needs the extras html, data, dev
and a Chromium. Opening is timed in a fresh window each time, from the request to the page's load event and first paint.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import specmeter
from specmeter.reporters.html import write_page
from tests.support.chromium import browser
from tests.support.report_documents import big_run

TIMES = """() => { const n = performance.getEntriesByType('navigation')[0];
  const p = performance.getEntriesByName('first-contentful-paint')[0];
  return {load_ms: n.loadEventEnd, paint_ms: p ? p.startTime : null}; }"""


def main() -> None:
    """Print one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=10)
    parser.add_argument("--cycles", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = big_run(Path(folder), args.cycles, args.ranks)
        page, made = Path(folder) / "page.html", []
        for _ in range(args.repeats):
            begun = time.perf_counter()
            write_page(specmeter.load(path), page)
            made.append(time.perf_counter() - begun)
        opened = _open(page, args.repeats)
        size = page.stat().st_size
    machine = f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}"
    print(json.dumps({"ranks": args.ranks, "cycles": args.cycles, "machine": machine, "page_mb": size / 1e6,
                      "make_s": _summary(made), **opened}, indent=1))  # fmt: skip


def _open(page: Path, repeats: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {"load_ms": [], "paint_ms": []}
    with browser() as chromium:
        for _ in range(repeats + 1):
            window = chromium.new_context(viewport={"width": 1440, "height": 900})
            tab = window.new_page()
            tab.goto(page.as_uri())
            times = tab.evaluate(TIMES)
            while times["paint_ms"] is None:
                tab.wait_for_timeout(50)
                times = tab.evaluate(TIMES)
            for name, value in times.items():
                found[name].append(value)
            window.close()
    # The first window pays for the browser's own start.
    return {name: _summary(values[1:]) for name, values in found.items()}


def _summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


if __name__ == "__main__":
    main()
