"""Device time of points outside graph capture, by CUDA events that are read late and never waited for.

A point whose clock is ``device`` gets an event before and after its call, on the stream that is current there. Pairs
wait in a queue; at each cycle's begin those that the device has passed are read and written as device spans:
``t1 - t0`` is the time between the two events in nanoseconds, ``t0`` the time since this clock's first event. An event
span of a phase that the host feeds slowly holds the gaps between its kernels: the device was not busy all that time.
torch is used only if the process has imported it; without CUDA nothing is recorded and ``reason`` says why.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from typing import Any, Callable, Deque, Dict, List, Tuple

from . import layout

MOST_PENDING = 4096
Begin = Callable[[], int]
End = Callable[..., Any]
Write = Callable[[int, int, int, int, int], None]


class Stamp(int):
    """The host time that a point began, in ns, with the event that was recorded there."""

    event: Any


class EventClock:
    """Wraps the begin and end functions of device points. ``write(kind, point, t0, t1, value)`` takes the records."""

    def __init__(self, write: Write, cycle: Callable[[], int]) -> None:
        self.reason = "no device point has run"
        self.dropped = 0
        self._write = write
        self._cycle = cycle
        self._cuda: Any = None
        self._off = False
        self._pool: List[Any] = []
        self._pending: Deque[Tuple[int, int, Any, Any]] = deque()
        self._passed_ns = 0
        self._last: Any = None
        self._lock = threading.Lock()

    def pair(self, point: int, begin: Begin, end: End) -> Tuple[Begin, End]:
        """A host span's ``begin`` and ``end`` with events around the call. A failure turns the events off for good."""

        def device_begin() -> int:
            stamp = Stamp(begin())
            stamp.event = None
            if not self._off:
                try:
                    stamp.event = self._record()
                except Exception as error:
                    self._stop(error)
            return stamp

        def device_end(t0: int, result: Any, id: int, *roots: Any) -> Any:
            first = getattr(t0, "event", None)
            if first is not None and not self._off:
                try:
                    second = self._record()
                    if second is not None:
                        self._queue(point, first, second)
                except Exception as error:
                    self._stop(error)
            return end(t0, result, id, *roots)

        return device_begin, device_end

    def _record(self) -> Any:
        """An event recorded on the current stream, or None during graph capture and without CUDA."""
        cuda = self._cuda
        if cuda is None:
            cuda = self._find()
            if cuda is None:
                return None
        if cuda.is_current_stream_capturing():
            return None
        event = self._pool.pop() if self._pool else cuda.Event(enable_timing=True)
        event.record()
        return event

    def _find(self) -> Any:
        torch = sys.modules.get("torch")
        cuda = getattr(torch, "cuda", None)
        if cuda is None or not cuda.is_available():
            self._off, self.reason = True, "torch is not imported" if torch is None else "torch has no CUDA device"
            return None
        if not cuda.is_initialized():
            return None  # never be the one that makes a context
        self._cuda, self.reason = cuda, ""
        return cuda

    def _queue(self, point: int, first: Any, second: Any) -> None:
        if len(self._pending) >= MOST_PENDING:
            self.dropped += 1
            return
        self._pending.append((point, self._cycle(), first, second))

    def describe(self) -> Dict[str, Any]:
        """For the process's report: why nothing is recorded (empty: it is), pairs dropped and waiting."""
        return {"reason": self.reason, "dropped": self.dropped, "waiting": len(self._pending)}

    def drain(self) -> None:
        """Write the spans that the device has passed. Called at a cycle's begin; asks, and never waits."""
        if self._off or not self._lock.acquire(blocking=False):
            return
        try:
            while self._pending and self._pending[0][3].query():
                self._give(*self._pending.popleft())
        except Exception as error:
            self._stop(error)
        finally:
            self._lock.release()

    def _give(self, point: int, cycle: int, first: Any, second: Any) -> None:
        if self._last is None:
            self._write(layout.KIND_CLOCK_PAIR, point, time.perf_counter_ns(), 0, 0)
        else:
            # From one event to the next: a single long span would lose its nanoseconds in a 32-bit float.
            self._passed_ns += round(self._last.elapsed_time(first) * 1e6)
            self._pool.append(self._last)
        length = round(first.elapsed_time(second) * 1e6)
        # The record's own cycle is the one that is beginning; how far back this span's lies is its value.
        self._write(layout.KIND_DEVICE_SPAN, point, self._passed_ns, self._passed_ns + length, self._cycle() - cycle)
        self._last = first
        self._pool.append(second)

    def _stop(self, error: BaseException) -> None:
        self._off, self.reason = True, f"{type(error).__name__}: {error}"
        self._pending.clear()
        self._pool.clear()


def is_device_point(point: Any) -> bool:
    """Whether the plan wants this point's device time."""
    return bool(isinstance(point, dict) and point.get("clock") == "device")
