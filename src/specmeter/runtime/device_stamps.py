"""The device ring: rows that one-thread kernels write, copied to the host on a side stream and read once there.

A row is 32 bytes: time (u64, the device's clock in ns), mark, what, number, who, mark again, 0 (u32 each). The mark is
the low half of the row's running number plus 1, once in each half of the row, since each half is one store. ``what`` is
the point with the bits END and FIRST (device_ptx); ``who`` is the graph's key (upper 20 bits, 0: outside graphs) and
which call of that point in the graph (lower 12); ``number`` counts a graph's replays from 1 (the stamp at the graph's
first node counts them up on the device), or is the caller's own number outside graphs.

A copy takes the rows first and the counter after them, in the stream's order. A row below the counter is there, or not
in this copy yet (its marks are not its number's: read again with the next copy), or was written over since: then the
counter is a lap ahead of it, and it is counted as lapped and never looked at.
"""

from __future__ import annotations

import struct
from _thread import allocate_lock
from typing import Any, Callable, List, NamedTuple, Optional

from . import device_ptx
from .device_pairs import PATIENCE_NS, ClockPair, bracket
from .device_stamp_cost import StampCost

ROW = struct.Struct("<QIIIIII")
ROWS = 8192
GRAPHS = 4096
# So many rows at most are taken over from before the first copy after ``skip``.
FRESH = 512
ORDINALS = 1 << 12
# Copies of a quarter of a megabyte that hold the side stream for longer than the host takes to launch three things.
HOLDS = 16
_COUNTER, _TICKS, _REPLAYS = 0, 8, 64
_ROWS_AT = _REPLAYS + 4 * GRAPHS
_U64 = struct.Struct("<Q")
_MARKS = 1 << 32
END, FIRST = device_ptx.END, device_ptx.FIRST


class Row(NamedTuple):
    """One stamp: when, at what, in which graph and call, and of which replay."""

    time_ns: int
    what: int
    number: int
    key: int
    ordinal: int


