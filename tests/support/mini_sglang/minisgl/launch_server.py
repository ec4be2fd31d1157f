"""``python -m minisgl.launch_server``: spawns the scheduler and hands it the requests of standard input."""

from __future__ import annotations

import multiprocessing
import sys

from .scheduler import run_scheduler_process
from .workers import ServerArgs


def main() -> None:
    """One line ``CYCLES BATCH`` a request; prints its sum."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    args = ServerArgs(2 if "--tp2" in sys.argv else 1, (0, 1, 3, 5) if "--adaptive" in sys.argv else ())
    process = context.Process(target=run_scheduler_process, args=(theirs, "--v1" in sys.argv, args))
    process.start()
    print("up", flush=True)
    for line in sys.stdin:
        cycles, batch = line.split()
        ours.send((int(cycles), int(batch)))
        print(ours.recv(), flush=True)
    ours.send((0, 0))
    process.join()


if __name__ == "__main__":
    main()
