"""How long reading a deep window of a given size takes here, and what a window costs a process that runs cycles.

`python benchmarks/deep_window.py read [--kernels N] [--repeats N]`: a played window of so many kernels is written as
torch's profiler writes it and read back; medians and the range over the repeats.
`python benchmarks/deep_window.py cost [--cycles N] [--repeats N]`: a process that runs small operators (on the GPU a
captured graph) takes windows one after another; each gives its own ratio of cycles inside to those around.
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

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "src")]

from specmeter.control import arm, disarm  # noqa: E402
from specmeter.control.deep import deep_window  # noqa: E402
from specmeter.trace.deep import load_deep  # noqa: E402
from tests.support.deep_files import USUAL, played  # noqa: E402
from tests.support.deep_server import ON_CPU, ON_GPU, deep_server  # noqa: E402


def read(kernels: int, repeats: int) -> dict[str, object]:
    """Seconds to read a window of about so many kernels."""
    each = sum(len(call.kernels) for call in USUAL)
    with tempfile.TemporaryDirectory() as folder:
        path = played(Path(folder), count=kernels // each + 1).write()
        size = sum(file.stat().st_size for file in (path / "deep").iterdir())
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            [window] = load_deep(path)
            seconds.append(time.perf_counter() - began)
    facts = {"kernels": len(window.kernels["t0_ns"]), "megabytes": round(size / 1e6, 1)}
    return {**facts, "median_s": statistics.median(seconds), "least_s": min(seconds), "most_s": max(seconds)}


def cost(cycles: int, repeats: int) -> dict[str, object]:
    """The costs of several windows of one process."""
    import torch

    source = ON_GPU if torch.cuda.is_available() else ON_CPU
    with tempfile.TemporaryDirectory() as folder, deep_server(Path(folder), source) as (link, _child):
        arm(link)
        for _ in range(repeats):
            time.sleep(1.0)
            deep_window(link, cycles)
        time.sleep(1.0)
        disarm(link)
        windows = [window.cost for window in load_deep(link.path)]
    keys = ("inside_ns", "outside_ns", "ratio", "prepare_s", "start_s", "stop_s", "export_s", "lost_ns")
    return {"device": source is ON_GPU, "windows": [{key: one.get(key) for key in keys} for one in windows]}


def main() -> None:
    """Print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("read", "cost"))
    parser.add_argument("--kernels", type=int, default=100_000)
    parser.add_argument("--cycles", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    result = read(args.kernels, args.repeats) if args.what == "read" else cost(args.cycles, args.repeats)
    machine = {"machine": platform.machine(), "cpus": os.cpu_count(), "python": platform.python_version()}
    print(json.dumps({**machine, **result}, indent=1))


if __name__ == "__main__":
    main()
