"""What ``specmeter top`` costs: processor time of its process on a real terminal device, at 10 looks a second.

    python benchmarks/top_cpu.py [--seconds 20] [--rate 10] [--json]

Cases: no new records; 1 and 8 ranks of 60 cycles a second with 25 records each. Each rank is a process that writes a
ring as the runtime lays it out. ``top`` runs in a pseudo-terminal of 120 x 40 that is read as fast as it writes; user
and system time come from /proc/PID/stat, after 4 s of start-up. Three rounds, cases interleaved.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import pty
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import Any

from specmeter.control import Link, make_link
from specmeter.runtime import layout
from specmeter.runtime.ring import start_ticks
from specmeter.trace.synthetic import make_plan, make_records, write_ring

START_S = 4.0
CYCLES_PER_S = 60
LEAVES = ("draft.forward", "verify.forward", "accept.sample", "extend.forward", "kv.move", "schedule.output")
CASES = {"no new records": (1, 0), "1 rank": (1, CYCLES_PER_S), "8 ranks": (8, CYCLES_PER_S)}


def make(base: Path) -> tuple[Link, dict[str, Any]]:
    """A link with a plan of one cycle point, its values and six leaves."""
    points = [("cycle", "cycle", "none"), *((name, "leaf", "none") for name in LEAVES)]
    plan = make_plan(points, ["cycle.drafted", "cycle.accepted", "cycle.steps"])
    return make_link(plan, {}, base=base, link_id="bench"), plan


def write(link: Path, rank: int, rate: int) -> None:
    """Be one rank: a ring and a report of this process; a cycle of 25 records ``rate`` times a second."""
    pid = os.getpid()
    stem = f"{pid}-{start_ticks(pid)}"
    capacity = 1 << 20
    path = link / f"{stem}.ring"
    write_ring(link / f".{stem}", make_records([]), capacity, pid=pid, rank=rank)
    (link / f".{stem}").replace(path)
    report = {"pid": pid, "armed": True, "generation": 1, "rank": rank, "refused": [], "disarmed": []}
    (link / f"{stem}.json").write_text(json.dumps(report))
    seq = 0
    with path.open("r+b", buffering=0) as file:
        while True:
            if not rate:
                time.sleep(1)
                continue
            t0 = time.perf_counter_ns()
            time.sleep(1 / rate)
            t1 = time.perf_counter_ns() - 200_000
            step = (t1 - t0) // 22
            spans = [(t0 + i * step, t0 + (i + 1) * step, 0, 2 + i % len(LEAVES), 0, 0, 0) for i in range(21)]
            values = [(v, t1, 0, 8 + i, layout.KIND_VALUE, 0, 0) for i, v in enumerate((3, seq // 25 % 4, 3))]
            block = b""
            for row in [*spans, (t0, t1, 0, 1, 0, 0, 0), *values]:
                seq += 1
                block += layout.RECORD.pack(*row, seq)
            at = (seq - 25) % capacity
            file.seek(layout.HEADER_SIZE + at * layout.RECORD_SIZE)
            file.write(block[: (capacity - at) * layout.RECORD_SIZE])


def watch(runtime_dir: Path, rate: float, seconds: float) -> tuple[float, float]:
    """Percent of a core that top takes after its start, and its start's processor seconds."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(TERM="xterm-256color", XDG_RUNTIME_DIR=str(runtime_dir))
        os.execv(sys.executable, [sys.executable, "-m", "specmeter", "top", "--rate", str(rate)])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    begin, warm = time.monotonic(), None
    while True:
        if select.select([terminal], [], [], 0.2)[0]:
            os.read(terminal, 65536)
        now = time.monotonic()
        if warm is None and now - begin > START_S:
            warm = (now, cpu_s(child))
        if warm is not None and now - warm[0] > seconds:
            used = cpu_s(child) - warm[1]
            os.write(terminal, b"q")
            end = time.monotonic() + 5
            while os.waitpid(child, os.WNOHANG)[0] == 0:
                if select.select([terminal], [], [], 0.1)[0]:
                    try:
                        os.read(terminal, 65536)
                    except OSError:
                        pass
                if time.monotonic() > end:
                    os.kill(child, signal.SIGKILL)
            os.close(terminal)
            return 100 * used / (now - warm[0]), warm[1]


def cpu_s(pid: int) -> float:
    """User and system seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(ranks: int, cycles: int, rate: float, seconds: float) -> tuple[float, float]:
    """One case once."""
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "specmeter"
        base.mkdir(mode=0o700)
        link, _plan = make(base)
        words = [sys.executable, __file__, "--write", str(link.path), "--cycles", str(cycles)]
        writers = [subprocess.Popen([*words, "--rank", str(rank)]) for rank in range(ranks)]
        try:
            while len(list(link.path.glob("*.json"))) < ranks + 2:
                time.sleep(0.05)
            return watch(Path(folder), rate, seconds)
        finally:
            for writer in writers:
                writer.kill()
                writer.wait()


def main() -> None:
    """Measure every case three times and print medians and ranges."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=10)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--cycles", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write:
        write(args.write, args.rank, args.cycles)
    found: dict[str, list[float]] = {name: [] for name in CASES}
    starts: list[float] = []
    for _ in range(args.rounds):
        for name, (ranks, cycles) in CASES.items():
            percent, start = measure(ranks, cycles, args.rate, args.seconds)
            found[name].append(percent)
            starts.append(start)
    load = f"load {os.getloadavg()[0]:.1f}"
    machine = f"{os.cpu_count()} cores {platform.machine()}, CPython {platform.python_version()}, {load}"
    if args.json:
        print(json.dumps({"machine": machine, "rate_hz": args.rate, "percent_of_a_core": found, "start_s": starts}))
        return
    print(machine)
    for name, values in found.items():
        print(f"{name}: {statistics.median(values):.2f} % of a core ({min(values):.2f}-{max(values):.2f})")
    print(f"start: {statistics.median(starts):.2f} s of processor time")


if __name__ == "__main__":
    main()
