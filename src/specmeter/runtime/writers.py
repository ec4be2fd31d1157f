"""The functions that take the placeholders' place in a probed code object.

A span costs two clock reads and four words stored in the mapped ring: no lock, no allocation that outlives it, no I/O.
Whatever fails in here disarms the point, is counted, and lets the call's result through.

Between two probes the engine streams its weights through every cache, so a probe costs what it touches for the first
time, code above all (``benchmarks/probe_cold.py``). Hence the counters of places are plain integers of a closure and
the words are stored one by one: ``struct`` and iterators run through more code for the same record.
"""

from __future__ import annotations

import os
import sys
import time
from _thread import RLock, _local, get_ident
from itertools import count
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, Callable, List, Tuple

from . import layout
from .ring import FIRST_WORD, MARKS
from .values import GET_ERRORS, Getter

Begin = Callable[[], int]
End = Callable[..., Any]

NOBODY = -1
MOST = 1 << 63
STEP = 1 << layout.SEQ_SHIFT  # from a record's commit mark to the next one's, in its last word
WORD, VALUE = (1 << 64) - 1, (1 << 32) - 1
NO_COLUMNS = (memoryview(bytearray()).cast("Q"),) * 4  # stand in for a ring's words: the first store raises IndexError
# From CPython 3.10 on threads and signal handlers get their turn at calls and backward jumps alone. A place and its
# mark that are taken in a few instructions without one belong to one writer; elsewhere ``count`` gives them out.
TURNS_AT_CALLS = sys.version_info >= (3, 10) and bool(getattr(sys, "_is_gil_enabled", lambda: True)())


class OnlyCreated(Exception):
    """The call gave back work that is still to be done, so its time means nothing."""


def only_created(kind: type) -> OnlyCreated:
    """The fault of a point whose call gave a ``kind``."""
    return OnlyCreated(f"the call only creates a {kind.__name__}: nothing of its work happens there")


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


