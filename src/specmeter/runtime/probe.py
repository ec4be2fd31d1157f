"""The functions that take the placeholders' place in a probed code object.

A span costs two clock reads and one ``pack_into``: no lock, no allocation that outlives it, no I/O. Whatever fails in
here disarms the point, is counted, and lets the call's result through.

Between two probes the engine streams its weights through every cache, so a probe costs what it touches for the first
time (``benchmarks/probe_cold.py``). Storing five words in a memoryview instead was a third cheaper there, half as
dear again in a loop of nothing else (0.58 us against 0.37), and no cheaper in an engine's cycle.
"""

from __future__ import annotations

import os
import time
from _thread import RLock, _local, get_ident
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from . import layout
from .device import DeviceClock, is_device_point
from .ring import Ring
from .values import NotAPlainValue, compile_path, follow

OTHER_LANES = 255
Begin = Callable[[], int]
End = Callable[..., Any]
Getter = Tuple[
    int, int, List[str], List[Any]
]  # value id, index of the name handed over (-1: result), attributes, steps


NOBODY = -1


class Slow(Exception):
    """Sends a probe to its slow way: not set up yet, or out."""


class OnlyCreated(Exception):
    """The call gave back work that is still to be done, so its time means nothing."""


def unready() -> Tuple[int, int]:
    """Stands in for a ring's next place while there is none."""
    raise Slow


def through(_begin: int, result: Any, *_roots: Any) -> Any:
    """Stands in for the end of a point that disarmed itself."""
    return result


_OUR_FOLDERS = (os.path.dirname(__file__) + os.sep, os.path.dirname(os.__file__) + os.sep, "<frozen ")


def ours(error: BaseException) -> bool:
    """Whether ``error`` arose in our own code (or the standard library below it).

    A signal handler of the server may run inside our frames, and what it raises is meant for the server.
    """
    at = error.__traceback__
    while at is not None:
        if not at.tb_frame.f_code.co_filename.startswith(_OUR_FOLDERS):
            return False
        at = at.tb_next
    return True


