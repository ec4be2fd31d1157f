"""One process's writer of records: its ring, its lanes, and the begin and end functions of each point."""

from __future__ import annotations

import time
from _thread import RLock, _local, get_ident
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

from . import layout
from .device import DeviceClock, is_device_point
from .ring import Ring
from .values import GET_ERRORS, getters_of, integers
from .writers import MOST, NOBODY, Begin, End, OnlyCreated, make_writers, ours

OTHER_LANES = 255


class Recorder:
    """One process's writer: ring, lanes, cycle counter, and the begin and end functions of each point.

    ``open_ring`` makes the ring at the first record. ``on_fault(point, error)`` is told of a failure in a probe, and
    ``on_cycle(cycle)`` may change which probes are in, ``on_deep(cycle)`` begin or end a deep window; none may raise.

    ``write(kind, point, t0, t1, value)`` writes one record, ``take()`` gives a free one's first word in the ring and
    its mark (``writers``), ``reset()`` is for a forked child, ``set_writing(on)`` for arming.
    """

    write: Callable[[int, int, int, int, int], None]
    take: Callable[[], Tuple[int, int]]
    reset: Callable[[], None]
    set_writing: Callable[[bool], None]
    _end: End
    _values_end: Callable[..., End]
    _make_cycle_begin: Callable[[int], Begin]
    _cycle: Callable[[], int]

    def __init__(
        self,
        open_ring: Callable[[], Ring],
        on_fault: Callable[[int, BaseException], None],
        on_lane: Callable[[], None] = lambda: None,
    ) -> None:
        self.ring: Optional[Ring] = None
        self.lanes: Dict[int, int] = {}
        self.local: Any = _local()
        self.owner = NOBODY  # the thread of lane 0
        self.refused_values: Dict[int, str] = {}
        self.refused_value_count = 0
        self.on_cycle: Optional[Callable[[int, int], None]] = None
        self.on_deep: Optional[Callable[[int], None]] = None
        self.events: Optional[DeviceClock] = None
        self._engine_number: Optional[int] = None
        self.spent_ns = 0  # in the begins and ends of cycle points, while probes go in and out
        self._open_ring = open_ring
        self._turning = RLock()
        self._on_fault = on_fault
        self._on_lane = on_lane
        make_writers(self)

    def time_device(self, outside: Optional[str], inside: bool) -> None:
        """From now on, pairs of device points also put marks on the device: ``outside`` graphs, ``inside`` them."""
        if self.events is None:
            self.events = DeviceClock(self.write, self._cycle, outside, inside)

    def pair(
        self, point: Dict[str, Any], roots: Sequence[Sequence[Any]], value_ids: Dict[str, int]
    ) -> Tuple[Begin, End]:
        """The begin and end functions of one point of the plan. Raises ValueError for a bad value path."""
        id = int(point["id"])
        begin: Begin = self._make_cycle_begin(id) if point.get("role") == "cycle" else time.perf_counter_ns
        end: End = self._end
        if self.events is not None and is_device_point(point):
            begin, end = self.events.pair(id, begin, end, bool(point.get("stamp")))
        getters = getters_of(point, roots, value_ids)
        handed = any(root[1] >= 0 for root in roots)  # the plain end would take what is handed over for its own state
        if getters or handed:
            end = self._values_end(id, end, getters)
        return begin, self._timed(end) if point.get("role") == "cycle" else end

    def _timed(self, end: End) -> End:
        """The end of a cycle point, which clean cycles have too: while probes go in and out its time is added up."""
        clock = time.perf_counter_ns

        def timed_end(t0: int, result: Any, point: int, *roots: Any) -> Any:
            if self.on_cycle is None:
                return end(t0, result, point, *roots)
            began = clock()
            given = end(t0, result, point, *roots)
            try:
                self.spent_ns += clock() - began
            except Exception as error:
                if not ours(error):
                    raise
                self._fault(point, error)
            return given

        return timed_end

    def take_engine_number(self) -> Optional[int]:
        """The engine's own number of the cycle whose point ended last (its value ``iteration``), None if not read."""
        number, self._engine_number = self._engine_number, None
        return number

    def _value(self, word: int, value: Any, t1: int, counts: bool) -> None:
        """Write a value that is no plain small integer, a list's items one by one."""
        try:
            found = integers(value)
        except GET_ERRORS as reason:
            return self._refuse_value(word, reason)
        for index, number in enumerate(found):
            if counts:
                self._engine_number = number
            if -MOST <= number < MOST:
                self.write(layout.KIND_VALUE, word >> layout.POINT_SHIFT & 0xFFFF, number, t1, index)
        return None

    def _refuse_value(self, word: int, reason: Exception) -> None:
        self.refused_value_count += 1
        id = word >> layout.POINT_SHIFT & 0xFFFF
        if id not in self.refused_values:
            self.refused_values[id] = f"{type(reason).__name__}: {reason}"
            self._on_lane()

    def _expected(self, error: Exception) -> bool:
        """Whether a probe takes the slow way without a fault: not set up, the lap over, a new thread."""
        if type(error) is OnlyCreated:
            return False
        return type(error) is IndexError or not hasattr(self.local, "lane")

    def _opened(self) -> Ring:
        if self.ring is None:
            self.ring = self._open_ring()
            self._on_lane()
        return self.ring

    def _new_lane(self) -> int:
        lane = self.lanes.setdefault(get_ident(), min(len(self.lanes), OTHER_LANES))
        if lane == 0:
            self.owner = get_ident()
        placed: int = lane << layout.LANE_SHIFT
        self.local.lane = placed
        self._on_lane()
        return placed

    def _fault(self, point: int, error: BaseException) -> None:
        try:
            self._on_fault(point, error)
        except Exception:
            pass  # the server comes first
