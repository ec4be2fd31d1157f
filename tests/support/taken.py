"""A recorder's stand-in for tests of device clocks: keeps the records, and counts cycles by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from specmeter.runtime import layout
from specmeter.runtime.device import DeviceClock


class Record(NamedTuple):
    """One record as it was written; ``cycle`` is that of the writing."""

    kind: int
    point: int
    cycle: int
    t0: int
    t1: int
    value: int

    @property
    def own_cycle(self) -> int:
        """The cycle that the span belongs to."""
        back = self.value & 0xFFF if self.kind == layout.KIND_GRAPH_SPAN else self.value
        return self.cycle - back

    @property
    def length(self) -> int:
        """End minus begin, ns."""
        return self.t1 - self.t0


class Taken:
    """A DeviceClock whose records stay in ``records``. ``how`` goes to DeviceClock."""

    def __init__(self, **how: Any) -> None:
        self.records: list[Record] = []
        self.host: list[tuple[int, int, int]] = []
        self.cycle = 1
        self.now: Callable[[], int] = how.get("clock", time.perf_counter_ns)
        self.clock = DeviceClock(self._write, lambda: self.cycle, **how)

    def _write(self, kind: int, point: int, t0: int, t1: int, value: int) -> None:
        self.records.append(Record(kind, point, self.cycle, t0, t1, value))

    def arm(self) -> None:
        """As arming does."""
        self.clock.set_taking(True)

    def point(self, id: int, stamp: bool = False) -> Callable[[Callable[[], Any]], Any]:
        """Calls what it is given as the probed call of a device point."""

        def end(t0: int, result: Any, point: int) -> Any:
            self.host.append((point, t0, self.now()))
            return result

        begin, close = self.clock.pair(id, self.now, end, stamp)

        def call(function: Callable[[], Any]) -> Any:
            token = begin()
            return close(token, function(), id)

        return call

    def turn(self) -> None:
        """The next cycle begins."""
        self.cycle += 1
        self.clock.drain()

    def of(self, kind: int, point: int | None = None) -> list[Record]:
        """The records of a kind, of one point."""
        return [r for r in self.records if r.kind == kind and point in (None, r.point)]

    def spans(self, point: int | None = None) -> list[Record]:
        """Device spans."""
        return self.of(layout.KIND_DEVICE_SPAN, point)

    def graphs(self) -> list[Record]:
        """Graph spans."""
        return self.of(layout.KIND_GRAPH_SPAN)

    def pairs(self) -> list[Record]:
        """Clock pairs."""
        return self.of(layout.KIND_CLOCK_PAIR)
