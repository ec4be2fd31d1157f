"""New records of a ring that is still being written, with nothing but the standard library: raw bytes, in order.

For the far side, which has no numpy; ``trace.ring`` and ``live.tail`` are what reads rings here.
"""

from __future__ import annotations

import os
import sys
from array import array
from pathlib import Path
from typing import Any

from specmeter.runtime import layout

PIECE = 8192  # records a read
_HOLES = 64
_TRIES = 4  # a writer that overtakes the reader each time is given up for this look
_MARKS = 1 << 32


class NewRecords:
    """Begins at the ring's present end (or at its first record still there), and gives what was completed since.

    ``header`` is the ring's header, ``capacity`` in records, ``lost`` counts records that were overwritten before they
    were read. Raises OSError or ValueError when the file is no ring.
    """

    def __init__(self, path: Path, from_start: bool = False) -> None:
        self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.header = os.pread(self._handle, layout.HEADER.size, 0)
            if len(self.header) < layout.HEADER.size or not self.header.startswith(layout.MAGIC):
                raise ValueError(f"{path} is no ring")
            fields = layout.HEADER.unpack(self.header)
            if fields[1] != layout.LAYOUT_VERSION or fields[2] != layout.RECORD_SIZE or fields[3] < 1:
                raise ValueError(f"{path} has a layout that is not known here")
            self.capacity = int(fields[3])
            self.lost = 0
            newest = self._newest()
            self.position = max(0, newest + 2 - self.capacity) if from_start else newest + 1
        except BaseException:
            os.close(self._handle)
            raise

    def close(self) -> None:
        """Close the file."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def take(self, limit: int = PIECE, pass_holes: bool = False) -> bytes:
        """Completed records, at most ``limit``, up to the ring's end or the first that is not complete.

        ``pass_holes`` goes over records that a thread has begun and not completed: for when nothing more is written.
        """
        for _ in range(_TRIES):
            if (self.position + 1) % _MARKS == 0:
                self.position += 1  # no record has the mark 0: that place is never written
            slot = self.position % self.capacity
            count = min(limit, self.capacity - slot)
            place = layout.HEADER_SIZE + slot * layout.RECORD_SIZE
            marks = _marks(os.pread(self._handle, count * layout.RECORD_SIZE, place))
            ready = self._ready(marks)
            # Read again: a copy made while a record is completed may hold its mark, and what was there before.
            data = os.pread(self._handle, ready * layout.RECORD_SIZE, place)
            # What the writer overtook while it was copied is worth nothing: its marks are read once more.
            if ready and _marks(os.pread(self._handle, ready * layout.RECORD_SIZE, place)) == marks[:ready]:
                self.position += ready
                return data[: ready * layout.RECORD_SIZE]
            if len(marks) and self._overtaken(marks[0]):
                self._skip()
            elif not (pass_holes and self._hole(marks)):
                break
        return b""

    def _ready(self, marks: Any) -> int:
        wanted = array(
            marks.typecode, (mark % _MARKS for mark in range(self.position + 1, self.position + 1 + len(marks)))
        )
        if wanted == marks and all(wanted[-1:]):
            return len(marks)
        return next(at for at, pair in enumerate(zip(marks, wanted)) if pair[0] != pair[1] or not pair[1])  # noqa: B905 (3.9)

    def _overtaken(self, mark: int) -> bool:
        ahead = (mark - 1 - self.position) % _MARKS
        return mark != 0 and 0 < ahead < _MARKS // 2

    def _hole(self, marks: Any) -> bool:
        """Step over holes, if a complete record follows soon."""
        for step in range(1, min(_HOLES, len(marks))):
            if marks[step] == (self.position + step + 1) % _MARKS:
                self.position += step
                return True
        return False

    def _skip(self) -> None:
        """Go on where the writer will not be for a while; the rest of the lap is lost."""
        newest = self.position + (self._newest() - self.position + _MARKS // 2) % _MARKS - _MARKS // 2
        target = max(self.position + 1, newest + 2 - self.capacity + self.capacity // 8)
        self.lost += target - self.position
        self.position = target

    def _newest(self) -> int:
        """Life position of the newest record, -1 without any. Small marks beside great ones have started over."""
        newest, small, at = 0, 0, layout.HEADER_SIZE
        while True:
            data = os.pread(self._handle, PIECE * layout.RECORD_SIZE, at)
            if len(data) < layout.RECORD_SIZE:
                return (small + _MARKS if small and newest - small > _MARKS // 2 else newest) - 1
            marks = _marks(data)
            newest = max(newest, *marks, 0)
            small = max(small, *(mark for mark in marks if mark < _MARKS // 2), 0)
            at += len(data)


def _marks(data: bytes) -> Any:
    """The commit marks of whole records, as an array of unsigned integers."""
    words = array("I", data[: len(data) // layout.RECORD_SIZE * layout.RECORD_SIZE])
    if sys.byteorder == "big":
        words.byteswap()
    return words[layout.RECORD_SIZE // 4 - 1 :: layout.RECORD_SIZE // 4]
