"""The memory-mapped file that one process writes its records to."""

from __future__ import annotations

import mmap
import os
import socket
import time
from _thread import RLock
from itertools import count
from typing import Any, Callable, Tuple

from . import layout

DEFAULT_CAPACITY = 1 << 20
Lap = Tuple[Callable[[], int], int]

FIRST_WORD = layout.HEADER_SIZE // 8
WORDS = layout.RECORD_SIZE // 8
# A record's last word is its value (0 for a span) and above it its mark; marks grow by one as first words by WORDS.
MARK_OF_WORD = (1 << 32) // WORDS
MARKS = 1 << 32


def last_word(word: int, base: int) -> int:
    """The last word of the span whose first word is ``word``, in the lap of ``base``."""
    return word * MARK_OF_WORD + base


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

    ``lap`` is a pair: a function that gives a free record's first word, without a lock, and what makes a record's last
    word from its first (``last_word``). The lap is over when a word lies at or beyond ``end_word``; ``take`` then
    begins the next one. ``buffer`` is the mapping, ``words`` the same as unsigned 64-bit words. Raises OSError when the
    file cannot be made or the disk is full: every block is allocated here, so that no write can fault later.
    """

    lap: Lap

    def __init__(self, path: str, capacity: int, plan_sha256: bytes, rank: int = -1, world: int = -1) -> None:
        self.path = path
        self.capacity = capacity = 1 << max(capacity - 1, 1).bit_length()
        self._turning = RLock()
        self.end_word = FIRST_WORD + capacity * WORDS
        self._lap(1)
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

    def take(self) -> Tuple[int, int]:
        """A free record's byte offset and its mark, from the next lap if this one is over."""
        while True:
            lap = self.lap
            word = lap[0]()
            if word >= self.end_word:
                with self._turning:
                    # Unless another thread has already begun it. The marks have 32 bits; the place whose mark would be
                    # 0 is left out, and the next mark is 1.
                    if self.lap is lap:
                        self._lap((self._first + self.capacity) % MARKS)
            elif (mark := last_word(word, lap[1]) >> 32) < MARKS:
                return word * 8, mark
            else:
                self.words[word + WORDS - 1] = 0

    def close(self) -> None:
        """Unmap the file; nothing can be written any more."""
        self.words.release()
        self.buffer.close()

    def _lap(self, first: int) -> None:
        self._first = first
        self.lap = count(FIRST_WORD, WORDS).__next__, (first << 32) - FIRST_WORD * MARK_OF_WORD
