"""The ways of marking a call on the device that device_stamp_cost.py compares."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch as typed_torch

from specmeter.runtime.device import DeviceClock
from specmeter.runtime.device_backend import Backend
from specmeter.runtime.device_driver import Driver
from specmeter.runtime.device_stamps import END, StampRing

Call = Callable[[], Any]
POINT = 7
torch: Any = typed_torch  # much of torch.cuda has no types


@dataclass(frozen=True)
class Way:
    """A call of the kernel with a pair of marks around it; ``between`` is done between timed blocks."""

    call: Call
    between: Call = lambda: None


def make_ways(backend: Backend, kernel: Call) -> tuple[dict[str, Way], dict[str, str], DeviceClock]:
    """Each way by its name."""
    notes: dict[str, str] = {}
    ring = StampRing(Driver())
    ways: dict[str, Way] = {
        "event_pair_former": Way(former_events(kernel)),
        "event_pair_lean": Way(lean_events(backend, kernel)),
        "stamp_ctypes": Way(ctypes_stamps(ring, backend, kernel)),
    }
    triton = triton_stamps(kernel, notes)
    if triton is not None:
        ways["stamp_triton"] = Way(triton)
    ways["host_span"] = Way(host_point(kernel))
    call, clock = clock_point("events", kernel, False)
    ways["clock_events_marks"] = Way(call, clock.drain)
    ways["clock_events"] = Way(clock_point("events", kernel)[0])
    call, clock = clock_point("stamps", kernel)
    ways["clock_stamps"] = Way(call)
    return ways, notes, clock


def former_events(kernel: Call) -> Call:
    """As specmeter did it at first."""
    cuda = torch.cuda
    pool = [cuda.Event(enable_timing=True) for _ in range(64)]
    place = 0

    def record() -> None:
        nonlocal place
        if cuda.is_current_stream_capturing():
            return
        place = (place + 1) % len(pool)
        pool[place].record()

    def call() -> None:
        record()
        kernel()
        record()

    return call


def lean_events(backend: Backend, kernel: Call) -> Call:
    """As the runtime records them now."""
    pool = [backend.event() for _ in range(64)]
    place = 0

    def record() -> None:
        nonlocal place
        if backend.capturing():
            return
        place = (place + 1) % len(pool)
        backend.mark(pool[place])

    def call() -> None:
        record()
        kernel()
        record()

    return call


def ctypes_stamps(ring: StampRing, backend: Backend, kernel: Call) -> Call:
    """Stamp kernels by the driver."""
    raw = backend.raw
    assert raw is not None
    number = 0

    def call() -> None:
        nonlocal number
        number += 1
        if not backend.capturing():
            ring.stamp(raw(), POINT, 0, 0, number)
        kernel()
        if not backend.capturing():
            ring.stamp(raw(), POINT | END, 0, 0, number)

    return call


def triton_stamps(kernel: Call, notes: dict[str, str]) -> Call | None:
    """The same by Triton; None, with the reason in ``notes``, where it cannot be had."""
    try:
        from device_stamp_triton import stamp
    except Exception as error:
        notes["stamp_triton"] = f"{type(error).__name__}: {error}"
        return None
    counter = torch.zeros(1, dtype=torch.int64, device="cuda")
    rows = torch.zeros(8192, dtype=torch.int64, device="cuda")
    try:
        stamp[(1,)](counter, rows, 8191, num_warps=1)
        torch.cuda.synchronize()
    except Exception as error:
        notes["stamp_triton"] = f"{type(error).__name__}: {error}"
        return None

    def call() -> None:
        if not torch.cuda.is_current_stream_capturing():
            stamp[(1,)](counter, rows, 8191, num_warps=1)
        kernel()
        if not torch.cuda.is_current_stream_capturing():
            stamp[(1,)](counter, rows, 8191, num_warps=1)

    return call


def host_point(kernel: Call) -> Call:
    """A host point without a device's clock, as it stands inside the clock_* ways."""
    begin, end = time.perf_counter_ns, end_span

    def call() -> None:
        token = begin()
        end(token, kernel(), POINT)

    return call


def clock_point(outside: str, kernel: Call, read: bool = True) -> tuple[Call, DeviceClock]:
    """A device point with its host span, and unless ``read`` is false a drain, as one cycle with one point."""
    cycle = 0
    clock = DeviceClock(drop, lambda: cycle, outside)
    begin, end = clock.pair(POINT, time.perf_counter_ns, end_span)
    clock.set_taking(True)

    def marks() -> None:
        token = begin()
        end(token, kernel(), POINT)

    def call() -> None:
        nonlocal cycle
        cycle += 1
        clock.drain()
        token = begin()
        end(token, kernel(), POINT)

    return call if read else marks, clock


def drop(*_record: int) -> None:
    pass


def end_span(_t0: int, result: Any, _id: int) -> Any:
    return result
