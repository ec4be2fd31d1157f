"""A GPU in virtual time: streams, events, graphs, a driver and a ``torch`` that follow the real interfaces.

The host's clock goes on by ``tick_ns`` at each look at it and at each launch; the device runs what was launched in each
stream's order, as late as its work takes, on a clock of its own (``epoch``, ``drift``). What an operation does to
memory happens at its own virtual time, in order over all streams, so run-ahead, copies that overtake and rings that are
lapped come out as they do on the real thing. Nothing waits: asking an event moves the host's clock only.
"""

from __future__ import annotations

import contextlib
import heapq
import struct
import types
from collections.abc import Callable, Iterator
from typing import Any

from specmeter.runtime import device_ptx
from specmeter.runtime.device_stamps import END, FIRST, ROW

LATENCY_NS = 4_000
STAMP_NS = 1_000
Effect = Callable[[int], None]


class SimError(RuntimeError):
    """What the real driver or torch would raise."""


def failing(text: str) -> Callable[..., Any]:
    """A call of the driver or of torch that fails."""

    def call(*_arguments: Any, **_named: Any) -> Any:
        raise SimError(text)

    return call


class SimStream:
    """One stream: when it is free, and the capture under way on it."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.handle = sim.new_handle()
        self.free_at = 0
        self.captured: list[tuple[int, Effect]] | None = None
        self.destroyed = False
        sim.by_handle[self.handle] = self

    def push(self, length_ns: int, effect: Effect | None = None) -> int:
        """Launch something of that length; ``effect(device time at its end)``. Returns its end on the host's clock."""
        sim = self.sim
        sim.now += sim.tick_ns
        if self.destroyed:
            raise SimError("CUDA error: invalid resource handle")
        if self.captured is not None:
            self.captured.append((length_ns, effect or (lambda _t: None)))
            return 0
        begin = max(sim.now + LATENCY_NS, self.free_at)
        self.free_at = begin + length_ns
        if effect is not None:
            sim.at(self.free_at, effect)
        return self.free_at


class Sim:
    """The device and the host's clock. ``torch`` belongs into sys.modules, ``driver()`` is what StampRing takes."""

    def __init__(
        self, drift: float = 0.0, epoch: int = 1_790_000_000_000_000_000, step_ns: int = 32, making_ns: int = 0
    ) -> None:
        self.now = 1_000_000_000
        self.tick_ns = 100
        self.making_ns = making_ns  # what the first recording of an event takes the host
        self.drift, self.epoch, self.step_ns = drift, epoch, step_ns
        self.lost = False
        self.compiles = True
        self.graphs = self.events = 0  # of the driver's own, not given back yet
        self.by_handle: dict[int, SimStream] = {}
        self.memory: dict[int, bytearray] = {}
        self._handles = 0x7000
        self._effects: list[tuple[int, int, Effect]] = []
        self._count = 0
        self.default = SimStream(self)
        self.current = self.default
        self.capturing: list[SimStream] = []
        self.torch = _torch(self)

    # -- time -----------------------------------------------------------------------------------------------------

    def clock(self) -> int:
        """perf_counter_ns of the virtual host."""
        self.now += self.tick_ns
        self.run()
        return self.now

    def device_time(self, host_ns: int) -> int:
        """The device's clock at a time of the host's, in the device's steps."""
        exact = self.epoch + int(host_ns * (1 + self.drift))
        return exact - exact % self.step_ns

    def at(self, host_ns: int, effect: Effect) -> None:
        """Have ``effect`` happen then."""
        self._count += 1
        heapq.heappush(self._effects, (host_ns, self._count, effect))

    def run(self) -> None:
        """Let happen what lies before now."""
        while self._effects and self._effects[0][0] <= self.now:
            when, _, effect = heapq.heappop(self._effects)
            effect(self.device_time(when))

    def wait(self, ns: int | None = None) -> None:
        """The host sleeps, or until the device has nothing left to do."""
        self.now = self.now + ns if ns is not None else max(self.now, *(s.free_at for s in self.by_handle.values()))
        self.run()

    def new_handle(self) -> int:
        """A number that was no handle or address before, with room behind it."""
        self._handles += 1 << 24
        return self._handles

    def check(self) -> None:
        """Raise when the device is lost."""
        if self.lost:
            raise SimError("CUDA error: unspecified launch failure")

    # -- memory ---------------------------------------------------------------------------------------------------

    def find(self, address: int) -> tuple[bytearray, int]:
        """The block that an address lies in, and where in it."""
        for base, block in self.memory.items():
            if base <= address < base + len(block):
                return block, address - base
        raise SimError(f"an illegal memory access at {address:#x}")

    def add(self, address: int, size: int, by: int) -> int:
        """Atomic addition; the value before."""
        block, at = self.find(address)
        old = int.from_bytes(block[at : at + size], "little")
        block[at : at + size] = ((old + by) % (1 << 8 * size)).to_bytes(size, "little")
        return old

    # -- use ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def on(self, stream: SimStream) -> Iterator[None]:
        """The current stream meanwhile."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def kernel(self, length_ns: int) -> None:
        """Some work on the current stream."""
        self.check()
        self.current.push(length_ns)

    def driver(self) -> SimDriver:
        """The driver in the calling thread's context."""
        return SimDriver(self)


