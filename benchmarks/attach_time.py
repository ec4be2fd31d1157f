"""How long attaching by gdb takes, from the start of gdb to the arming, and how long the process stands still for it.

Each ``--process NAME=PYTHON,ENGINE,MODULE,...`` imports its modules and then ticks every millisecond, keeping the
largest gap between two ticks. Every round takes each process in turn (the others are stopped meanwhile): a link is
made from the same plan, then attach, arm, disarm, detach. Prints medians and ranges over the rounds, in milliseconds:
``gdb`` (its whole run), ``answer`` (from gdb's start until the runtime is there), ``armed`` (from gdb's start until the
arming is acknowledged), ``still_attach`` and ``still_arm`` (the largest gap in either part), ``command`` (the whole of
``specmeter attach PID --armed``, planning and start in it); ``cpu_gdb``, ``cpu_process`` and ``cpu_here`` are the
processor times of gdb, of the process and of this one until the arming: they follow one another, so on a quiet machine
their sum is about ``armed``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from specmeter.attach import routes
from specmeter.control import Link, arm, detach, disarm, find_link, make_link, remove_link
from specmeter.recipes.planner import Planned, survey

TICKS = """
import os, sys, time
for name in sys.argv[1].split(","):
    __import__(name)
import gc
print(len(sys.modules), len(gc.get_objects()), flush=True)
gap, last, answer = 0.0, time.perf_counter(), sys.argv[2]
while True:
    time.sleep(0.001)
    now = time.perf_counter()
    gap, last = max(gap, now - last), now
    if os.path.exists(answer):
        os.unlink(answer)
        print(gap * 1e3, flush=True)
        gap, last = 0.0, time.perf_counter()
"""
_ENGINE = "specmeter.eagle.worker,specmeter.eagle.engine"
DEFAULT = (
    f"torch={sys.executable},specmeter,{_ENGINE}",
    f"2000={sys.executable},specmeter,{_ENGINE},torch._dynamo,scipy.special,uvicorn,starlette.applications",
)
FIGURES = ("gdb", "answer", "armed", "still_attach", "still_arm", "command", "cpu_gdb", "cpu_process", "cpu_here")


class Ticking:
    """A process that ticks; stopped except during its turn."""

    def __init__(self, text: str, base: Path, stack: ExitStack) -> None:
        self.name, _, rest = text.partition("=")
        self.python, engine, *modules = rest.split(",")
        self.engine = engine
        self.planned: Planned = survey(Path(self.python), engine)
        self._ask = base / f"ask-{self.name}"
        command = [self.python, "-c", TICKS, ",".join(modules), str(self._ask)]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.child = stack.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)
        )
        stack.callback(self.child.kill)
        self.modules, self.objects = (int(word) for word in self._line().split()[-2:])
        self.points = 0
        self.seen: dict[str, list[float]] = {name: [] for name in FIGURES}
        self.child.send_signal(signal.SIGSTOP)

    def _line(self) -> str:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        while line and not line[0].isdigit():
            line = self.child.stdout.readline()
        return line

    def cpu_ms(self) -> tuple[float, float, float]:
        """Processor time so far of all children of this process that have ended, of this process of ours, and here."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        tasks = Path(f"/proc/{self.child.pid}/task").glob("*/schedstat")
        spent_ns = sum(int(path.read_text().split()[0]) for path in tasks)
        return 1e3 * (ended.ru_utime + ended.ru_stime), spent_ns / 1e6, 1e3 * time.process_time()

    def largest_gap_ms(self) -> float:
        """The largest gap since the last time this was asked."""
        self._ask.touch()
        return float(self._line())

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Let it go on for this long."""
        self.child.send_signal(signal.SIGCONT)
        self.largest_gap_ms()
        try:
            yield
        finally:
            self.child.send_signal(signal.SIGSTOP)

    def keep(self, name: str, value_ms: float) -> None:
        """Keep one value of a figure."""
        self.seen[name].append(value_ms)


def attach_and_arm(process: Ticking, link: Link) -> None:
    """One round by the parts that the command is made of."""
    _, answer = routes.prepare(link, process.child.pid, process.python)
    process.largest_gap_ms()
    cpu, start = process.cpu_ms(), time.perf_counter()
    obstacle = routes.by_gdb(process.child.pid, link.path / "attach.py")
    assert obstacle is None, obstacle
    process.keep("gdb", 1e3 * (time.perf_counter() - start))
    said = routes.wait_for_answer(answer, 20)
    assert said == "", said
    process.keep("answer", 1e3 * (time.perf_counter() - start))
    asked = time.perf_counter()
    process.keep("still_attach", process.largest_gap_ms())
    asked = time.perf_counter() - asked
    process.points = len(arm(link).done[0].report["armed_points"])
    process.keep("armed", 1e3 * (time.perf_counter() - start - asked))
    for name, before, after in zip(FIGURES[-3:], cpu, process.cpu_ms(), strict=True):
        process.keep(name, after - before)
    process.keep("still_arm", process.largest_gap_ms())
    leave(link)


def by_command(process: Ticking, name: str) -> None:
    """One round by the command itself."""
    words = ["attach", str(process.child.pid), "--engine", process.engine, "--link", name, "--armed"]
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "specmeter", *words], check=True, stdout=subprocess.DEVNULL)
    process.keep("command", 1e3 * (time.perf_counter() - start))
    leave(find_link(name))


def leave(link: Link) -> None:
    """Take everything out again."""
    disarm(link)
    detach(link)
    remove_link(link)


def main() -> None:
    """Run the rounds and print one JSON object a process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--process", action="append", help="NAME=PYTHON,ENGINE,MODULE,...")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        base = Path(folder)
        base.chmod(0o700)
        os.environ.pop("XDG_RUNTIME_DIR", None)
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        processes = [Ticking(text, base, stack) for text in args.process or DEFAULT]
        for turn in range(args.rounds):
            for process in processes:
                with process.turn():
                    planned = process.planned
                    link = make_link(planned.plan, planned.code, link_id=f"round{turn}", capacity=1024)
                    attach_and_arm(process, link)
                    by_command(process, f"whole{turn}")
    for process in processes:
        figures = {
            name: [round(value, 1) for value in (statistics.median(seen), min(seen), max(seen))]
            for name, seen in process.seen.items()
        }
        facts = {"process": process.name, "modules": process.modules, "objects": process.objects}
        machine = {"python": platform.python_version(), "cores": os.cpu_count(), "load": [load, os.getloadavg()[0]]}
        print(
            json.dumps(
                {**facts, "points": process.points, "rounds": args.rounds, **machine, "median_range_ms": figures}
            )
        )


if __name__ == "__main__":
    main()
