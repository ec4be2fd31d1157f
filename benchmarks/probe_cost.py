"""What a host probe costs: hot (a loop of nothing else) and in place (between matrix products of about 15 ms).

    python benchmarks/probe_cost.py [--json] [--no-product]

The probed function is a real one: rewritten by ``source.rewrite``, bound and swapped by ``runtime``, with a ring on
disk (TMPDIR says where). Hot: blocks of 100,000 calls, armed and disarmed in random order, cost = (time armed - time
disarmed) / calls; the reference is the least that a span can be (two clock reads, one pack_into, try). In place: numpy
products, then 20 calls; rounds are armed or disarmed at random, and the cost is the difference of the medians per call,
with a bootstrap interval. Times are the thread's CPU time, so that other work on the machine does not count as the
probe's (what it does to the caches still does). ``original`` says whether disarming gave the very same code object.
"""

from __future__ import annotations

import argparse
import ast
import json
import marshal
import mmap
import os
import platform
import random
import statistics
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

SOURCE = """
def leaf(x):
    return x

def plain(x):
    return leaf(x)

def many(x):
    leaf(x); leaf(x); leaf(x); leaf(x); leaf(x)
    leaf(x); leaf(x); leaf(x); leaf(x); leaf(x)
    leaf(x); leaf(x); leaf(x); leaf(x); leaf(x)
    leaf(x); leaf(x); leaf(x); leaf(x); leaf(x)
"""
CALLS = 20


def _points(tree: ast.Module) -> list[dict[str, Any]]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    keys = ("lineno", "col_offset", "end_lineno", "end_col_offset")
    names = ("line", "col", "end_line", "end_col")
    return [
        {"id": i + 1, "name": "leaf", "kind": "call", "role": "leaf"}
        | {name: getattr(call, key) for name, key in zip(names, keys)}  # noqa: B905 (3.9)
        for i, call in enumerate(calls)
    ]


def _package(name: str, folder: Path) -> None:
    """The two folders of the project that run on 3.9, without the rest of it."""
    package = types.ModuleType(name)
    package.__path__ = [str(folder)]
    sys.modules[name] = package


def prepare(ring: Path) -> tuple[types.ModuleType, list[Any]]:
    """The sample module and the swaps of its functions."""
    src = Path(__file__).resolve().parents[1] / "src" / "specmeter"
    _package("specmeter", src)
    _package("specmeter.source", src / "source")
    from specmeter.runtime.probe import Recorder
    from specmeter.runtime.ring import Ring
    from specmeter.runtime.swap import Swap, find_functions
    from specmeter.source.rewrite import rewrite_module

    tree = ast.parse(SOURCE)
    points = _points(tree)
    content = marshal.loads(rewrite_module(tree, "sample.py", "sample", "", points)["blob"])
    module = types.ModuleType("sample")
    exec(compile(SOURCE, "sample.py", "exec"), module.__dict__)
    recorder = Recorder(lambda: Ring(str(ring), 1 << 20, b""), lambda point, error: print("fault", error))
    pairs = {point["id"]: recorder.pair(point, [], {}) for point in points}
    swaps = [Swap(f, find_functions(module, f["qualname"], f["code"]), pairs) for f in content["functions"]]
    return module, swaps


def hot(module: types.ModuleType, swaps: list[Any], blocks: int) -> list[float]:
    """Cost per call in ns, one figure a pair of blocks."""
    costs = []
    for _ in range(blocks):
        took = {}
        for state in random.sample(["in", "out"], 2):
            for swap in swaps:
                swap.put(state)
            many, calls = module.many, range(5000)
            for _ in range(20):
                many(1)
            begin = time.thread_time_ns()
            for _ in calls:
                many(1)
            took[state] = (time.thread_time_ns() - begin) / (5000 * CALLS)
        costs.append(took["in"] - took["out"])
    return costs


def reference(blocks: int) -> list[float]:
    """ns a call of the least that a span can be, over an empty call; one figure a block."""
    from itertools import count

    from specmeter.runtime import layout

    buffer, pack, slots = mmap.mmap(-1, 1 << 25), layout.RECORD.pack_into, count().__next__
    clock = time.perf_counter_ns

    def span(t0: int, result: int) -> int:
        try:
            slot = slots()
            pack(buffer, slot % 1000000 * 32, t0, clock(), 0, 1, 0, 0, 0, slot)
        except ValueError:
            raise
        return result

    found = []
    for _ in range(blocks):
        begin = time.thread_time_ns()
        for _ in range(100_000):
            span(clock(), 1)
        middle = time.thread_time_ns()
        for _ in range(100_000):
            pass
        end = time.thread_time_ns()
        found.append(((middle - begin) - (end - middle)) / 100_000)
    return found