class SimDriver:
    """The calls of runtime.device_driver.Driver."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim

    def context(self) -> int:
        """Of the only device."""
        return 1

    def capability(self) -> int:
        """As of an H200."""
        return 90

    def module(self, image: bytes) -> str:
        """Takes PTX unless the simulated driver has no compiler; a cubin always."""
        if image.startswith(b".version") and not self.sim.compiles:
            raise SimError("cuModuleLoadData: CUDA_ERROR_JIT_COMPILER_NOT_FOUND (221)")
        return "module"

    def kernel(self, module: str, name: str) -> Callable[..., None]:
        """What the PTX does."""
        sim = self.sim
        what = {device_ptx.STAMP: _stamp, device_ptx.NOW: _now, device_ptx.TICKS: _ticks}[name]

        def launch(stream: int, *numbers: int) -> None:
            sim.check()
            assert len(numbers) == len(device_ptx.PARAMETERS[name])
            sim.by_handle[stream].push(STAMP_NS, lambda t: what(sim, t, *numbers))

        return launch

    def stream(self) -> int:
        """A stream of ours."""
        return SimStream(self.sim).handle

    def idle(self, stream: int) -> bool:
        """Whether the stream has nothing left."""
        self.sim.run()
        return self.sim.by_handle[stream].free_at <= self.sim.now

    def memory(self, size: int) -> int:
        """Device memory, of whatever was there before."""
        address = self.sim.new_handle()
        self.sim.memory[address] = bytearray(b"\xa5" * size)
        return address

    def host_memory(self, size: int) -> Any:
        """Pinned memory."""
        address = self.memory(size)
        return types.SimpleNamespace(address=address, device=address, view=memoryview(self.sim.memory[address]))

    def clear(self, address: int, size: int, stream: int) -> None:
        """Zeros, by the stream."""
        block, at = self.sim.find(address)

        def zero(_t: int) -> None:
            block[at : at + size] = bytes(size)

        self.sim.by_handle[stream].push(500, zero)

    def copy(self, to: int, at: int, size: int, stream: int) -> None:
        """A copy to the host, by the stream."""
        self.sim.check()
        source, begin = self.sim.find(at)
        target, place = self.sim.find(to)

        def copied(_t: int) -> None:
            target[place : place + size] = source[begin : begin + size]

        self.sim.by_handle[stream].push(2_000 + size // 50, copied)  # 50 GB/s

    def event(self) -> list[int]:
        """An event: when it is passed."""
        return [0]

    def record(self, event: list[int], stream: int) -> None:
        """Record it."""
        event[0] = self.sim.by_handle[stream].push(0)

    def done(self, event: list[int]) -> bool:
        """Whether it is passed."""
        self.sim.check()
        self.sim.now += self.sim.tick_ns
        self.sim.run()
        return event[0] <= self.sim.now

    def begin_capture(self, stream: int) -> None:
        """Launches on the stream are kept from now on."""
        self.sim.by_handle[stream].captured = []

    def end_capture(self, stream: int) -> Any:
        """What was kept."""
        nodes, self.sim.by_handle[stream].captured = self.sim.by_handle[stream].captured, None
        return nodes

    def made_graph(self, graph: Any) -> Any:
        """Ready to be launched."""
        self.sim.graphs += 1
        return graph

    def launch_graph(self, graph: Any, stream: int) -> None:
        """All of its nodes, in order."""
        self.sim.check()
        for length, effect in graph:
            self.sim.by_handle[stream].push(length, effect)

    def free_graph(self, graph: Any) -> None:
        """Give it back; one that still runs must not be."""
        self.sim.graphs -= 1

    def timed_event(self) -> list[int]:
        """An event that keeps its time."""
        self.sim.events += 1
        return [0]

    def elapsed_ns(self, first: list[int], second: list[int]) -> float:
        """Between two events that are passed."""
        assert max(first[0], second[0]) <= self.sim.now
        return float(self.sim.device_time(second[0]) - self.sim.device_time(first[0]))

    def free_event(self, _event: list[int]) -> None:
        """Give it back."""
        self.sim.events -= 1

    def relaxed(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to spoil here."""
        return contextlib.nullcontext()


