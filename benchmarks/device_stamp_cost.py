"""What a mark on the device costs the host, and what a stamp in a graph costs the device. Needs an NVIDIA GPU.

    PYTHONPATH=src python3 benchmarks/device_stamp_cost.py [--blocks 40] [--calls 200] [--quick]

Host: blocks of calls in random order, each call a small kernel with a pair of marks around it, or bare; the cost of a
pair is the difference of the block means, taken block round by block round, so the bare call is in none of them. Once
with an idle device (each block waits for it) and once behind a kernel that keeps the stream busy, as under run-ahead.
The ways:

    event_pair_former   pooled torch.cuda.Event, is_current_stream_capturing() and record() by torch's own methods
    event_pair_lean     runtime.device_backend: the C record on a kept Stream object
    stamp_ctypes        a stamp kernel each by cuLaunchKernel through ctypes
    stamp_triton        the same kernel in Triton, by Triton's launcher (left out without triton)
    host_span           a host point alone: one look at the clock and the call that closes it
    clock_events_marks  a DeviceClock point as the server has it, outside = events; what it queued is read between the
                        blocks, outside the timed part
    clock_events        the same, read at each call, as in a server with one device point a cycle
    clock_stamps        the same, outside = stamps

``differences`` says what the two clock_events are made of, and ``calls_us`` what single calls into torch cost.

Device: a graph of 200 small kernels clean and with 10 stamped calls, replayed in random order in one process; the cost
of a stamp is the difference of the replays' times by events, over the stamps in it.

Prints one JSON document: medians with 95 % intervals by order statistics (microseconds), machine, versions, and the
stamp clock's own report (compiler, granularity of %globaltimer, error of the clock pair).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch as typed_torch
from device_stamp_ways import POINT, Call, Way, drop, end_span, make_ways

from specmeter.runtime.device import DeviceClock
from specmeter.runtime.device_backend import Backend, find_backend

MEANS = {
    "host_us.*.bare_call": "the small kernel's launch alone, in none of the others",
    "host_us.*.pair": "what a way adds to the bare call: both marks, and for clock_* all that the runtime does",
    "host_us.*.differences.marks_over_lean": "clock_events_marks - event_pair_lean: the runtime's own work in the call",
    "host_us.*.differences.read": "clock_events - clock_events_marks: a cycle's begin, with one span to read in it",
    "calls_us": "one call into torch, the loop around it taken off; elapsed_driver: the driver's by ctypes instead",
    "device_us.per_stamp": "(stamped_replay - clean_replay) / stamps",
}
torch: Any = typed_torch  # much of torch.cuda has no types


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=40, help="blocks of each way")
    parser.add_argument("--calls", type=int, default=200, help="calls a block")
    parser.add_argument("--quick", action="store_true", help="a few blocks, to see that it runs")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.quick:
        args.blocks, args.calls = 8, 50
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA device")
    small = torch.zeros(256, device="cuda")
    torch.cuda.synchronize()
    found, reason = find_backend()
    assert found is not None, reason
    kernel: Call = lambda: small.add_(1.0)  # noqa: E731
    ways, notes, clock = make_ways(found, kernel)
    document: dict[str, Any] = {"machine": machine(), "blocks": args.blocks, "calls": args.calls, "notes": notes}
    document["means"] = MEANS
    document["host_us"] = {
        state: host_cost(ways, kernel, args, busy) for state, busy in (("idle", False), ("behind", True))
    }
    document["calls_us"] = single_calls(found, args)
    document["device_us"] = graph_cost(args)
    document["clock"] = clock.describe()
    print(json.dumps(document, indent=1))


# -- host -------------------------------------------------------------------------------------------------------------


def host_cost(ways: dict[str, Way], kernel: Call, args: argparse.Namespace, busy: bool) -> dict[str, Any]:
    """Cost of a pair of marks over the bare call, us, way by way."""
    order = random.Random(args.seed)
    everything = {"bare": Way(kernel), **ways}
    times: dict[str, list[float]] = {name: [] for name in everything}
    for way in everything.values():
        block(way, args.calls, False)
    for _ in range(args.blocks):
        names = list(everything)
        order.shuffle(names)
        for name in names:
            times[name].append(block(everything[name], args.calls, busy))

    def less(name: str, other: str) -> dict[str, Any]:
        return median_interval([a - b for a, b in zip(times[name], times[other], strict=True)])

    return {
        "bare_call": median_interval(times["bare"]),
        "pair": {name: less(name, "bare") for name in ways},
        "differences": {
            "marks_over_lean": less("clock_events_marks", "event_pair_lean"),
            "read": less("clock_events", "clock_events_marks"),
        },
    }


def block(way: Way, calls: int, busy: bool) -> float:
    """Mean host time of a call, us."""
    torch.cuda.synchronize()
    way.between()
    call = way.call
    if busy:
        torch.cuda._sleep(60_000_000)  # cycles, about 30 ms: the whole block is launched behind it
    before = time.perf_counter_ns()
    for _ in range(calls):
        call()
    after = time.perf_counter_ns()
    torch.cuda.synchronize()
    return (after - before) / calls / 1e3


def single_calls(backend: Backend, args: argparse.Namespace) -> dict[str, Any]:
    """Cost of single calls on an idle device, us."""
    first, second = backend.event(), backend.event()
    other = backend.event()
    for event in (first, second, other):
        backend.mark(event)
    torch.cuda.synchronize()
    calls: dict[str, Call] = {
        "nothing": lambda: None,
        "capturing": lambda: backend.capturing(),
        "mark": lambda: backend.mark(other),
        "query": lambda: backend.query(second),
        "elapsed": lambda: backend.elapsed(first, second),
    }
    try:
        by_driver = driver_elapsed(first, second)
        assert abs(by_driver() - backend.elapsed(first, second)) < 1e-3
        calls["elapsed_driver"] = by_driver
    except Exception as error:
        print(f"elapsed_driver left out: {type(error).__name__}: {error}", file=sys.stderr)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(args.blocks):
        for name, call in calls.items():
            times[name].append(block(Way(call), args.calls, False))
    empty = times.pop("nothing")
    return {name: median_interval([a - b for a, b in zip(t, empty, strict=True)]) for name, t in times.items()}


def driver_elapsed(first: Any, second: Any) -> Call:
    """The driver's own difference of two events' times by ctypes, which asks neither event first, in ms."""
    call = ctypes.PyDLL("libcuda.so.1")["cuEventElapsedTime"]
    out = ctypes.c_float()
    place, one, other = ctypes.byref(out), ctypes.c_void_p(first.cuda_event), ctypes.c_void_p(second.cuda_event)

    def elapsed() -> float:
        if call(place, one, other):
            raise RuntimeError("cuEventElapsedTime failed")
        return out.value

    return elapsed


# -- device -----------------------------------------------------------------------------------------------------------


def graph_cost(args: argparse.Namespace, kernels: int = 200, stamped: int = 10) -> dict[str, Any]:
    """A clean graph and a stamped one of the same work, in one process, in random order."""
    work = torch.zeros(1 << 16, device="cuda")
    clock = DeviceClock(drop, lambda: 0, None, True)
    call = point(clock)

    def capture(every: int) -> Any:
        for _ in range(3):
            work.mul_(1.0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index in range(kernels):
                if every and index % every == 0:
                    call(lambda: work.mul_(1.0))
                else:
                    work.mul_(1.0)
        return graph

    clean = capture(0)
    clock.follow_graphs()
    full = capture(kernels // stamped)
    clock.leave()
    stamps = clock.describe()["stamps"]["stamps_in_graphs"]["1"]
    order = random.Random(args.seed)
    times: dict[str, list[float]] = {"clean": [], "stamped": []}
    for _ in range(args.blocks * 5):
        names = ["clean", "stamped"]
        order.shuffle(names)
        for name in names:
            times[name].append(replay_us(clean if name == "clean" else full))
    each = [(b - a) / stamps for a, b in zip(times["clean"], times["stamped"], strict=True)]
    return {
        "kernels": kernels,
        "stamps": stamps,
        "clean_replay": median_interval(times["clean"]),
        "stamped_replay": median_interval(times["stamped"]),
        "per_stamp": median_interval(each),
    }


def point(clock: DeviceClock) -> Callable[[Call], Any]:
    """A stamped point's call."""
    begin, end = clock.pair(POINT, time.perf_counter_ns, end_span, stamp=True)
    return lambda function: end(begin(), function(), POINT)


def replay_us(graph: Any, times: int = 5) -> float:
    """Device time of a replay, us: a few in a row between two events."""
    first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    first.record()
    for _ in range(times):
        graph.replay()
    second.record()
    torch.cuda.synchronize()
    return float(1e3 * first.elapsed_time(second) / times)


# -- words ------------------------------------------------------------------------------------------------------------


def median_interval(values: list[float]) -> dict[str, Any]:
    """The median with the order statistics that hold it with 95 % (Conover, Nonparametric Statistics, 3.2)."""
    x = sorted(values)
    half = 1.96 * math.sqrt(len(x)) / 2
    low = max(0, math.floor(len(x) / 2 - half) - 1)
    high = min(len(x) - 1, math.ceil(len(x) / 2 + half))
    return {"low": x[low], "median": statistics.median(x), "high": x[high], "n": len(x)}


def machine() -> dict[str, Any]:
    """Where it was measured."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
    }


if __name__ == "__main__":
    main()
