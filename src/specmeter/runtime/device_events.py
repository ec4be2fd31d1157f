"""Device spans by pooled events on the current stream: asked for late, never waited for.

Two events stand around a point's call. Pairs wait in a queue; what the device has passed is read at a later cycle's
begin. Times run from this clock's first event, in nanoseconds; from one event to the next, because one long span would
lose its nanoseconds in the 32-bit float that ``elapsed_time`` gives.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Callable, Deque, List, Optional, Tuple

from .device_backend import Backend
from .device_pairs import ClockPair, bracket

MOST_PENDING = 4096
# point, cycle, begin and end on the device's clock, ns
Give = Callable[[int, int, int, int], None]


class EventSpans:
    """Pooled events of one backend. Whatever torch raises goes through to the caller, which turns the clock off."""

    def __init__(self, backend: Backend, give: Give) -> None:
        self.dropped = 0
        self.shift_ns = 0  # device minus host, where times are to go on from another clock of the device
        self._backend = backend
        self._give = give
        self._pool: List[Any] = []
        self._pending: Deque[Tuple[int, int, Any, Any]] = deque()
        self._last: Any = None
        self._passed_ns = 0
        self._held: Any = None  # where times run from: not to be recorded again
        self._paired: Optional[Tuple[Any, int]] = None
        self._anchor: Optional[Tuple[Any, int]] = None
        self._side: Any = None
        self._busy: List[Any] = []

    def __len__(self) -> int:
        return len(self._pending)

    def record(self) -> Any:
        """An event on the current stream."""
        pool = self._pool
        event = pool.pop() if pool else self._backend.event()
        self._backend.mark(event)
        return event

    def close(self, point: int, cycle: int, first: Any) -> None:
        """The call that began at the event ``first`` is over."""
        if len(self._pending) >= MOST_PENDING:
            self.dropped += 1
            return
        self._pending.append((point, cycle, first, self.record()))

    def drain(self) -> None:
        """Give the spans that the device has passed."""
        if self._anchor is not None:
            if not self._anchor[0].query():
                return
            self._paired, self._anchor = self._anchor, None
            self._last, self._passed_ns = self._paired
            self._held = self._last
        pending = self._pending
        while pending and pending[0][3].query():
            point, cycle, first, second = pending.popleft()
            if self._last is not None:
                self._passed_ns += round(self._last.elapsed_time(first) * 1e6)
                if self._last is not self._held:
                    self._pool.append(self._last)
            length = round(first.elapsed_time(second) * 1e6)
            self._give(point, cycle, self._passed_ns, self._passed_ns + length)
            self._last = first
            self._pool.append(second)

    def forget(self) -> None:
        """Let go of everything that waits, and of the events that times ran from."""
        self._pending.clear()
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

    def anchor(self, event: Any, device_ns: int) -> None:
        """Have times run from ``event``, recorded just now, when another clock of the device stood at ``device_ns``."""
        self._anchor = (event, device_ns)

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
