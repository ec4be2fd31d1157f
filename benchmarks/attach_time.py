"""How long attaching by gdb takes, and how long the process stands still for it.

A process of ``--python`` imports ``--import`` and then ticks every millisecond, keeping the largest gap between two
ticks. Each round makes a link from the same plan, attaches, arms, disarms and detaches. Prints medians over the rounds,
in milliseconds: ``gdb`` (its whole run), ``still`` (the largest gap), ``to_arm`` (from gdb's start to the arming).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from specmeter.attach import routes
from specmeter.control import arm, detach, disarm, make_link, remove_link
from specmeter.recipes.planner import survey

TICKS = """
import sys, threading, time
for name in sys.argv[1].split(","):
    __import__(name)
print(len(sys.modules), flush=True)
gap, last, answer = 0.0, time.perf_counter(), sys.argv[2]
import os
while True:
    time.sleep(0.001)
    now = time.perf_counter()
    gap, last = max(gap, now - last), now
    if os.path.exists(answer):
        os.unlink(answer)
        print(gap * 1e3, flush=True)
        gap, last = 0.0, time.perf_counter()
"""


def main() -> None:
    """Run the rounds and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--engine", default="specmeter")
    parser.add_argument("--import", dest="imports", default="specmeter.eagle.worker,specmeter.eagle.engine")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    planned = survey(Path(args.python), args.engine)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        base.chmod(0o700)
        ask = base / "ask"
        command = [args.python, "-c", TICKS, args.imports, str(ask)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
            assert child.stdout is not None
            modules = int(child.stdout.readline())
            seen: dict[str, list[float]] = {"gdb": [], "still": [], "to_arm": []}

            def largest_gap() -> float:
                ask.touch()
                return float(child.stdout.readline())  # type: ignore[union-attr]

            for turn in range(args.rounds):
                link = make_link(planned.plan, planned.code, link_id=f"round{turn}", base=base, capacity=1024)
                _, answer = routes.prepare(link, child.pid)
                largest_gap()
                start = time.perf_counter()
                obstacle = routes.by_gdb(child.pid, link.path / "attach.py")
                assert obstacle is None, obstacle
                seen["gdb"].append(1e3 * (time.perf_counter() - start))
                said = routes.wait_for_answer(answer, 20)
                assert said == "", said
                points = len(arm(link).done[0].report["armed_points"])
                seen["to_arm"].append(1e3 * (time.perf_counter() - start))
                seen["still"].append(largest_gap())
                disarm(link)
                detach(link)
                remove_link(link)
            child.kill()
    figures = {name: round(statistics.median(values), 1) for name, values in seen.items()}
    spread = {name: [round(min(values), 1), round(max(values), 1)] for name, values in seen.items()}
    facts = {"modules": modules, "points": points, "rounds": args.rounds, "load": os.getloadavg()[0]}
    print(json.dumps({**facts, "median_ms": figures, "range_ms": spread}))


if __name__ == "__main__":
    main()