def in_place(module: types.ModuleType, swaps: list[Any], rounds: int) -> tuple[list[float], list[float], float]:
    """Times per call in ns of armed and disarmed rounds, and the median time of the product in ms."""
    import numpy

    size = 1000
    a = numpy.random.default_rng(0).random((size, size), dtype=numpy.float32)
    begin = time.perf_counter()
    a @ a
    a @ a
    times = max(1, round(0.015 / ((time.perf_counter() - begin) / 2)))
    products: list[float] = []
    took: dict[str, list[float]] = {"in": [], "out": []}
    for _ in range(rounds):
        state = random.choice(["in", "out"])
        for swap in swaps:
            swap.put(state)
        start = time.perf_counter()
        for _ in range(times):
            a @ a
        products.append((time.perf_counter() - start) * 1e3)
        begin = time.thread_time_ns()
        module.many(1)
        took[state].append((time.thread_time_ns() - begin) / CALLS)
    return took["in"], took["out"], statistics.median(products)


def interval(armed: list[float], disarmed: list[float], draws: int = 2000) -> tuple[float, float, float]:
    """Median difference with its 95 % bootstrap interval (percentile method)."""
    rng = random.Random(1)
    point = statistics.median(armed) - statistics.median(disarmed)
    found = sorted(
        statistics.median(rng.choices(armed, k=len(armed))) - statistics.median(rng.choices(disarmed, k=len(disarmed)))
        for _ in range(draws)
    )
    return found[int(0.025 * draws)], point, found[int(0.975 * draws)]


def load_cost(repeats: int = 50) -> float:
    """Median ms to load a module's code: read, unmarshal, bind (a blob of 20 functions with 60 points)."""
    from specmeter.runtime.probe import Recorder
    from specmeter.runtime.swap import bind
    from specmeter.source.rewrite import rewrite_module

    source = "def leaf(x):\n    return x\n" + "".join(
        f"def f{i}(x):\n" + "    y = leaf(x); z = leaf(y); w = leaf(z)\n" + "    x = [x, y, z, w, 1, 2, 3]\n" * 40
        for i in range(20)
    )
    tree = ast.parse(source)
    points = _points(tree)
    blob = rewrite_module(tree, "big.py", "big", "", points)["blob"]
    recorder = Recorder(lambda: None, lambda point, error: None)  # type: ignore[arg-type,return-value]
    took = []
    for _ in range(repeats):
        begin = time.perf_counter()
        content = marshal.loads(blob)
        pairs = {point["id"]: recorder.pair(point, [], {}) for point in points}
        for function in content["functions"]:
            bind(function["code"], pairs, "big.py")
        took.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(took)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=1200)
    parser.add_argument("--no-product", action="store_true", help="leave the measurement in place out (no numpy)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        module, swaps = prepare(Path(folder) / "ring")
        originals = [swap.original for swap in swaps]
        costs = hot(module, swaps, args.blocks)
        low, point, high = interval(costs, [0.0])
        result: dict[str, Any] = {
            "python": platform.python_version(),
            "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            "hot_ns": {"low": low, "point": point, "high": high, "n": len(costs)},
            "reference_hot_ns": statistics.median(reference(args.blocks)),
            "load_module_60_points_ms": load_cost(),
        }
        if not args.no_product:
            armed, disarmed, product = in_place(module, swaps, args.rounds)
            low, point, high = interval(armed, disarmed)
            result["in_place_ns"] = {"low": low, "point": point, "high": high, "n": len(armed) + len(disarmed)}
            result["product_ms"] = product
        for swap in swaps:
            swap.put("out")
        result["original"] = all(
            swap.functions[0].__code__ is code for swap, code in zip(swaps, originals, strict=True)
        )
    if args.json:
        print(json.dumps(result))
        return
    print(f"CPython {result['python']}, {result['machine']}")
    for key in ("hot_ns", "in_place_ns"):
        if key in result:
            cost = result[key]
            print(f"{key:12} {cost['point']:7.0f}  [{cost['low']:.0f}, {cost['high']:.0f}]  n={cost['n']}")
    print(f"reference    {result['reference_hot_ns']:7.0f}  (hot; two clock reads, one pack_into, try)")
    print(f"load a module with 60 points: {result['load_module_60_points_ms']:.2f} ms")
    print(f"disarmed runs the very original code objects: {result['original']}")


if __name__ == "__main__":
    main()
