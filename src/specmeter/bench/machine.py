"""Whether this machine has anything else to do: timings taken beside other work are the other work's too."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

WATCH_S = 0.3
BUSY_CORES = 0.3
FEWER_THREADS = (
    "the embedded engine is quicker then with fewer threads (--threads 1, as in `specmeter demo --threads 1`)"
)


def busy_cores() -> float | None:
    """How many cores other processes keep busy now, from /proc/stat over 0.3 s; None where it cannot be read."""
    before = _ticks()
    began = time.process_time()
    time.sleep(WATCH_S)
    after = _ticks()
    if before is None or after is None or after[1] <= before[1]:
        return None
    cores = after[2]
    share = (after[0] - before[0]) / (after[1] - before[1])
    return max(0.0, share * cores - (time.process_time() - began) / WATCH_S)


def busy_warning() -> str | None:
    """A sentence for the user if something else computes here, else None."""
    busy = busy_cores()
    if busy is None or busy < BUSY_CORES:
        return None
    return f"other work keeps {busy:.1f} cores of this machine busy: times will be longer, and intervals wider"


def busy_note(warning: str, engine: str, command: Sequence[str]) -> str:
    """The warning as a user's note, with what to do: nothing for another engine, or where threads are chosen."""
    ours = engine == "embedded" and "--threads" not in command
    return f"note: {warning}; {FEWER_THREADS}" if ours else f"note: {warning}"


def _ticks() -> tuple[int, int, int] | None:
    """Busy and all clock ticks of all cores, and the number of cores."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    fields = [int(word) for word in lines[0].split()[1:9]]
    cores = sum(1 for line in lines[1:] if line.startswith("cpu"))
    # user nice system idle iowait irq softirq steal (proc(5)); waiting for a disk is not work.
    return sum(fields) - fields[3] - fields[4], sum(fields), cores
