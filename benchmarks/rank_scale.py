"""Reading and comparing many ranks: time and memory over the number of ranks, with the same records a rank.

    flock /tmp/heavy.lock python benchmarks/rank_scale.py --ranks 8 16 32 64 --cycles 2000 --rounds 5 --out scale.json

Rings of made-up ranks on several hosts (8 a host) are written: clocks hours apart, drift, calendars that are wrong, a
straggler and a missing rank. Each measurement is a process of its own that reads the rings, builds the trace and the
table of ranks with their clocks; counts are interleaved. Memory is the peak resident size above that before reading
(Linux). The exponent is the slope of log time over log ranks (1: linear). What was recovered is checked each time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from specmeter.analysis.rank_arrivals import RankSkew, rank_skew
from specmeter.analysis.ranks import rank_tables
from specmeter.trace.build import load_rings
from specmeter.trace.synthetic_ranks import PLAN, Ranks, write_ranks

HOUR_NS = 3_600_000_000_000
PER_HOST = 8
MISSING = 3


def main() -> None:
    """Write the rings, measure, print the table."""
    options = parse()
    if options.child is not None:
        print(json.dumps(measure(options.child, options.count, options.cycles)))
        return
    found: dict[int, list[dict[str, Any]]] = {count: [] for count in options.ranks}
    with tempfile.TemporaryDirectory() as folder:
        for count in options.ranks:
            (Path(folder) / str(count)).mkdir()
            write_ranks(Path(folder) / str(count), made(count, options.cycles))
        for _round in range(options.rounds):
            for count in options.ranks:
                found[count].append(in_process(Path(folder) / str(count), count, options.cycles))
    show(found)
    if options.out:
        facts = {"machine": platform.machine(), "cpus": os.cpu_count(), "python": platform.python_version()}
        options.out.write_text(json.dumps({**facts, "cycles": options.cycles, "ranks": found}, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--cycles", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def made(count: int, cycles: int) -> Ranks:
    """The made-up server of ``count`` ranks."""
    hosts = max(2, count // PER_HOST)
    return Ranks(
        count, hosts, cycles, offset_ns=tuple(h * 7 * HOUR_NS + 1_234 * h for h in range(hosts)),
        drift=tuple((-1) ** h * 4e-6 * h for h in range(hosts)), straggler=count - 2, missing=(MISSING,),
        calendar_ns=tuple((-1) ** h * h * HOUR_NS for h in range(hosts)),
    )  # fmt: skip


def in_process(folder: Path, count: int, cycles: int) -> dict[str, Any]:
    """One measurement in a fresh process."""
    command = [sys.executable, __file__, "--child", str(folder), "--count", str(count), "--cycles", str(cycles)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measure(folder: Path, count: int, cycles: int) -> dict[str, Any]:
    """Read and compare the rings; seconds by part, MiB above the imports', and what was recovered."""
    before = status_mib("VmRSS")
    # The imports' own peak is higher than what stays of them; without this the small counts would vanish below it.
    Path("/proc/self/clear_refs").write_text("5")
    start = time.perf_counter()
    trace = load_rings(sorted(folder.glob("*.ring")), PLAN)
    read = time.perf_counter()
    rank_tables(trace, np.zeros(0, bool))
    done = time.perf_counter()
    peak = status_mib("VmHWM")
    skew = rank_skew(trace, np.arange(cycles) < cycles - 1)
    assert skew is not None
    return {
        "records": trace.records, "read_s": read - start, "compare_s": done - read, "mib": peak - before,
        **recovered(made(count, cycles), skew),
    }  # fmt: skip


def status_mib(name: str) -> float:
    """A figure of this process's memory (proc(5), status), MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"this system tells no {name}")


def recovered(ranks: Ranks, skew: RankSkew) -> dict[str, Any]:
    """How far the joined clocks are off the true ones at most, their bound, and whether the missing rank is named."""
    begin = ranks.begins()[0][:-1]
    wrong, bound = 0, 0
    for clock in skew.clocks:
        shown = ranks.read(begin, ranks.host(clock.rank))
        wrong = max(wrong, int(np.abs(clock.onto(shown) - begin).max()))
        assert clock.error_ns is not None, clock
        bound = max(bound, clock.error_ns)
    assert wrong <= bound, (wrong, bound)
    assert any(f"no cycles of rank {MISSING}" in note for note in skew.notes), skew.notes
    late = skew.ranks[int(np.argmax(skew.arrivals[0].last_percent))][1]
    assert late == ranks.straggler, late
    return {"clock_wrong_us": wrong / 1e3, "clock_bound_us": bound / 1e3}


def show(found: dict[int, list[dict[str, Any]]]) -> None:
    """Medians with the least and the most of the rounds, and the exponents."""
    print(f"{'ranks':>5} {'records':>10} {'read s':>22} {'compare s':>22} {'MiB':>7} {'off us':>7} {'bound us':>8}")
    for count, rows in found.items():
        cells = [spread([row[key] for row in rows]) for key in ("read_s", "compare_s")]
        mib = statistics.median(row["mib"] for row in rows)
        off, bound = rows[0]["clock_wrong_us"], rows[0]["clock_bound_us"]
        print(
            f"{count:>5} {rows[0]['records']:>10} {cells[0]:>22} {cells[1]:>22} {mib:>7.0f} {off:>7.1f} {bound:>8.1f}"
        )
    if len(found) > 1:
        for key in ("read_s", "compare_s", "mib"):
            y = [statistics.median(row[key] for row in rows) for rows in found.values()]
            print(f"exponent of {key}: {np.polyfit(np.log(list(found)), np.log(y), 1)[0]:.2f}")


def spread(values: list[float]) -> str:
    """``0.123 [0.120, 0.130]``."""
    return f"{statistics.median(values):.3f} [{min(values):.3f}, {max(values):.3f}]"


if __name__ == "__main__":
    main()
