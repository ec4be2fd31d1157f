"""Builds deep windows with known contents, for tests; nothing of a measurement uses it.

A cycle is a list of ``Call``: a host call of one point that launches kernels, which the streams then run in order.
``build_window`` plays it as a host and a device would: the host goes ahead, a stream starts a kernel when it has been
launched and the one before it has ended. So idle, overlap and run-ahead follow from the host's and kernels' times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specmeter.trace.deep_window import KERNEL, MEMCPY, DeepWindow, kernel_columns, sync_columns

LAUNCH_NS = 4_000
LATENCY_NS = 2_000


@dataclass(frozen=True)
class Kernel:
    """A kernel of ``dur_ns`` on ``stream``; a copy where ``bytes`` is set and ``kind`` MEMCPY.

    ``until_ns`` holds a collective until that moment (the other ranks' arrival): it ends then or after ``dur_ns``,
    whichever is later.
    """

    name: str
    dur_ns: int
    stream: int = 7
    kind: int = KERNEL
    bytes: int = -1
    until_ns: int = -1


@dataclass(frozen=True)
class Call:
    """A host call of ``host_ns`` in the point ``point`` (a plan's id, -1: none), which launches ``kernels``.

    ``graph``: one call launches all of them as a replay; otherwise a call of LAUNCH_NS each, and ``host_ns`` passes
    before the first. ``sync``: afterwards the host waits until every stream has run dry, in a call of that name.
    """

    point: int
    kernels: tuple[Kernel, ...] = ()
    host_ns: int = 0
    graph: bool = False
    sync: str = ""


@dataclass
class _Play:
    """Host and streams at one moment, and what they have done."""

    now: int
    free: dict[int, int] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    waits: list[dict[str, Any]] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    sync_names: dict[str, int] = field(default_factory=dict)
    replay: int = 0

    def call(self, call: Call, cycle: int) -> None:
        self.now += call.host_ns
        if call.graph and call.kernels:
            self.replay += 1
            for kernel in call.kernels:
                self.launch(kernel, call.point, cycle, self.now, self.replay)
            self.now += LAUNCH_NS
        else:
            for kernel in call.kernels:
                self.launch(kernel, call.point, cycle, self.now, -1)
                self.now += LAUNCH_NS
        if call.sync:
            until = max([self.now, *self.free.values()])
            name = self.sync_names.setdefault(call.sync, len(self.sync_names))
            wait = {"t0_ns": self.now, "dur_ns": until - self.now, "name": name, "thread": 1}
            self.waits.append({**wait, "cycle": cycle, "point": call.point})
            self.now = until

    def launch(self, kernel: Kernel, point: int, cycle: int, at: int, replay: int) -> None:
        begin = max(at + LATENCY_NS, self.free.get(kernel.stream, 0))
        end = max(begin + kernel.dur_ns, kernel.until_ns)
        self.free[kernel.stream] = end
        name = self.names.setdefault(kernel.name, len(self.names))
        row = {"name": name, "kind": kernel.kind, "stream": kernel.stream, "t0_ns": begin, "dur_ns": end - begin}
        launch = {"launch_ns": at, "launch_dur_ns": LAUNCH_NS, "graph_launch": replay >= 0, "graph": replay}
        self.rows.append({**row, **launch, "bytes": kernel.bytes, "cycle": cycle, "point": point})


def build_window(
    cycles: Sequence[Sequence[Call]],
    *,
    first_cycle: int = 1,
    begin_ns: int = 1_000_000_000,
    pid: int = 1,
    rank: int = 0,
    host: str = "host",
    device: str = "Synthetic device",
    cost: dict[str, Any] | None = None,
) -> DeepWindow:
    """Play the cycles one after another and give the window that the profiler would have shown."""
    play = _Play(begin_ns)
    for number, calls in enumerate(cycles):
        for call in calls:
            play.call(call, first_cycle + number)
    end = max([play.now, *play.free.values()])
    rows = {key: [row[key] for row in play.rows] for key in (play.rows[0] if play.rows else {"t0_ns": 0})}
    waits = {key: [row[key] for row in play.waits] for key in (play.waits[0] if play.waits else {"t0_ns": 0})}
    return DeepWindow(
        pid, host, rank, device, begin_ns, end, (first_cycle, first_cycle + len(cycles) - 1), tuple(play.names),
        kernel_columns(**rows), sync_columns(**waits), tuple(play.sync_names), cost or {},
    )  # fmt: skip


def copy_kernel(bytes: int, dur_ns: int, stream: int = 7, name: str = "Memcpy DtoH (Device -> Pinned)") -> Kernel:
    """A copy."""
    return Kernel(name, dur_ns, stream, MEMCPY, bytes)
