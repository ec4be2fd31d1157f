"""Ends a local client that outlives a specmeter which was killed outright (SIGKILL, out of memory).

Run as a script (``python -I -S keeper.py PID START GRACE_S``), so it uses the standard library alone. Its standard
input is held by the specmeter that started the client: its end means that this one is gone, in whatever way. The client
has lost its standard input with it, which ssh and most others take for the end, and tell the far side; one that reads
nothing never notices, and is killed with its process group after GRACE_S. START is the client's start time in clock
ticks, so that no other process of that number is meant.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

TICK_S = 0.1


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot (field 22 of proc(5)'s stat); -1 where it is gone or reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in (b"Z", b"X") else int(fields[19])


def main() -> int:
    """Wait for the caller's end, then for the client's, and see to it."""
    pid, start, grace_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    while os.read(0, 4096):
        pass
    if start < 0:
        return 0  # it was gone before this began, or no /proc tells: its number may be another's by now
    until = time.monotonic() + grace_s
    while start_ticks(pid) == start:
        if time.monotonic() >= until:
            try:
                os.killpg(pid, signal.SIGKILL)
            except OSError:
                pass
            return 0
        time.sleep(TICK_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
