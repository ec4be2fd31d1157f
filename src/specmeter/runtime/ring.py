"""The memory-mapped file that one process writes its records to."""

from __future__ import annotations

import mmap
import os
import socket
import time
from itertools import count
from typing import Any

from . import layout

DEFAULT_CAPACITY = 1 << 20


def start_ticks(pid: int) -> int:
    """The start time of a process in clock ticks since boot (field 22 of /proc/PID/stat), 0 where it cannot be read."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return int(stat.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def boot_id() -> str:
    """The kernel's boot id, or an empty string where there is none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


class Ring:
    """A preallocated ring file (0600) of ``capacity`` records, rounded up to a power of two.

    ``next_slot()`` gives slot numbers over the ring's whole life, without a lock; ``buffer`` is the mapping. Raises
    OSError when the file cannot be made or the disk is full: every block is allocated here, so that no write can
    fault later.
    """

    def __init__(self, path: str, capacity: int, plan_sha256: bytes, rank: int = -1, world: int = -1) -> None:
        self.path = path
        self.capacity = capacity = 1 << max(capacity - 1, 1).bit_length()
        self.next_slot = count().__next__
        size = layout.HEADER_SIZE + capacity * layout.RECORD_SIZE
        if os.path.exists(path):
            os.unlink(path)  # a signal handler of the server cut a first try short
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(handle, 0, size)
            self.buffer: Any = mmap.mmap(handle, size)
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(handle)
        layout.HEADER.pack_into(
            self.buffer,
            0,
            layout.MAGIC,
            layout.LAYOUT_VERSION,
            layout.RECORD_SIZE,
            capacity,
            os.getpid(),
            start_ticks(os.getpid()),
            boot_id().encode()[:36],
            socket.gethostname().encode()[:64],
            rank,
            world,
            plan_sha256,
            time.perf_counter_ns(),
            time.time_ns(),
        )

    def start_over(self) -> bool:
        """Begin the slot numbers anew when the 32 bits of the commit mark have run out; False when they have not.

        The one record whose mark would be 0 is lost; the next one's mark is 1, as 2**32 positions later it should be.
        """
        if self.written() < 1 << 32:
            return False
        self.next_slot = count().__next__
        return True

    def written(self) -> int:
        """How many slots were taken so far. Looks without taking one."""
        return int(repr(self.next_slot.__self__).split("(")[1].rstrip(")"))  # type: ignore[attr-defined]
