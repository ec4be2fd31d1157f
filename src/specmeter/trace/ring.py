"""Reads ring files: the header is checked, and only records whose commit mark is right are handed on.

Nothing here loops over records: a ring is mapped and seen as one numpy structured array.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from specmeter.errors import SpecmeterError
from specmeter.runtime import layout
from specmeter.trace.regular import open_regular

RECORD_DTYPE = np.dtype(
    {
        "names": ["t0", "t1", "cycle", "point", "kind", "lane", "value", "seq"],
        "formats": ["<i8", "<i8", "<u4", "<u2", "u1", "u1", "<i4", "<u4"],
        "offsets": [0, 8, 16, 20, 22, 23, 24, 28],
        "itemsize": layout.RECORD_SIZE,
    }
)
Records = NDArray[np.void]

_KINDS = layout.KIND_GRAPH_SPAN + 1
# Marks have 32 bits; no record has the mark 0, so the last position before they start over is never written.
MARKS = 1 << 32
# Records that threads had begun and a kill cut off; more holes than this mean a damaged file.
_MAX_HOLES = 256
# So many records from the end of a lap, a running writer may begin the next one while the file is analysed.
_NEAR_END = 1 << 17


@dataclass(frozen=True)
class RingHeader:
    """What the writer said about itself when it made the ring.

    ``capacity`` is in records; ``perf_counter_ns`` and ``time_ns`` were read together and map the host clock to the
    calendar; ``rank`` and ``world`` are -1 when the writer did not know them; ``plan_sha256`` is hexadecimal.
    """

    path: Path
    capacity: int
    pid: int
    start_ticks: int
    boot_id: str
    host: str
    rank: int
    world: int
    plan_sha256: str
    perf_counter_ns: int
    time_ns: int


@dataclass(frozen=True)
class Ring:
    """One process's completed records in the order of writing.

    ``records`` has the dtype RECORD_DTYPE; ``first_position`` is the life position (from 0) of the first of them;
    ``overwritten`` counts records lost to wrap-around, ``holes`` slots that a thread had taken but not completed, and
    in the copy of a far ring stretches that were overwritten before they came over; ``gaps`` are the indices of the
    records before which some are missing.
    """

    header: RingHeader
    records: Records
    first_position: int
    overwritten: int
    holes: int
    gaps: tuple[int, ...] = ()


def read_ring(path: Path) -> Ring:
    """Read every completed record of a ring file.

    Raises SpecmeterError when the file is no ring, is truncated, or holds marks or fields that no writer could have
    written.
    """
    header = read_header(path)
    slots = np.memmap(path, dtype=RECORD_DTYPE, mode="r", offset=layout.HEADER_SIZE, shape=(header.capacity,))
    marks = np.ascontiguousarray(slots["seq"])
    good, first, last = _complete(path, marks, header.capacity)
    if last < first:
        return Ring(header, slots[:0], 0, 0, 0)
    wanted = last - first + 1
    low, high = first % header.capacity, last % header.capacity
    if low <= high:
        records, good = slots[low : high + 1], good[low : high + 1]
        if high + _NEAR_END >= header.capacity:
            records = records.copy()  # a writer may come round and change what the file shows
    else:
        records = np.concatenate([slots[low:], slots[: high + 1]])
        good = np.concatenate([good[low:], good[: high + 1]])
    past = _overwritten(good, marks != column(slots, "seq"), first)
    records, good, first, wanted = records[past:], good[past:], first + past, wanted - past
    holes = wanted - int(np.count_nonzero(good))
    if holes > min(_MAX_HOLES, wanted):
        _damaged(path, f"{holes} of its {wanted} records carry no commit mark")
    gaps: list[int] = []
    if holes:
        records = records[good]
        gaps = np.unique(np.cumsum(good)[~good]).tolist()
    _check_fields(path, records)
    return Ring(header, records, first, first, holes, tuple(at for at in gaps if 0 < at < len(records)))


def _overwritten(good: NDArray[np.bool_], changed: NDArray[np.bool_], first: int) -> int:
    """How many of the oldest records a running writer has overwritten since their marks were read.

    ``good`` in the order of writing, from life position ``first``; ``changed``: by slot, the marks that are others now.
    """
    if not changed.any():
        return 0
    gone = np.flatnonzero(good & changed[(first + np.arange(len(good))) % len(changed)])
    return int(gone[-1]) + 1 if len(gone) else 0


def read_header(path: Path) -> RingHeader:
    """Read and check a ring's header against the layout and the file's size. Raises SpecmeterError."""
    try:
        with open_regular(path) as file:
            raw = file.read(layout.HEADER_SIZE)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise SpecmeterError(f"The ring {path} cannot be read", str(error.strerror)) from error
    if len(raw) < layout.HEADER_SIZE or raw[:8] != layout.MAGIC:
        _damaged(path, "it does not start with a ring header")
    fields = layout.HEADER.unpack_from(raw)
    _magic, version, record_size, capacity, pid, ticks, boot, host, rank, world, sha, perf_ns, time_ns = fields
    if version != layout.LAYOUT_VERSION or record_size != layout.RECORD_SIZE:
        raise SpecmeterError(
            f"The ring {path} has layout {version} with records of {record_size} bytes",
            f"This specmeter reads layout {layout.LAYOUT_VERSION} with records of {layout.RECORD_SIZE} bytes.",
            "Read it with the specmeter version whose runtime wrote it.",
        )
    if capacity < 1 or size != layout.HEADER_SIZE + capacity * layout.RECORD_SIZE:
        _damaged(path, f"its header states {capacity} records, which does not fit its size of {size} bytes")
    return RingHeader(
        path, capacity, pid, ticks, _text(path, boot), _text(path, host), rank, world, sha.hex(), perf_ns, time_ns
    )


class RingCursor:
    """Reads a ring that is still being written, a piece at a time."""

    def __init__(self, path: Path) -> None:
        self.header = read_header(path)
        self._slots = np.memmap(
            path, dtype=RECORD_DTYPE, mode="r", offset=layout.HEADER_SIZE, shape=(self.header.capacity,)
        )
        self.next_position = 0
        self.lost = 0

    def poll(self, limit: int = 1 << 20) -> Records:
        """The records completed since the last call, at most ``limit``, as a copy.

        Stops before the first slot that is not complete yet. Records that the writer overwrote before they were read
        are skipped and counted in ``lost``.
        """
        self._pass_unwritten()
        capacity = self.header.capacity
        count = min(limit, capacity)
        places = np.arange(count, dtype=np.int64)
        at = (self.next_position + places) % capacity
        # The marks first: a copy made while a record is completed may hold its mark, and what was there before.
        marks = self._slots["seq"][at]
        ahead = (marks.astype(np.int64) - 1 - self.next_position) % MARKS
        complete = (ahead == places) & (marks != 0)
        ready = count if complete.all() else int(np.argmin(complete))
        lapped = ready < count and marks[ready] != 0 and 0 < ahead[ready] < MARKS // 2 and ahead[ready] != ready
        chunk: Records = self._slots[at[:ready]]
        # A copy that the writer may have lapped meanwhile is worth nothing: the marks are read a second time.
        if lapped or not np.array_equal(self._slots["seq"][at[:ready]], marks[:ready]):
            self._skip_lapped()
            return chunk[:0]
        self.next_position += ready
        return chunk

    def _skip_lapped(self) -> None:
        marks = np.ascontiguousarray(self._slots["seq"])
        _good, _first, last = _complete(self.header.path, marks, self.header.capacity)
        last = self.next_position + (last - self.next_position + MARKS // 2) % MARKS - MARKS // 2
        # A little head start, so that the writer does not lap the reader again at once.
        oldest = last - self.header.capacity + 2
        target = max(self.next_position, min(last, oldest + self.header.capacity // 8))
        self.lost += target - self.next_position
        self.next_position = target

    def _pass_unwritten(self) -> None:
        if (self.next_position + 1) % MARKS == 0:
            self.next_position += 1


def life_positions(marks: NDArray[np.uint32]) -> NDArray[np.int64]:
    """The life positions (from 0) that marks stand for, -1 for the mark 0.

    A ring's marks are near each other: where they are far apart, they have started over, and the small ones are newer.
    """
    position = marks.astype(np.int64) - 1
    position[(position >= 0) & (position.max(initial=-1) - position > MARKS // 2)] += MARKS
    return position


def _complete(path: Path, marks: NDArray[np.uint32], capacity: int) -> tuple[NDArray[np.bool_], int, int]:
    """Which slots hold a completed record of the newest lap, and the first and last life position of that lap."""
    slot = np.arange(capacity, dtype=np.uint32)
    good = marks == slot + np.uint32(1)
    if bool(np.all(good | (marks == 0))):
        last = int(capacity - 1 - np.argmax(good[::-1])) if bool(good.any()) else -1
        return good, 0, last
    position = life_positions(marks)
    if bool(np.any((position % capacity != slot) & (position >= 0))):
        _damaged(path, "a commit mark does not belong to its slot")
    last = int(position.max())
    # The oldest slot is the one that the writer fills next: it may be half overwritten under its old mark.
    first = last - capacity + 2
    return position >= first, first, last


def _check_fields(path: Path, records: Records) -> None:
    if len(records) == 0:
        return
    kind = np.ascontiguousarray(records["kind"])
    if int(kind.max()) >= _KINDS:
        _damaged(path, f"a record has the unknown kind {int(kind.max())}")
    host = kind == layout.KIND_HOST_SPAN
    t0, t1 = records["t0"], records["t1"]
    if bool(np.any((t1 < t0) & host)):
        _damaged(path, "a span ends before it begins")
    point = records["point"]
    if bool(np.any((point == layout.POINT_NONE) & (kind <= layout.KIND_DEVICE_SPAN))):
        _damaged(path, "a record names no point")


def _text(path: Path, raw: bytes) -> str:
    try:
        return raw.rstrip(b"\0").decode("utf-8")
    except UnicodeDecodeError:
        _damaged(path, "its header holds text that is not UTF-8")


def _damaged(path: Path, why: str) -> NoReturn:
    raise SpecmeterError(
        f"The ring {path} is damaged",
        f"{why[:1].upper()}{why[1:]}.",
        "Leave it out, or record again; numbers from a damaged ring are not shown.",
    )


def column(records: Records, name: str) -> NDArray[Any]:
    """One field of the records as a contiguous array."""
    return np.ascontiguousarray(records[name])