def _stamp(
    sim: Sim, t: int, counter: int, rows: int, replays: int, mask: int, number: int, what: int, who: int
) -> None:
    if replays:
        if what & FIRST:
            number = sim.add(replays, 4, 1) + 1
        else:
            number = sim.add(replays, 4, 0)
    seq = sim.add(counter, 8, 1)
    block, at = sim.find(rows)
    mark = (seq + 1) % (1 << 32)
    begun = t if not what & END else t - STAMP_NS // sim.step_ns * sim.step_ns
    ROW.pack_into(block, at + (seq & mask) * ROW.size, begun, mark, what, number, who, mark, 0)


def _now(sim: Sim, t: int, out: int) -> None:
    block, at = sim.find(out)
    struct.pack_into("<Q", block, at, t)


def _ticks(sim: Sim, _t: int, out: int) -> None:
    block, at = sim.find(out)
    struct.pack_into("<Q", block, at, sim.step_ns)


class SimEvent:
    """torch.cuda.Event (and of npu and xpu): record, query, elapsed_time in milliseconds with a float's 24 bits."""

    def __init__(self, sim: Sim, enable_timing: bool = False) -> None:
        self.sim, self.timing = sim, enable_timing
        self.end: int | None = None
        self.recorded = 0

    def record(self, stream: SimStream | None = None) -> None:
        """On the stream, or the current one."""
        self.sim.check()
        to = stream or self.sim.current
        if to.captured is not None:
            raise SimError("an event in a capture has no time")
        self.sim.now += 0 if self.recorded else self.sim.making_ns
        self.end = to.push(0)
        self.recorded += 1

    def query(self) -> bool:
        """Whether the device has passed it."""
        self.sim.check()
        self.sim.now += self.sim.tick_ns
        self.sim.run()
        return self.end is None or self.end <= self.sim.now

    def elapsed_time(self, other: SimEvent) -> float:
        """Milliseconds from this event to the other."""
        assert self.timing and other.timing
        if self.end is None or other.end is None or max(self.end, other.end) > self.sim.now:
            raise SimError("both events must be completed before calculating elapsed time")
        exact = (other.end - self.end) * (1 + self.sim.drift) / 1e6
        return float(struct.unpack("f", struct.pack("f", exact))[0])


def _torch(sim: Sim, name: str = "cuda", hip: str | None = None) -> Any:
    class Graph:
        """torch.cuda.CUDAGraph: capture, replay."""

        nodes: list[tuple[int, Effect]]

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
            sim.check()
            sim.current.captured = self.nodes = []

        def capture_end(self) -> None:
            sim.current.captured = None

        def replay(self) -> None:
            sim.check()
            for length, effect in self.nodes:
                sim.current.push(length, effect)

    def event(enable_timing: bool = False) -> SimEvent:
        return SimEvent(sim, enable_timing)

    @contextlib.contextmanager
    def capture(graph: Graph, stream: SimStream | None = None) -> Iterator[None]:
        with sim.on(stream or SimStream(sim)):
            graph.capture_begin()
            try:
                yield
            finally:
                graph.capture_end()

    module = types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        Event=event,
        Stream=lambda: SimStream(sim),
        ExternalStream=lambda handle: sim.by_handle[handle],
        current_stream=lambda: sim.current,
        is_current_stream_capturing=lambda: sim.current.captured is not None,
        CUDAGraph=Graph,
        graph=capture,
    )
    private = types.SimpleNamespace(
        _cuda_getCurrentRawStream=lambda _device: sim.current.handle,
        _cuda_getDevice=lambda: 0,
        _cuda_isCurrentStreamCapturing=module.is_current_stream_capturing,
        _CudaEventBase=SimEvent,
    )
    torch = types.SimpleNamespace(
        __file__=__file__, version=types.SimpleNamespace(hip=hip), _C=private if name == "cuda" else None
    )
    setattr(torch, name, module)
    return torch


def other_torch(sim: Sim, name: str) -> Any:
    """A torch whose only device is ``npu`` or ``xpu``, or ROCm's ``cuda`` for ``rocm``."""
    if name == "rocm":
        return _torch(sim, "cuda", hip="6.4")
    torch = _torch(sim, name)
    module = getattr(torch, name)
    for missing in ("CUDAGraph", "graph", "ExternalStream"):
        delattr(module, missing)
    return torch
