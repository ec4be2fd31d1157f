"""The memory-mapped file that one process writes its records to."""

from __future__ import annotations

import mmap
import os
import socket
import time
from _thread import RLock
from typing import Any, Callable, Tuple

from . import layout

DEFAULT_CAPACITY = 1 << 20

MARKS = 1 << 32


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

    ``next_place()`` gives a free record's byte offset and its mark, without a lock, until the lap is over and it raises
    StopIteration; ``take`` does the same and then begins the next lap.
    ``buffer`` is the mapping, ``words`` the same as unsigned 64-bit words. Raises OSError when the file cannot be made
    or the disk is full: every block is allocated here, so that no write can fault later.
    """

    next_place: Callable[[], Tuple[int, int]]

    def __init__(self, path: str, capacity: int, plan_sha256: bytes, rank: int = -1, world: int = -1) -> None:
        self.path = path
        self.capacity = capacity = 1 << max(capacity - 1, 1).bit_length()
        self._turning = RLock()
        size = layout.HEADER_SIZE + capacity * layout.RECORD_SIZE
        unready = f"{path}.new"  # what readers look for appears whole
        if os.path.exists(unready):
            os.unlink(unready)  # a signal handler of the server cut a first try short
        handle = os.open(unready, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(handle, 0, size)
            self.buffer: Any = mmap.mmap(handle, size)
            self.words: Any = memoryview(self.buffer).cast("Q")
            self._lap(1)
        except BaseException:
            os.unlink(unready)
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
        os.rename(unready, path)

    def take(self) -> Tuple[int, int]:
        """A free record's byte offset and its mark, from the next lap if this one is over."""
        while True:
            next_place = self.next_place
            try:
                return next_place()
            except StopIteration:
                with self._turning:
                    if self.next_place is next_place:  # unless another thread has already begun the next
                        self._lap((self._first + self.capacity) % MARKS)

    def close(self) -> None:
        """Unmap the file; nothing can be written any more."""
        self.words.release()
        self.buffer.close()

    def _lap(self, first: int) -> None:
        self._first = first
        size = layout.RECORD_SIZE
        # The marks have 32 bits: the place whose mark would be 0 is left out, and the next lap begins with 1.
        count = min(self.capacity, MARKS - first)
        stop = layout.HEADER_SIZE + count * size
        for place in range(stop, layout.HEADER_SIZE + self.capacity * size, size):
            self.words[(place + size) // 8 - 1] = 0
        # Both numbers come from one call into C, so no other thread can get in between.
        self.next_place = zip(range(layout.HEADER_SIZE, stop, size), range(first, MARKS)).__next__  # noqa: B905 (3.9)
