"""What a stamp in a graph costs the device: a small clean graph against a stamped one of the same process, in turn.

Both are captured by the driver alone, on the ring's side stream, before the process's first graph is, when no request
runs yet. They hold the same short kernels; behind each of these the second has a stamp, which writes to memory of its
own in place of the ring. They are replayed in turn between events. Nothing is waited for: what has not come when it is
asked for is asked for again later.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional

from . import device_ptx

KERNELS = 16
PAIRS = 40
# The order statistics that hold the median of 40 with 95 % (Conover, Practical Nonparametric Statistics, 3.2).
UPPER = 26
_SCRATCH = 4096
_COUNTER, _REPLAYS, _ROWS_AT, _TICKS_AT = 0, 8, 64, 128


class StampCost:
    """One measurement, launched when it is made. ``driver`` is a device_driver.Driver, whose failures go through.

    ``stamp`` and ``short`` launch the kernels STAMP and TICKS of device_ptx on ``stream``, which is idle. The scratch
    memory stays for good, the graphs and events are given back once everything is read.
    """

    def __init__(self, driver: Any, stream: int, stamp: Any, short: Any) -> None:
        self.ns: List[float] = []
        self.waiting = True
        self._driver = driver
        with driver.relaxed():
            base = driver.memory(_SCRATCH)
            driver.clear(base, _SCRATCH, stream)
            self._graphs = [_captured(driver, stream, base, stamp if stamped else None, short) for stamped in (0, 1)]
            self._events = [driver.timed_event() for _ in range(2 * PAIRS + 1)]
            for graph in self._graphs:
                driver.launch_graph(graph, stream)  # the first time loads it
            driver.record(self._events[0], stream)
            for number in range(2 * PAIRS):
                driver.launch_graph(self._graphs[_which(number)], stream)
                driver.record(self._events[number + 1], stream)

    def read(self) -> bool:
        """Take the times if the device has come to the end; whether it is over."""
        driver = self._driver
        with driver.relaxed():
            if not self.waiting:
                return True
            if not driver.done(self._events[-1]):
                return False
            times = [driver.elapsed_ns(*ends) for ends in zip(self._events, self._events[1:])]  # noqa: B905 (3.9)
            self.waiting = False
            for graph in self._graphs:
                driver.free_graph(graph)
            for event in self._events:
                driver.free_event(event)
        for pair in range(PAIRS):
            two = {_which(number): times[number] for number in (2 * pair, 2 * pair + 1)}
            self.ns.append((two[1] - two[0]) / KERNELS)
        self.ns.sort()
        return True

    def describe(self) -> Dict[str, Any]:
        """One stamp's median cost and the upper end of its interval, ns; the reason where they are not known."""
        if not self.ns:
            return {"stamp_ns": None, "upper_ns": None, "reason": "the device has not come round to measuring it"}
        middle = (self.ns[PAIRS // 2 - 1] + self.ns[PAIRS // 2]) / 2
        return {"stamp_ns": max(0.0, middle), "upper_ns": max(0.0, self.ns[UPPER]), "reason": ""}


def _which(number: int) -> int:
    """Of the replay of that number: 0 the clean graph, 1 the stamped one; which is first changes from pair to pair."""
    return (number + number // 2) % 2


def _captured(driver: Any, stream: int, base: int, stamp: Optional[Any], short: Any) -> Any:
    """A graph of short kernels, with a stamp behind each if there is one; the stream captures no longer in any case."""
    driver.begin_capture(stream)
    try:
        for number in range(KERNELS):
            short(stream, base + _TICKS_AT)
            if stamp is not None:
                what = device_ptx.FIRST if number == 0 else device_ptx.END if number % 2 else 0
                stamp(stream, base + _COUNTER, base + _ROWS_AT, base + _REPLAYS, 0, 0, what, 0)
    finally:
        graph = driver.end_capture(stream)
    return driver.made_graph(graph)
