"""Device spans by pooled events on the current stream: asked for late, never waited for.

Two events stand around a point's call. Pairs wait in a queue; what the device has passed is read at a later cycle's
begin. Times run from this clock's first event, in nanoseconds; from one event to the next, because one long span would
lose its nanoseconds in the 32-bit float that ``elapsed_time`` gives.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Callable, Deque, List, Optional, Tuple

from . import layout
from .device_backend import Backend
from .device_pairs import PATIENCE_NS, TRIES, ClockPair, bracket

MOST_PENDING = 4096
# Events as far apart as this around a stamp are near enough; the time of one is known to half a microsecond (CUDA's
# driver API manual, cuEventElapsedTime).
NEAR_NS = 8_000
STEP_NS = 500
TIE_NS = 1_000_000
Cycle = Callable[[], int]


class EventSpans:
    """Pooled events of one backend. Whatever torch raises goes through to the caller, which turns the clock off.

    ``open()`` records an event on the current stream and gives it; ``close(point, first)`` says that the call which
    began at it is over. They lie in the server's time, so they are closures over what they need. ``write(kind, point,
    t0, t1, value)`` takes the spans, ``cycle()`` tells the cycle that runs. ``pending`` has what waits to be read.
    """

    def __init__(self, backend: Backend, write: Callable[[int, int, int, int, int], None], cycle: Cycle) -> None:
        self.dropped = 0
        self.shift_ns = 0  # device minus host, where times are to go on from another clock of the device
        self._backend = backend
        self._write, self._cycle = write, cycle
        self._pool: List[Any] = []
        self.pending: Deque[Tuple[int, int, Any, Any]] = deque()
        self._last: Any = None
        self._passed_ns = 0
        self._held: Any = None  # where times run from: not to be recorded again
        self._paired: Optional[Tuple[Any, int]] = None
        self._anchor: Optional[Tuple[Any, int]] = None
        self._side: Any = None
        self._busy: List[Any] = []
        self.open, self.close = self._make_marks()

    def __len__(self) -> int:
        return len(self.pending)

    def _make_marks(self) -> Tuple[Callable[[], Any], Callable[[int, Any], None]]:
        take, new, mark = self._pool.pop, self._backend.event, self._backend.mark
        pending, put, cycle = self.pending, self.pending.append, self._cycle

        def open() -> Any:
            try:
                event = take()
            except IndexError:  # asking first would let another thread take the last one meanwhile
                event = new()
            mark(event)
            return event

        def close(point: int, first: Any) -> None:
            if len(pending) >= MOST_PENDING:
                self.dropped += 1
                return
            try:
                event = take()
            except IndexError:
                event = new()
            mark(event)
            put((point, cycle(), first, event))

        return open, close

    def drain(self) -> None:
        """Write the spans that the device has passed."""
        if self._anchor is not None:
            if not self._anchor[0].query():
                return
            self._paired, self._anchor = self._anchor, None
            self._last, self._passed_ns = self._paired
            self._held = self._last
        pending = self.pending
        if not pending:
            return
        query, elapsed, free = self._backend.query, self._backend.elapsed, self._pool.append
        now, write = self._cycle(), self._write
        while pending and query(pending[0][3]):
            point, cycle, first, second = pending.popleft()
            last, begin_ns = self._last, self._passed_ns
            if last is not None:
                begin_ns += round(elapsed(last, first) * 1e6)
                if last is not self._held:
                    free(last)
            self._last, self._passed_ns = first, begin_ns
            end_ns = begin_ns + round(elapsed(first, second) * 1e6)
            write(layout.KIND_DEVICE_SPAN, point, begin_ns, end_ns, now - cycle)
            free(second)

    def forget(self) -> None:
        """Let go of everything that waits, and of the events that times ran from."""
        self.pending.clear()
        self._pool.clear()
        self._last = self._paired = self._anchor = None
        self._passed_ns = 0

    # -- the host's clock -----------------------------------------------------------------------------------------

    def pair(self, clock: Callable[[], int]) -> Optional[ClockPair]:
        """The host's clock and this one at the same moment, by an event on a stream where nothing else is."""
        if self._side is None:
            self._side = self._backend.side_stream()
        if any(not event.query() for event in self._busy):
            return None  # the device has not come round to the last try yet
        tried: List[Any] = []
        self._busy = tried

        def ask() -> None:
            event = self._backend.event()
            event.record(self._side)
            tried.append(event)

        # Whose answer was best is its place in the list: the time is read afterwards.
        found = bracket(ask, lambda: len(tried) - 1 if tried[-1].query() else None, clock)
        if found is None:
            return None
        event = tried[found.device_ns]
        return ClockPair(found.host_ns, self._place(event, found.host_ns), found.error_ns)

    @property
    def started(self) -> bool:
        """Whether times run from somewhere already."""
        return self._last is not None

    def tie(self, ring: Any, clock: Callable[[], int]) -> Optional[int]:
        """Have times run on the clock of a ring of stamps, from a stamp between two events on its stream.

        Gives how far they may be off it, ns; None where the device did not answer, so that they run on no clock yet.
        """
        stream = self._backend.outside_stream(ring.stream)
        best: Optional[Tuple[int, int, Any]] = None
        until = clock() + TIE_NS
        for number in range(TRIES):
            if number and clock() > until:
                break  # the server's own thread waits here
            found = self._around(ring, stream, clock)
            if found is None:
                break
            if best is None or found[0] < best[0]:
                best = found
            if best[0] <= NEAR_NS:
                break
        if best is None:
            return None
        apart, device_ns, first = best
        self._anchor = (first, device_ns - apart // 2)
        return apart // 2 + STEP_NS

    def _around(self, ring: Any, stream: Any, clock: Callable[[], int]) -> Optional[Tuple[int, int, Any]]:
        """How far two events are apart, the time of the stamp between them, and the first of them."""
        first, second = self._backend.event(), self._backend.event()
        device_ns = ring.tie(lambda: first.record(stream), lambda: second.record(stream), clock)
        if device_ns is None:
            return None
        until = clock() + PATIENCE_NS
        with ring.relaxed():  # another thread may be capturing: a question to an event would spoil that
            while not second.query():
                if clock() > until:
                    return None
            return max(0, round(first.elapsed_time(second) * 1e6)), device_ns, first

    def _place(self, event: Any, host_ns: int) -> int:
        """The time of an event that is over; of the first one, which the device passed at ``host_ns``, the host's."""
        if self._paired is None:
            if self._last is None:
                passed = self._passed_ns = host_ns + self.shift_ns
                self._last = self._held = event
            else:
                passed = self._passed_ns + round(self._last.elapsed_time(event) * 1e6)
        else:
            passed = self._paired[1] + round(self._paired[0].elapsed_time(event) * 1e6)
        self._paired = (event, passed)
        return passed
