"""How long reading an engine's source takes: outline, index cold and warm, plan. Writes one JSON document.

``python benchmarks/source_speed.py [--repeats 7]`` uses an unpacked wheel of ``corpus_fetch.py``. The tasks are
interleaved and repeated; medians and the range are given in milliseconds, a fresh interpreter and its start included.
*Cold* means without specmeter's own cache; the operating system's file cache is warm: the fetch wrote the files.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from corpus_fetch import fetch

from specmeter.recipes import loader
from specmeter.recipes.asking import FAR
from specmeter.recipes.far_program import program_command

RELEASE = "sglang==0.5.23"
LIMITS_MS = {
    "outline of one module": 150,
    "index of srt, cold": 2500,
    "index of the package, cold": 5000,
    "index of srt, warm": 400,
    "index of the package, warm": 400,
    "source command, python -m": 150,
    "source command, console script": 150,
    "plan command": 600,
}


def far(request: dict[str, Any], cache: str) -> float:
    """Milliseconds that ``far.py`` takes for one request in a fresh interpreter."""
    env = {**os.environ, "XDG_CACHE_HOME": cache}
    start = time.perf_counter()
    done = subprocess.run(
        program_command(sys.executable, FAR), input=json.dumps(request).encode(), capture_output=True, env=env
    )
    spent = (time.perf_counter() - start) * 1e3
    if b'"ok"' not in done.stdout[:10]:
        raise RuntimeError(done.stdout.decode()[:500] + done.stderr.decode()[-500:])
    return spent


def command(*words: str) -> float:
    """Milliseconds that a command takes from its start to its end."""
    start = time.perf_counter()
    subprocess.run(words, capture_output=True, check=True)
    return (time.perf_counter() - start) * 1e3


def tasks(tree: Path, cache: str) -> dict[str, Callable[[], float]]:
    """What is timed, by name; a cold task empties the cache first, and the warm one after it finds it filled."""
    package = str(tree / "sglang")
    srt = str(tree / "sglang" / "srt")

    def cold(target: str) -> Callable[[], float]:
        def run() -> float:
            shutil.rmtree(Path(cache, "specmeter"), ignore_errors=True)
            return far({"op": "package", "target": target}, cache)

        return run

    recipe = loader.built_in("sglang").data
    resolve = {"op": "resolve", "recipes": [recipe], "path": str(tree), "with_code": False}
    worker = str(tree / "sglang" / "srt" / "speculative" / "eagle_worker_v2.py")
    module = [sys.executable, "-m", "specmeter"]
    script = str(Path(sys.executable).with_name("specmeter"))
    source = ["source", "sglang.srt.speculative.eagle_worker_v2", "--path", str(tree)]
    return {
        "outline of one module": lambda: far({"op": "outline", "target": worker}, cache),
        "index of srt, cold": cold(srt),
        "index of srt, warm": lambda: far({"op": "package", "target": srt}, cache),
        "index of the package, cold": cold(package),
        "index of the package, warm": lambda: far({"op": "package", "target": package}, cache),
        "resolve a plan": lambda: far(resolve, cache),
        "source command, python -m": lambda: command(*module, *source),
        "source command, console script": lambda: command(script, *source),
        "plan command": lambda: command(*module, "plan", "--engine", "sglang", "--path", str(tree)),
    }


def main() -> int:
    """Time every task, interleaved, and print the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    tree = fetch(RELEASE)
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(args.repeats):
            for name, run in tasks(tree, cache).items():
                times.setdefault(name, []).append(run())
    rows = {
        name: {
            "median_ms": round(statistics.median(values), 1),
            "min_ms": round(min(values), 1),
            "max_ms": round(max(values), 1),
            "limit_ms": LIMITS_MS.get(name),
        }
        for name, values in times.items()
    }
    machine = {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }
    print(json.dumps({"release": RELEASE, "repeats": args.repeats, "machine": machine, "tasks": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
