"""Device time of points: events or stamps on the stream, read late, never waited for.

A point whose clock is ``device`` gets a mark before and after its call: outside graph capture a pooled event
(device_events.py) or a stamp kernel, inside a capture a stamp kernel where the plan wants one (device_stamping.py).
What the device has passed is written as device spans at a later cycle's begin: ``t1 - t0`` is the time between the
two marks in nanoseconds, ``value`` how many cycles before the record's own the span belongs. A KIND_CLOCK_PAIR record
says where the host's clock stood (``t0``) at a device time (``t1``), within ``value`` ns; all device times of a ring
are on one clock. A span of a phase that the host feeds slowly holds the gaps between its kernels: the device was not
busy all that time. torch is used only if the process has imported it, and never waited for; ``describe`` says what is
not there, and why.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, Callable, Dict, Optional, Tuple

from . import layout
from .device_backend import Backend, find_backend, of_the_clock
from .device_events import EventSpans
from .device_pairs import ClockPair
from .device_stamping import PAIR_AGAIN_NS, PAIR_EVERY_NS, StampClock, Write

MOST_OPEN = 64
WAITED_NS = 100_000
EVENTS, STAMPS = "events", "stamps"
# What times calls outside graphs where the device is to be timed at all (link.json: "device_events": true).
DEFAULT_OUTSIDE = EVENTS
Begin = Callable[[], int]
End = Callable[..., Any]


class DeviceClock:
    """Wraps the begin and end functions of device points. ``write(kind, point, t0, t1, value)`` takes the records.

    ``outside`` says how calls outside graphs are timed: EVENTS, STAMPS, or None for not at all; ``inside`` whether
    stamps go into graphs.
    """

    def __init__(
        self,
        write: Write,
        cycle: Callable[[], int],
        outside: Optional[str] = EVENTS,
        inside: bool = False,
        clock: Callable[[], int] = time.perf_counter_ns,
        **driver: Any,
    ) -> None:
        self.reason = "no device point has run"
        self.taking = False
        self.outside = outside
        self.stamps: Optional[StampClock] = None
        self._write, self._cycle, self._clock = write, cycle, clock
        self._backend: Optional[Backend] = None
        self._events: Optional[EventSpans] = None
        self._off = False
        self._now_in = 0
        self._anchored = False
        self._paired_ns = self._tied_ns = 0
        self._tie_again_ns = PAIR_AGAIN_NS
        self._error_ns: Optional[int] = None
        self._lock = threading.Lock()
        if inside or outside == STAMPS:
            self.stamps = StampClock(write, cycle, clock, self._find, self._replay_in, **driver)

    # -- points ---------------------------------------------------------------------------------------------------

    def pair(self, point: int, begin: Begin, end: End, stamp: bool = False) -> Tuple[Begin, End]:
        """A host span's ``begin`` and ``end`` with marks around the call; ``stamp``: inside graphs too.

        The host's clock is read inside the marks, so their cost is no part of the host span. A failure turns the
        clock that failed off for good.
        """
        opened: Dict[int, Any] = {}
        mark, close = self._open, self._close

        def device_begin() -> int:
            first = None
            if (stamp or self.taking) and not self._off:
                try:
                    first = mark(point, stamp)
                except Exception as error:
                    self._failed(error)
            t0 = begin()
            if first is not None:
                if len(opened) > MOST_OPEN:
                    opened.clear()  # calls that raised
                opened[t0] = first
            return t0

        def device_end(t0: int, result: Any, id: int, *roots: Any) -> Any:
            given = end(t0, result, id, *roots)
            first = opened.pop(t0, None) if opened else None
            if first is not None and not self._off:
                try:
                    close(point, first)
                except Exception as error:
                    self._failed(error)
            self._now_in = 0
            return given

        return device_begin, device_end

    def _open(self, point: int, stamp: bool) -> Any:
        """The mark before a call: an event, a stamp's number, a stamp inside a graph; None where there is none."""
        backend = self._backend
        if backend is None:
            backend = self._find()
            if backend is None:
                return None
        stamps = self.stamps
        if backend.capturing():
            return stamps.open_inside(point) if stamp and stamps is not None else None
        if not self.taking:
            return None
        self._now_in = point
        if self.outside == STAMPS and stamps is not None:
            if not stamps.off:
                return stamps.open_call(point) if stamps.ready else None
            self.outside = EVENTS  # no stamps to be had; ``describe`` says so
        events = self._events
        return events.open() if self.outside == EVENTS and events is not None else None

    def _close(self, point: int, first: Any) -> None:
        assert self._backend is not None and self._events is not None
        kind = type(first)
        if kind is tuple:
            assert self.stamps is not None
            self.stamps.close_inside(point, first)
        elif self._backend.capturing():
            return  # a capture began inside the call: an event in it is no time
        elif kind is int:
            assert self.stamps is not None
            self.stamps.close_call(point, first)
        else:
            self._events.close(point, first)

    def _replay_in(self) -> Optional[Tuple[int, int]]:
        """For a graph's launch: the cycle and the device point it happens in, if that is to be followed."""
        return (self._cycle(), self._now_in) if self._now_in and self.taking else None

    # -- set-up and end -------------------------------------------------------------------------------------------

    def follow_graphs(self) -> None:
        """Have torch's graphs stamped from now on, if that is wanted and the process has imported torch."""
        torch = sys.modules.get("torch")
        if self.stamps is not None and torch is not None:
            self.stamps.follow(torch)

    def leave(self) -> None:
        """Take everything out again, for good."""
        self._off, self.reason = True, "detached"
        if self.stamps is not None:
            self.stamps.off = True
            try:
                self.stamps.hooks.remove()
            except Exception as error:
                self._failed(error)

    def forked(self) -> None:
        """In the child of a fork: a device that was in use is out of reach there."""
        self._lock = threading.Lock()
        if self._backend is not None:
            self._stop(RuntimeError("the process was forked after it had used the device"))
            if self.stamps is not None:
                self.stamps.off = True

    def set_taking(self, on: bool) -> None:
        """Whether records are written from now on."""
        if on and not self.taking:
            try:
                self._begin_taking()
            except Exception as error:
                self._failed(error)
        self.taking = on

    def _begin_taking(self) -> None:
        self._anchored, self._paired_ns, self._tied_ns, self._tie_again_ns = False, 0, 0, PAIR_AGAIN_NS
        if self.stamps is not None:
            if self._events is not None and not self.stamps.off:
                self._events.forget()  # their times will run from another event
            self.stamps.armed()

    def _find(self) -> Optional[Backend]:
        if self._backend is None and not self._off:
            found, reason = find_backend()
            if found is not None:
                self._events = EventSpans(found, self._write, self._cycle)
                self._backend, self.reason = found, ""
            elif reason:
                self._off, self.reason = True, reason
        return self._backend

    def _failed(self, error: BaseException) -> None:
        if not of_the_clock(error):
            raise error  # a signal handler of the server, run inside our frames
        self._stop(error)

    def _stop(self, error: BaseException) -> None:
        self._off, self.reason = True, f"{type(error).__name__}: {error}"
        if self._events is not None:
            self._events.forget()

    # -- out ------------------------------------------------------------------------------------------------------

    def drain(self) -> None:
        """Write the spans that the device has passed. Called at a cycle's begin; asks, and never waits."""
        if not self.taking or not self._lock.acquire(False):
            return
        try:
            self._now_in = 0
            backend, stamps, events = self._backend, self.stamps, self._events
            if backend is None or events is None:
                return
            if stamps is None and not events.pending and self._clock() < self._paired_ns:
                return  # as in the cycles that are not sampled
            if not backend.capturing():
                if stamps is not None:
                    self._drain_stamps(stamps)
                if not self._off and self.outside == EVENTS:
                    self._drain_events(events)
        except Exception as error:
            self._failed(error)
        finally:
            self._lock.release()

    def _drain_stamps(self, stamps: StampClock) -> None:
        if not stamps.ready and not stamps.set_up():
            return
        # First of all: the pairs written from now on bound the events' times too.
        wanted = not self._anchored and self.outside == EVENTS and not (self._off or stamps.off)
        if wanted and self._clock() >= self._tied_ns:
            self._tie(stamps)
        stamps.drain()

    def _tie(self, stamps: StampClock) -> None:
        """Put the events' times on the stamps' clock."""
        assert self._events is not None and stamps.ring is not None
        began = self._clock()
        found = self._events.tie(stamps.ring, self._clock)
        now = self._clock()
        self._anchored, self._tied_ns = found is not None, now + self._tie_again_ns
        if now - began > WAITED_NS:
            self._tie_again_ns = min(2 * self._tie_again_ns, PAIR_EVERY_NS)  # the server's own thread waited
        stamps.beside_ns = found or 0
        if found:
            stamps.pair_soon()  # with the bound that holds for events too

    def _drain_events(self, events: EventSpans) -> None:
        stamps = self.stamps
        if stamps is not None and stamps.ring is not None and not stamps.off:
            if not self._anchored:
                return  # two clocks in one ring would be mixed up
        elif self._clock() >= self._paired_ns:
            if stamps is not None and stamps.last_pair is not None:
                events.shift_ns = stamps.last_pair.device_ns - stamps.last_pair.host_ns
            self._pair_events(events)
        if self._anchored or events.started or stamps is None or stamps.last_pair is None:
            events.drain()

    def _pair_events(self, events: EventSpans) -> None:
        found: Optional[ClockPair] = events.pair(self._clock)
        self._paired_ns = self._clock() + (PAIR_AGAIN_NS if found is None else PAIR_EVERY_NS)
        if found is not None:
            self._error_ns = found.error_ns
            self._write(layout.KIND_CLOCK_PAIR, layout.POINT_NONE, *found)

    def describe(self) -> Dict[str, Any]:
        """For the process's report: why nothing is recorded (empty: it is), the backend and what it cannot do."""
        events = self._events
        return {
            "reason": self.reason,
            "backend": self._backend.name if self._backend is not None else None,
            "cannot": self._backend.cannot if self._backend is not None else [],
            "outside_graphs": self.outside,
            "dropped": events.dropped if events is not None else 0,
            "waiting": len(events) if events is not None else 0,
            "pair_error_ns": self._error_ns,
            "stamps": self.stamps.describe() if self.stamps is not None else None,
            "stamps_cost": self.stamps.describe_cost() if self.stamps is not None else None,
        }


def is_device_point(point: Any) -> bool:
    """Whether the plan wants this point's device time."""
    return bool(isinstance(point, dict) and point.get("clock") == "device")


def device_asked(document: Dict[str, Any]) -> Tuple[Optional[str], bool]:
    """What link.json wants of the device: how calls outside graphs are timed, and whether stamps go into graphs.

    ``device_events`` is false, true, ``"events"`` or ``"stamps"``.
    """
    wanted = document.get("device_events")
    outside = (str(wanted) if wanted in (EVENTS, STAMPS) else DEFAULT_OUTSIDE) if wanted else None
    return outside, bool(document.get("device_stamps"))