class StampRing:
    """Device memory, kernels and side stream of one process. ``driver`` is a device_driver.Driver.

    Made in a thread that has the device's context and is not capturing. What the driver raises goes through. The
    memory stays for good: graphs that were captured hold its address.
    """

    def __init__(self, driver: Any, rows: int = ROWS) -> None:
        self._driver = driver
        self._context = driver.context()
        self._mask = rows - 1
        self.lapped = 0
        self.read = 0
        self.tick_ns = 0
        self.in_flight = False
        with driver.relaxed():
            module, self.compiler = device_ptx.load(driver)
            self._stamp = driver.kernel(module, device_ptx.STAMP)
            self._now = driver.kernel(module, device_ptx.NOW)
            self._size = rows * ROW.size
            self.stream = driver.stream()
            self._base = driver.memory(_ROWS_AT + self._size)
            self._places = (self._base + _COUNTER, self._base + _ROWS_AT)
            driver.clear(self._base, _ROWS_AT + self._size, self.stream)
            self._host = driver.host_memory(_U64.size * 3 + self._size)
            self._copied = driver.event()
            self._ticks = driver.kernel(module, device_ptx.TICKS)
            self._ticks(self.stream, self._base + _TICKS)
            # The driver loads a kernel when it is first launched, which it may not inside a capture.
            self._ask()
            self._stamp(self.stream, *self._places, 0, self._mask, 0, END, 0)
        self._made = False
        self._next = 1
        self._skip = False
        self._lock = allocate_lock()

    def stamp(self, stream: int, what: int, key: int, ordinal: int, number: int = 0) -> None:
        """Launch a stamp on the stream with that handle: a graph's row while it is captured, else a single row."""
        replays = self._base + _REPLAYS + 4 * key if key else 0
        counter, rows = self._places
        with self._lock:
            self._stamp(stream, counter, rows, replays, self._mask, number, what, key << 12 | ordinal)

    def ready(self) -> bool:
        """Whether the ring is empty and can be used: a stamp before that would be wiped out, or worse."""
        if not self._made:
            with self._driver.relaxed():
                self._made = bool(self._driver.idle(self.stream))
        return self._made

    def ours(self) -> bool:
        """Whether the calling thread works on the device that the ring is on."""
        return bool(self._driver.context() == self._context)

    def cost(self) -> StampCost:
        """Begin to measure what a stamp costs in a graph, on the side stream, which is idle."""

        def stamp(*numbers: int) -> None:
            with self._lock:
                self._stamp(*numbers)

        return StampCost(self._driver, self.stream, stamp, self._ticks)

    # -- out ------------------------------------------------------------------------------------------------------

    def skip(self) -> None:
        """Begin anew: what was written over until the next copy is nobody's loss, and old rows are not looked at.

        The newest rows are: calls launched since may have run before that copy is made.
        """
        self._skip = True

    def start_copy(self) -> None:
        """Have the rows copied; nothing happens while a copy is under way."""
        if self.in_flight:
            return
        host, base = self._host.address, self._base
        with self._driver.relaxed():
            self._driver.copy(host + 3 * _U64.size, base + _ROWS_AT, self._size, self.stream)
            self._driver.copy(host, base, 2 * _U64.size, self.stream)
            self._driver.record(self._copied, self.stream)
        self.in_flight = True

    def rows(self) -> List[Row]:
        """What the copy under way has brought, in order; nothing while there is none or it is not over."""
        if not self.in_flight:
            return []
        with self._driver.relaxed():
            if not self._driver.done(self._copied):
                return []
        self.in_flight = False
        view = self._host.view
        (counter,) = _U64.unpack_from(view, 0)
        (self.tick_ns,) = _U64.unpack_from(view, _U64.size)
        if self._skip:
            self._next, self._skip = max(self._next, counter - FRESH), False
        return self._decode(view, counter)

    def _decode(self, view: Any, counter: int) -> List[Row]:
        oldest = counter - self._mask - 1
        at = self._next
        if at < oldest:
            self.lapped += oldest - at
            at = oldest
        found: List[Row] = []
        while at < counter:
            place = 3 * _U64.size + (at & self._mask) * ROW.size
            time_ns, mark, what, number, who, again, _ = ROW.unpack_from(view, place)
            at += 1
            if mark != at % _MARKS or again != mark:
                at -= 1
                break
            found.append(Row(time_ns, what, number, who >> 12, who & ORDINALS - 1))
        self._next = at
        self.read += len(found)
        return found

    # -- the host's clock -----------------------------------------------------------------------------------------

    def pair(self, clock: Callable[[], int]) -> Optional[ClockPair]:
        """The host's clock and the device's at the same moment; None while the side stream or the device is busy."""
        if not self._quiet():
            return None
        with self._driver.relaxed():
            return bracket(self._ask, self._answer, clock, extra_ns=self.tick_ns)

    def tie(self, before: Callable[[], None], after: Callable[[], None], clock: Callable[[], int]) -> Optional[int]:
        """The device's time between ``before()`` and ``after()``, which record an event each on the side stream.

        None while the stream or the device is busy. All three stand behind copies of the rows that nobody reads: what
        the host takes to launch them lies not between them on the device. Both events are recorded once more first, as
        that makes them, which takes the host long.
        """
        if not self._quiet():
            return None
        with self._driver.relaxed():
            before()
            after()
            for _ in range(HOLDS):
                self._driver.copy(self._host.address + 3 * _U64.size, self._base + _ROWS_AT, self._size, self.stream)
            self._ticks(self.stream, self._base + _TICKS)  # from the copy engine to the one that runs kernels
            before()
            self._ask()
            after()
        until, found = clock() + PATIENCE_NS, self._answer()
        while found is None and clock() < until:
            found = self._answer()
        return found

    def relaxed(self) -> Any:
        """A context in which this thread's calls spoil no capture of another thread's."""
        return self._driver.relaxed()

    def _quiet(self) -> bool:
        if self.in_flight:
            return False
        with self._driver.relaxed():
            return bool(self._driver.idle(self.stream))  # else the last try's kernel has yet to run

    def _ask(self) -> None:
        place = 2 * _U64.size
        _U64.pack_into(self._host.view, place, 0)
        self._now(self.stream, self._host.device + place)

    def _answer(self) -> Optional[int]:
        (found,) = _U64.unpack_from(self._host.view, 2 * _U64.size)
        return found or None