# One function serves every plain point, which in place costs fewer cache lines than one a point. What changes lies
# in its defaults (locals there: no cell to follow, no test); cycle, place and mark in cells.
def make_writers(recorder: Any) -> None:
    """Give ``recorder`` its ``write``, ``take``, ``reset``, ``set_writing`` and the ends and begins of points."""
    cycle = 0
    place = stop = 0  # words from the ring's begin to the next record, and to the lap's end
    mark = 0  # STEP times the commit mark of the record begun last
    columns = NO_COLUMNS
    writing = True
    kinds = (CoroutineType, GeneratorType, AsyncGeneratorType)
    clock = time.perf_counter_ns
    numbers = count(1).__next__

    def end(
        t0: int, result: Any, point: int, thread: Any, clock: Any, type: Any, coroutine: Any, generator: Any,
        stream: Any, owner: Any, first: Any, second: Any, third: Any, fourth: Any,
    ) -> Any:  # fmt: skip
        nonlocal place, mark
        t1 = clock()
        try:
            kind = type(result)
            if kind is coroutine or kind is generator or kind is stream:
                raise only_created(kind)
            if thread != owner:
                point += lane_of(thread)
            at = place  # no call from here on, so that nobody gets in between (TURNS_AT_CALLS)
            first[at] = t0
            place = at + 4
            mark += 0x1_0000_0000  # STEP
            second[at] = t1
            third[at] = point + cycle
            fourth[at] = mark
        except Exception as error:
            if not recover(point, error, t0, t1):
                raise
        return result

    def lane_of(thread: Any) -> int:
        """The lane of a span whose thread is not lane 0's, or is not known."""
        if thread is None and get_ident() == recorder.owner:
            return 0
        lane: int = recorder.local.lane
        return lane

    def patient_end(t0: int, result: Any, point: int, thread: Any = None) -> Any:
        t1 = clock()
        try:
            if type(result) in kinds:
                raise only_created(type(result))
            write(layout.KIND_HOST_SPAN, point >> layout.POINT_SHIFT, t0, t1, 0)
        except Exception as error:
            if not recover(point, error, t0, t1):
                raise
        return result

    def recover(point: int, error: Exception, t0: int, t1: int) -> bool:
        """The way of the first call, of a thread's first and of a lap's last; False: not our fault."""
        if not ours(error):
            return False
        id = point >> layout.POINT_SHIFT & 0xFFFF
        try:
            if writing:
                if not recorder._expected(error):
                    raise error
                write(layout.KIND_HOST_SPAN, id, t0, t1, 0)
                use_ring()
        except Exception as second:
            if not ours(second):
                raise
            recorder._fault(id, second)
        return True

    def write(kind: int, point: int, t0: int, t1: int, value: int) -> None:
        if not writing:
            return
        if not layout.VALUE_MIN <= value <= layout.VALUE_MAX:
            raise ValueError(f"{value} does not fit a record's value")
        lane = getattr(recorder.local, "lane", -1)
        if lane < 0:
            lane = recorder._new_lane()
        at, own = take()
        first, second, third, fourth = columns
        first[at] = t0 & WORD
        second[at] = t1 & WORD
        third[at] = (kind << layout.KIND_SHIFT | point << layout.POINT_SHIFT) + cycle + lane
        fourth[at] = own + (value & VALUE)

    def take() -> Tuple[int, int]:
        """A free record's first word in the ring and STEP times its commit mark; makes the ring at the first."""
        nonlocal place, mark
        while True:
            if not TURNS_AT_CALLS and recorder.ring is not None:
                number = numbers()
                at = FIRST_WORD + (number - 1) % recorder.ring.capacity * layout.RECORD_WORDS
                if number % MARKS:
                    return at, number % MARKS * STEP
                recorder.ring.words[at + 3] = 0
                continue
            at = place
            if at < stop:  # no call from here to the new mark
                place = at + 4
                own = mark + STEP
                mark = own
                return at, own
            turn()

    def turn() -> None:
        """Make the ring, or begin its next lap."""
        nonlocal place, stop, mark, columns, numbers
        with recorder._turning:
            seen = place
            if seen < stop:
                return  # another thread has
            ring = recorder._opened()
            next_stop, next_mark = ring.lap()
            fresh = columns if next_stop == stop else ring.columns(next_stop)
            begun, after = (ring.next_mark - 1) * STEP, count(ring.next_mark).__next__
            # No call from here on: a signal handler may have turned it meanwhile.
            if place == seen:
                place, stop, mark, columns, numbers = FIRST_WORD, next_stop, begun, fresh, after
                ring.next_mark = next_mark
            use_ring()

    def use_ring() -> None:
        use(columns)
        if not writing:
            use(NO_COLUMNS)

    def use(words: Any) -> None:
        end.__defaults__ = (None, clock, type, *kinds, recorder.owner, *words)

    def reset() -> None:
        nonlocal cycle, place, stop, columns
        recorder.ring, cycle, place, stop, columns = None, 0, 0, 0, NO_COLUMNS
        recorder._turning = RLock()
        recorder.lanes, recorder.local, recorder.owner = {}, _local(), NOBODY
        if recorder.events is not None:
            recorder.events.forked()
        set_writing(writing)

    def set_writing(on: bool) -> None:
        nonlocal writing
        writing = on
        if recorder.events is not None:
            recorder.events.set_taking(on)
        use(NO_COLUMNS)

    def values_end(point: int, span: End, getters: List[Getter]) -> End:
        """The end of a point with values, which follow its span."""
        word = point << layout.POINT_SHIFT
        kind_of, integer, most, slow = type, int, MOST, not TURNS_AT_CALLS  # cells cost fewer cache lines than globals

        def end(t0: int, result: Any, _word: int, thread: Any = None, *roots: Any) -> Any:
            nonlocal place, mark
            span(t0, result, word, thread)
            if not writing:
                return result
            try:
                t1 = clock()
                lane = 0 if thread == recorder.owner else lane_of(thread)
                first, second, third, fourth = columns
                for value, index, get, optional, counts in getters:
                    root = roots[index] if index >= 0 else result
                    if root is None and optional:
                        continue
                    try:
                        number = root if get is None else get(root)
                    except GET_ERRORS as reason:
                        recorder._refuse_value(value, reason)
                        continue
                    if kind_of(number) is not integer or slow or not 0 <= number < most:
                        recorder._value(value, number, t1, counts)
                        continue
                    if counts:
                        recorder._engine_number = number
                    at = place  # no call from here to the new mark
                    if at < stop:
                        place = at + 4
                        own = mark + STEP
                        mark = own
                        first[at] = number
                        second[at] = t1
                        third[at] = value + cycle + lane
                        fourth[at] = own
                    else:
                        recorder._value(value, number, t1, counts)
                        first, second, third, fourth = columns
            except Exception as error:
                if not ours(error):
                    raise
                recorder._fault(point, error)
            return result

        return end

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

    recorder.reset, recorder.set_writing, recorder.write, recorder.take = reset, set_writing, write, take
    recorder._end = end if TURNS_AT_CALLS else patient_end
    recorder._values_end, recorder._make_cycle_begin = values_end, make_cycle_begin
    use(NO_COLUMNS)
    recorder._cycle = lambda: cycle
