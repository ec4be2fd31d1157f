"""The functions that take the placeholders' place in a probed code object.

A span costs two clock reads and one ``pack_into``: no lock, no allocation that outlives it, no I/O. Whatever fails in
here disarms the point, is counted, and lets the call's result through.
"""

from __future__ import annotations

import os
import struct
import time
from _thread import RLock, get_ident
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from . import layout
from .device import EventClock, is_device_point
from .ring import Ring
from .values import NotAPlainValue, compile_path, follow

OTHER_LANES = 255
Begin = Callable[[], int]
End = Callable[..., Any]
Getter = Tuple[
    int, int, List[str], List[Any]
]  # value id, index of the name handed over (-1: result), attributes, steps


def _nothing(*_record: Any) -> None:
    """Packs nothing: takes ``pack_into``'s place while probes are out."""


def through(_begin: int, result: Any, *_roots: Any) -> Any:
    """Stands in for the end of a point that disarmed itself."""
    return result


_OUR_FOLDERS = (os.path.dirname(__file__) + os.sep, os.path.dirname(os.__file__) + os.sep, "<frozen ")


def _ours(error: BaseException) -> bool:
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
    ``on_cycle(cycle)`` may change which probes are in; both may raise nothing.
    """

    def __init__(
        self,
        open_ring: Callable[[], Ring],
        on_fault: Callable[[int, BaseException], None],
        on_lane: Callable[[], None] = lambda: None,
    ) -> None:
        self.ring: Optional[Ring] = None
        self.lanes: Dict[int, int] = {}
        self.refused_values: Dict[int, str] = {}
        self.refused_value_count = 0
        self.on_cycle: Optional[Callable[[int, int], None]] = None
        self.events: Optional[EventClock] = None
        self._open_ring = open_ring
        self._opening = RLock()
        self._on_fault = on_fault
        self._on_lane = on_lane
        self._make_writers()

    # The cells below are shared by all closures, and are the fastest state that CPython has for them.
    def _make_writers(self) -> None:
        recorder = self
        clock = time.perf_counter_ns
        ident = get_ident
        cycle = 0
        writing = True

        def first_slot() -> int:
            return recorder._start()

        next_slot: Callable[[], int] = first_slot
        pack: Callable[..., Any] = layout.RECORD.pack_into
        buffer: Any = None
        mask = 0
        lanes: Dict[int, int] = self.lanes
        header, size = layout.HEADER_SIZE, layout.RECORD_SIZE

        def attach(ring: Ring) -> None:
            nonlocal buffer, mask, next_slot
            buffer, mask, next_slot = ring.buffer, ring.capacity - 1, ring.next_slot

        def reset() -> None:
            nonlocal cycle, lanes, buffer
            recorder.ring, buffer, cycle = None, None, 0
            recorder._opening = RLock()
            recorder.lanes = lanes = {}
            set_writing(writing)

        def set_writing(on: bool) -> None:
            # Off costs the hot path no test: a frame still in flight then writes nothing, nowhere.
            nonlocal writing, pack, next_slot
            writing = on
            pack = layout.RECORD.pack_into if on else _nothing
            if not on:
                next_slot = int
            else:
                next_slot = recorder.ring.next_slot if recorder.ring is not None else first_slot

        def write(kind: int, point: int, t0: int, t1: int, value: int) -> None:
            lane = lanes.get(ident())
            if lane is None:
                lane = recorder._new_lane()
            slot = next_slot()
            pack(buffer, header + (slot & mask) * size, t0, t1, cycle, point, kind, lane, value, slot + 1 & 0xFFFFFFFF)

        def make_span(point: int) -> End:
            def end(t0: int, result: Any) -> Any:
                t1 = clock()
                try:
                    lane = lanes[ident()]
                    slot = next_slot()
                    # 4096: HEADER_SIZE, 32: RECORD_SIZE, as constants.
                    pack(buffer, 4096 + (slot & mask) * 32, t0, t1, cycle, point, 0, lane, 0, slot + 1)
                except Exception as error:
                    if not recover(point, error, t0, t1):
                        raise
                return result

            return end

        def recover(point: int, error: Exception, t0: int, t1: int) -> bool:
            """Write the record after all at a thread's first and when slot numbers ran out; False: not our fault."""
            if not _ours(error):
                return False
            if not writing:
                return True
            try:
                ring = recorder.ring
                if type(error) is KeyError and ident() not in lanes:
                    write(layout.KIND_HOST_SPAN, point, t0, t1, 0)
                    return True
                if ring is not None and type(error) is struct.error and ring.start_over():
                    attach(ring)
                    write(layout.KIND_HOST_SPAN, point, t0, t1, 0)
                    return True
            except Exception as second:
                if not _ours(second):
                    raise
                error = second
            recorder._fault(point, error)
            return True

        def make_cycle_begin(point: int) -> Begin:
            def begin() -> int:
                nonlocal cycle
                if writing:
                    try:
                        cycle = cycle + 1 & 0xFFFFFFFF
                        if recorder.events is not None:
                            recorder.events.drain()
                        if recorder.on_cycle is not None:
                            recorder.on_cycle(cycle, clock())
                    except Exception as error:
                        if not _ours(error):
                            raise
                        recorder._fault(point, error)
                return clock()

            return begin

        self._attach, self.reset, self.set_writing, self.write = attach, reset, set_writing, write
        self._make_span, self._make_cycle_begin = make_span, make_cycle_begin
        self._cycle = lambda: cycle

    def time_device(self) -> None:
        """From now on, pairs of device points also record events on the device."""
        if self.events is None:
            self.events = EventClock(self.write, self._cycle)

    def pair(
        self, point: Dict[str, Any], roots: Sequence[Sequence[Any]], value_ids: Dict[str, int]
    ) -> Tuple[Begin, End]:
        """The begin and end functions of one point of the plan. Raises ValueError for a bad value path."""
        id = int(point["id"])
        begin: Begin = self._make_cycle_begin(id) if point.get("role") == "cycle" else time.perf_counter_ns
        end = self._make_span(id)
        if self.events is not None and is_device_point(point):
            begin, end = self.events.pair(id, begin, end)
        getters = _getters(point, roots, value_ids)
        return begin, self._with_values(id, end, getters) if getters else end

    def _with_values(self, point: int, span: End, getters: List[Getter]) -> End:
        clock = time.perf_counter_ns

        def end(t0: int, result: Any, *roots: Any) -> Any:
            span(t0, result)
            try:
                t1 = clock()
                for value_id, index, attributes, steps in getters:
                    self._value(value_id, roots[index] if index >= 0 else result, attributes, steps, t1)
            except Exception as error:
                if not _ours(error):
                    raise
                self._fault(point, error)
            return result

        return end

    def _value(self, value_id: int, root: Any, attributes: List[str], steps: List[Any], t1: int) -> None:
        if root is None and not attributes:
            return  # the call gave nothing this time
        try:
            for index, number in enumerate(follow(root, attributes, steps)):
                if -(1 << 63) <= number < 1 << 63:
                    self.write(layout.KIND_VALUE, value_id, number, t1, index)
        except (NotAPlainValue, AttributeError, LookupError, TypeError) as reason:
            self.refused_value_count += 1
            if value_id not in self.refused_values:
                self.refused_values[value_id] = f"{type(reason).__name__}: {reason}"
                self._on_lane()

    def _start(self) -> int:
        """Make the ring, and give its first slot."""
        with self._opening:
            ring = self.ring
            if ring is None:
                ring = self.ring = self._open_ring()
                self._attach(ring)
                self._on_lane()
        return ring.next_slot()

    def _new_lane(self) -> int:
        lane = min(len(self.lanes), OTHER_LANES)
        lane = self.lanes.setdefault(get_ident(), lane)
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
