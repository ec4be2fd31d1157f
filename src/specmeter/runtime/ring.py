"""The memory-mapped file that one process writes its records to."""

from __future__ import annotations

import mmap
import os
import socket
import time
from typing import Any, List, Tuple

from . import layout

DEFAULT_CAPACITY = 1 << 20

MARKS = 1 << 32
FIRST_WORD = layout.HEADER_SIZE // 8


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

    ``buffer`` is the mapping, ``words`` the same as unsigned 64-bit words, ``next_mark`` the commit mark that the next
    lap begins with. Places are the recorder's to give. Raises OSError when the file cannot be made or the disk is full:
    every block is allocated here, so that no write can fault later.
    """

    def __init__(self, path: str, capacity: int, plan_sha256: bytes, rank: int = -1, world: int = -1) -> None:
        self.path = path
        self.capacity = capacity = 1 << max(capacity - 1, 1).bit_length()
        self.next_mark = 1
        self._views: List[Any] = []
        size = layout.HEADER_SIZE + capacity * layout.RECORD_SIZE
        unready = f"{path}.new"  # what readers look for appears whole
        if os.path.exists(unready):
            os.unlink(unready)  # a signal handler of the server cut a first try short
        handle = os.open(unready, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(handle, 0, size)
            self.buffer: Any = mmap.mmap(handle, size)
            self.words: Any = memoryview(self.buffer).cast("Q")
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

    def lap(self) -> Tuple[int, int]:
        """What the next lap is: the word that it ends before, and the mark that the one after begins with.

        Marks have 32 bits: the place whose mark would be 0 is left out, and the lap after it begins with 1.
        """
        count = min(self.capacity, MARKS - self.next_mark)
        stop = FIRST_WORD + count * layout.RECORD_WORDS
        for place in range(stop, FIRST_WORD + self.capacity * layout.RECORD_WORDS, layout.RECORD_WORDS):
            self.words[place + layout.RECORD_WORDS - 1] = 0
        return stop, (self.next_mark + count) % MARKS or 1

    def columns(self, stop: int) -> Tuple[Any, Any, Any, Any]:
        """The words from the first, second, third and fourth on; in the first, places from ``stop`` on are outside."""
        views = (self.words[:stop], self.words[1:], self.words[2:], self.words[3:])
        self._views.extend(views)
        return views

    def close(self) -> None:
        """Unmap the file; nothing can be written any more. Raises BufferError while something is being written."""
        for view in self._views:
            view.release()
        self.words.release()
        self.buffer.close()
