"""What one host probe costs between two passes over memory that fill every cache, as an engine's weights do.

    python benchmarks/probe_cold.py [--seconds 60] [--json]

Before each call a matrix-vector product reads 128 MB; then one probed or original function (``probe_cost.prepare``:
the real rewriting, swap and ring) is called once, drawn at random. The cost is the difference of the median wall times,
with a bootstrap interval. Most of it is misses of the caches and the TLB, so it depends on the machine and on its load
more than ``probe_cost.py`` does; its calls in place share a product among 20 and so find most things warm.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path

import numpy
from probe_cost import interval, prepare


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    draw = random.Random(0)
    matrices = [numpy.ones((8192, 4096), numpy.float32) for _ in range(2)]
    vector = numpy.ones(4096, numpy.float32)
    took: dict[str, list[float]] = {"in": [], "out": []}
    with tempfile.TemporaryDirectory() as folder:
        module, swaps = prepare(Path(folder) / "ring")
        clock, until, turn = time.perf_counter_ns, time.monotonic() + args.seconds, 0
        # Both are there from the start: a swap just before the call would itself warm what the probe needs.
        functions = {}
        for state in ("out", "in"):
            for swap in swaps:
                swap.put(state)
            functions[state] = type(module.plain)(module.plain.__code__, module.__dict__)
            for _ in range(200):
                functions[state](1)
        while time.monotonic() < until:
            turn += 1
            matrices[turn % 2] @ vector
            state = draw.choice(("in", "out"))
            function = functions[state]
            begin = clock()
            function(1)
            took[state].append(float(clock() - begin))
    low, point, high = interval(took["in"], took["out"], 500)
    result = {
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "cold_us": {"low": low / 1e3, "point": point / 1e3, "high": high / 1e3, "n": len(took["in"])},
        "original_us": statistics.median(took["out"]) / 1e3,
    }
    print(json.dumps(result, indent=None if args.json else 1))


if __name__ == "__main__":
    main()
