"""How long a module's replacement code takes to load in the server's process, for each module of a recipe's plan.

    python benchmarks/load_speed.py --engine vllm --tree DIR [--engine sglang --tree DIR] [--repeats 30]

DIR is an unpacked wheel (``benchmarks/corpus_fetch.py`` makes them). Timed is what the runtime does after an import,
but for finding the live functions, which needs the engine imported: read and unmarshal the code, read and hash the
module's file, make the points' functions, bind every code object. The thread's CPU time; the slowest module last.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import marshal
import os
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from specmeter.recipes.planner import build_plan
from specmeter.runtime.probe import Recorder
from specmeter.runtime.ring import Ring
from specmeter.runtime.swap import bind


def load_once(blob: Path, source: Path, points: dict[int, Any], value_ids: dict[str, int]) -> float:
    """CPU ms of one load."""

    def no_ring() -> Ring:
        raise AssertionError("loading records nothing")

    recorder = Recorder(no_ring, lambda point, error: None)
    begin = time.thread_time_ns()
    content = marshal.loads(blob.read_bytes())
    assert hashlib.sha256(source.read_bytes()).hexdigest() == content["sha256"]
    pairs = {id: recorder.pair(points[id], roots, value_ids) for id, roots in content["roots"].items()}
    for function in content["functions"]:
        bind(function["code"], pairs, str(source))
        if function["cycle_code"] is not None:
            bind(function["cycle_code"], pairs, str(source))
    return (time.thread_time_ns() - begin) / 1e6


def measure(engine: str, tree: Path, repeats: int) -> list[dict[str, Any]]:
    """One row a module of the engine's plan."""
    env = {**os.environ, "PYTHONPATH": str(tree)}
    plan, code = _parts(build_plan(Path(sys.executable), engine, env=env))
    points = {point["id"]: point for point in plan["points"]}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, raw in code.items():
            blob = Path(folder) / f"{name}.bin"
            blob.write_bytes(raw)
            own = [point for point in plan["points"] if point["module"] == name]
            source = Path(own[0]["path"])
            took = [load_once(blob, source, points, plan["value_ids"]) for _ in range(repeats)]
            rows.append(
                {
                    "engine": f"{engine} {plan['engine_version']}",
                    "module": name,
                    "points": len(own),
                    "ms": round(statistics.median(took), 3),
                    "ms_most": round(max(took), 3),
                }
            )
    return rows


def _parts(planned: Any) -> tuple[dict[str, Any], dict[str, bytes]]:
    return planned.plan, planned.code


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="append", required=True)
    parser.add_argument("--tree", action="append", required=True, type=Path)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [
        row for engine, tree in zip(args.engine, args.tree, strict=True) for row in measure(engine, tree, args.repeats)
    ]
    if args.json:
        print(json.dumps(rows))
        return
    print(f"CPython {platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores; CPU ms a module")
    for row in rows:
        print(
            f"{row['engine']:16} {row['module']:62} {row['points']:3} points "
            f"{row['ms']:7.3f} (most {row['ms_most']:.3f})"
        )
    print(f"slowest module: {max(row['ms'] for row in rows):.3f} ms")


if __name__ == "__main__":
    main()
