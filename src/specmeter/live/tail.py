"""The end of a ring that is still being written: only records that are new since the last look."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specmeter.trace.ring import MARKS, RECORD_DTYPE, Records, RingCursor, life_positions

_PIECE = 1024
_COUNT = np.arange(_PIECE, dtype=np.int64)
_MOST = 128
_HOLES = 256
_RAW = np.dtype((np.void, RECORD_DTYPE.itemsize))


def joined(*pieces: Records) -> Records:
    """Pieces end to end. As plain bytes: numpy compares the field types of structured ones each time."""
    if len(pieces[0]) == 0 and len(pieces) == 2:
        return pieces[1]
    found: Records = np.concatenate([np.ascontiguousarray(piece).view(_RAW) for piece in pieces]).view(RECORD_DTYPE)
    return found


class Tail(RingCursor):
    """Begins at the ring's present end; ``new`` gives what was completed since. ``lost`` counts overwritten records.

    ``held``: begins with the oldest records that the ring still holds, less an eighth of it if they are being
    overwritten.
    """

    def __init__(self, path: Path, held: bool = False) -> None:
        super().__init__(path)
        # Plain arrays: every index of a memmap costs several microseconds more.
        self._plain: Records = self._slots.view(np.ndarray)
        self._marks = self._plain["seq"]
        self._stuck_at = -1
        # The newest mark is the next slot's number. One look over the file, when the ring is opened.
        self.next_position = int(life_positions(np.ascontiguousarray(self._marks)).max(initial=-1)) + 1
        if held:
            self.next_position = max(0, self.next_position - self.header.capacity * 7 // 8)

    def new(self) -> Records:
        """The records completed since the last call; where some were lost, only those after the gap.

        Looks at one slot when there are none.
        """
        if not self._moved():
            return self._plain[:0]
        pieces = [self._take()]
        while self._moved() and len(pieces) < _MOST:
            position, lost = self.next_position, self.lost
            pieces.append(self._take())
            if self.lost != lost:
                pieces = pieces[-1:]
            if self.next_position == position:
                break
        return pieces[0] if len(pieces) == 1 else joined(*pieces)

    def _take(self) -> Records:
        """The completed records up to the ring's end, at most 1024; nothing, and ``lost``, when it was overtaken."""
        self._pass_unwritten()
        slot = self.next_position % self.header.capacity
        marks = self._marks[slot : slot + _PIECE]
        wanted = (_COUNT[: len(marks)] + (self.next_position + 1)).astype(np.uint32)
        differs = (marks != wanted) | (wanted == 0)
        ready = int(np.argmax(differs)) if differs.any() else len(marks)
        chunk: Records = self._plain[slot : slot + ready].copy()
        # The marks are read a second time: what the writer overtook meanwhile is worth nothing.
        if not ready or not np.array_equal(marks[:ready], wanted[:ready]):
            return self.poll(_PIECE)
        self.next_position += ready
        return chunk

    def pass_hole(self) -> None:
        """Go past a slot that its thread never completed, when it was there at the last call too."""
        ahead = (self.next_position + 1 + np.arange(_HOLES)) % self.header.capacity
        behind = self._marks[ahead] == (self.next_position + 2 + np.arange(_HOLES)).astype(np.uint32)
        if not behind.any() or self._moved():
            self._stuck_at = -1
        elif self._stuck_at == self.next_position:
            step = 1 + int(np.argmax(behind))
            self.next_position += step
            self.lost += step
        else:
            self._stuck_at = self.next_position

    def filling(self) -> bool:
        """Whether an eighth of the ring was written since the last read, so that waiting longer may lose records."""
        return self._written(self.next_position + self.header.capacity // 8)

    def _moved(self) -> bool:
        return self._written(self.next_position)

    def _written(self, position: int) -> bool:
        """Whether the slot of a life position holds anything but what it held a lap before, or 0 in the first lap."""
        position += (position + 1) % MARKS == 0  # that one is never written
        capacity = self.header.capacity
        before = position - capacity
        return int(self._marks[position % capacity]) != ((before + 1) % MARKS if before >= 0 else 0)