class Recorder:
    """One process's writer: ring, lanes, cycle counter, and the begin and end functions of each point.

    ``open_ring`` makes the ring at the first record. ``on_fault(point, error)`` is told of a failure in a probe, and
    ``on_cycle(cycle)`` may change which probes are in, ``on_deep(cycle)`` begin or end a deep window; none may raise.
    """

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
        self._engine_number_id = -1
        self.spent_ns = 0  # in the begins and ends of cycle points, while probes go in and out
        self._open_ring = open_ring
        self._opening = RLock()
        self._on_fault = on_fault
        self._on_lane = on_lane
        self._make_writers()

    # One function serves every plain point, which in place costs fewer cache lines than one a point. What changes lies
    # in its defaults (locals there: no cell to follow, no test), the cycle in a cell.
    def _make_writers(self) -> None:
        recorder = self
        cycle = 0
        writing = True
        kinds = (CoroutineType, GeneratorType, AsyncGeneratorType)

        def end(
            t0: int, result: Any, point: int, clock: Any, type: Any, coroutine: Any, generator: Any, stream: Any,
            ident: Any, owner: Any, next_place: Any, pack: Any, buffer: Any,
        ) -> Any:  # fmt: skip
            t1 = clock()
            try:
                kind = type(result)
                if kind is coroutine or kind is generator or kind is stream:
                    raise OnlyCreated(f"the call only creates a {kind.__name__}: nothing of its work happens there")
                lane = 0 if ident() == owner else recorder.local.lane
                place, mark = next_place()
                pack(buffer, place, t0, t1, cycle, point, lane, mark)
            except Exception as error:
                if not recover(point, error, t0, t1):
                    raise
            return result

        def use(ring: Optional[Ring]) -> None:
            next_place, buffer = (unready, None) if ring is None else (ring.next_place, ring.buffer)
            end.__defaults__ = (
                time.perf_counter_ns, type, *kinds, get_ident, recorder.owner,
                next_place, layout.SPAN.pack_into, buffer,
            )  # fmt: skip

        def recover(point: int, error: Exception, t0: int, t1: int) -> bool:
            """The way of the first call, of a thread's first and of a lap's last; False: not our fault."""
            if not ours(error):
                return False
            try:
                if writing:
                    if not recorder._expected(error):
                        raise error
                    write(layout.KIND_HOST_SPAN, point, t0, t1, 0)
                    use(recorder.ring)
                    if not writing:
                        use(None)
            except Exception as second:
                if not ours(second):
                    raise
                recorder._fault(point, second)
            return True

        def write(kind: int, point: int, t0: int, t1: int, value: int) -> None:
            if not writing:
                return
            lane = getattr(recorder.local, "lane", -1)
            if lane < 0:
                lane = recorder._new_lane()
            ring, place, mark = recorder._place()
            ring.words[place // 8 + 3] = 0  # not complete: a reader may look, or the process end, while it is packed
            layout.RECORD.pack_into(ring.buffer, place, t0, t1, cycle, point, kind, lane, value, mark)

        def reset() -> None:
            nonlocal cycle
            recorder.ring, cycle = None, 0
            recorder._opening = RLock()
            recorder.lanes, recorder.local, recorder.owner = {}, _local(), NOBODY
            if recorder.events is not None:
                recorder.events.forked()
            set_writing(writing)

        def set_writing(on: bool) -> None:
            nonlocal writing
            writing = on
            if recorder.events is not None:
                recorder.events.set_taking(on)
            use(None)

        def make_cycle_begin(point: int) -> Begin:
            def begin() -> int:
                nonlocal cycle
                began = time.perf_counter_ns() if recorder.on_cycle is not None else 0
                if writing:
                    try:
                        cycle = cycle + 1 & 0xFFFFFFFF
                        if recorder.events is not None:
                            recorder.events.drain()
                        if recorder.on_deep is not None:
                            recorder.on_deep(cycle)
                        if recorder.on_cycle is not None:
                            recorder.on_cycle(cycle, time.perf_counter_ns())
                    except Exception as error:
                        if not ours(error):
                            raise
                        recorder._fault(point, error)
                now = time.perf_counter_ns()
                if began:
                    recorder.spent_ns += now - began
                return now

            return begin

        self.reset, self.set_writing, self.write = reset, set_writing, write
        self._end, self._make_cycle_begin = end, make_cycle_begin
        use(None)
        self._cycle = lambda: cycle

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
        getters = _getters(point, roots, value_ids)
        if point.get("role") == "cycle":
            self._engine_number_id = value_ids.get(f"{point['name']}.iteration", self._engine_number_id)
        handed = any(root[1] >= 0 for root in roots)  # the plain end would take what is handed over for its own state
        if getters or handed:
            end = self._with_values(id, end, getters)
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

    def _with_values(self, point: int, span: End, getters: List[Getter]) -> End:
        clock = time.perf_counter_ns

        def end(t0: int, result: Any, _point: int, *roots: Any) -> Any:
            span(t0, result, point)
            try:
                t1 = clock()
                for value_id, index, attributes, steps in getters:
                    self._value(value_id, roots[index] if index >= 0 else result, attributes, steps, t1)
            except Exception as error:
                if not ours(error):
                    raise
                self._fault(point, error)
            return result

        return end

    def _value(self, value_id: int, root: Any, attributes: List[str], steps: List[Any], t1: int) -> None:
        if root is None and not attributes:
            return  # the call gave nothing this time
        try:
            for index, number in enumerate(follow(root, attributes, steps)):
                if value_id == self._engine_number_id:
                    self._engine_number = number
                if -(1 << 63) <= number < 1 << 63:
                    self.write(layout.KIND_VALUE, value_id, number, t1, index)
        except (NotAPlainValue, AttributeError, LookupError, TypeError) as reason:
            self.refused_value_count += 1
            if value_id not in self.refused_values:
                self.refused_values[value_id] = f"{type(reason).__name__}: {reason}"
                self._on_lane()

    def _place(self) -> Tuple[Ring, int, int]:
        """The ring (made at the first record), a free record's offset in it, and its mark."""
        ring = self.ring
        if ring is None:
            ring = self._start()
        place, mark = ring.take()
        return ring, place, mark

    def _expected(self, error: Exception) -> bool:
        """Whether a probe takes the slow way without a fault: not set up, the lap over, a new thread."""
        if type(error) is OnlyCreated:
            return False
        if type(error) is Slow or type(error) is StopIteration:
            return True
        return not hasattr(self.local, "lane")

    def _start(self) -> Ring:
        with self._opening:
            if self.ring is None:
                self.ring = self._open_ring()
                self._on_lane()
            return self.ring

    def _new_lane(self) -> int:
        lane = min(len(self.lanes), OTHER_LANES)
        lane = self.local.lane = self.lanes.setdefault(get_ident(), lane)
        if lane == 0:
            self.owner = get_ident()
        self._on_lane()
        return lane

    def _fault(self, point: int, error: BaseException) -> None:
        try:
            self._on_fault(point, error)
        except Exception:
            pass  # the server comes first


def _getters(point: Dict[str, Any], roots: Sequence[Sequence[Any]], value_ids: Dict[str, int]) -> List[Getter]:
    known = {root[0]: root for root in roots}
    getters: List[Getter] = []
    for name, path in (point.get("values") or {}).items():
        root, steps = compile_path(path)
        entry = known[root]
        getters.append((value_ids[f"{point['name']}.{name}"], entry[1], list(entry[2:]), steps))
    return getters
