"""How long it takes to read 10 million records and reduce them to the phase table, and how much memory.

    python benchmarks/trace_speed.py [--records 10000000] [--repeats 5]

Each repeat is a fresh process, so that peak memory is that of one reading; the ring is in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from specmeter.analysis.breakdown import breakdown
from specmeter.runtime import layout
from specmeter.trace import load_rings
from specmeter.trace.synthetic import make_plan, make_records, repeat_cycle, write_ring

PHASES = ("draft.forward", "draft.head", "verify.forward", "verify.logits", "accept.sample", "kv.meta", "kv.move")


def pattern() -> tuple[dict[str, object], int]:
    """One cycle of 50 records: 38 leaf calls, 4 frames around them, the cycle, 7 values."""
    points = [("cycle", "cycle", "none")]
    points += [(name, "leaf", "loop" if name.startswith("draft") else "none") for name in PHASES]
    points += [(f"other.frame{i}", "span", "none") for i in range(4)]
    values = [f"cycle.{name}" for name in ("drafted", "accepted", "steps", "batch", "tokens", "rank", "world")]
    return make_plan(points, values), len(points)


def write(path: Path, count: int) -> dict[str, object]:
    """Write a ring of ``count`` records; gives its plan."""
    plan, points = pattern()
    rows, clock = [], 1_000_000
    for frame in range(4):
        begin = clock
        for call in range(10 if frame < 2 else 9):
            point = 2 + (frame * 10 + call) % len(PHASES)
            rows.append((clock + 1000, clock + 90_000, 0, point, layout.KIND_HOST_SPAN, 0, 0))
            clock += 100_000
        rows.append((begin, clock, 0, 2 + len(PHASES) + frame, layout.KIND_HOST_SPAN, 0, 0))
    rows.append((999_000, clock + 1000, 0, 1, layout.KIND_HOST_SPAN, 0, 0))
    rows += [(3, clock + 1000, 0, points + 1 + i, layout.KIND_VALUE, 0, 0) for i in range(7)]
    cycles = count // len(rows)
    write_ring(path, repeat_cycle(make_records(rows), cycles, clock, 50_000), perf_counter_ns=0)
    return plan


def once(path: Path, plan: dict[str, object]) -> None:
    """Read and reduce in this process; print seconds and peak memory as JSON."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin, cpu = time.perf_counter(), time.process_time()
    trace = load_rings([path], plan)
    loaded = time.perf_counter()
    table = breakdown(trace.main, trace.index)
    done = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(
        json.dumps(
            {
                "load_s": loaded - begin,
                "total_s": done - begin,
                "cpu_s": time.process_time() - cpu,
                "peak_mib": peak / 1024,
                "before_mib": before / 1024,
                "records": trace.records,
                "cycles": len(trace.main.cycles),
                "phases": len(table.rows),
            }
        )
    )


def main() -> None:
    """Write the ring, read it in fresh processes, print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--once", nargs=2, metavar=("RING", "PLAN"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.once:
        once(Path(args.once[0]), json.loads(Path(args.once[1]).read_text()))
        return
    with tempfile.TemporaryDirectory() as folder:
        ring, plan = Path(folder) / "1-1.ring", Path(folder) / "plan.json"
        plan.write_text(json.dumps(write(ring, args.records)))
        runs = []
        for _ in range(args.repeats):
            command = [sys.executable, __file__, "--once", str(ring), str(plan)]
            runs.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        seconds = [run["total_s"] for run in runs]
        print(f"{platform.machine()}, {platform.python_version()}, {len(runs)} repeats, load {os.getloadavg()[0]:.1f}")
        print(f"{runs[0]['records']} records, {runs[0]['cycles']} cycles, {runs[0]['phases']} rows")
        print(f"seconds: median {statistics.median(seconds):.2f}, all {[round(s, 2) for s in seconds]}")
        print(f"processor seconds: median {statistics.median(run['cpu_s'] for run in runs):.2f}")
        print(f"reading and nesting: median {statistics.median(r['load_s'] for r in runs):.2f} s")
        print(f"peak memory: {max(r['peak_mib'] for r in runs):.0f} MiB (the mapped ring included)")


if __name__ == "__main__":
    main()
