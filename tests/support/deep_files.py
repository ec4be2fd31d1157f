"""Windows as the runtime and torch's profiler leave them in a link, made from a played window whose truth is known."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specmeter.runtime import layout
from specmeter.trace.deep_synthetic import Call, Kernel, build_window
from specmeter.trace.deep_window import KERNEL, MEMCPY, MEMSET, DeepWindow
from specmeter.trace.synthetic import make_plan, make_records, write_ring

PID, START, IDENT, NATIVE, OURS = 4242, 1, 0x7F12_8741_5140, 4243, 4300
# The pthread's lower 32 bits as a signed number without its sign: what is recorded of a thread that torch has not met.
RECORDED = (1 << 32) - (IDENT & 0xFFFFFFFF)
CYCLE, VERIFY, DRAFT, SAMPLE = 1, 2, 3, 4
POINTS = [("cycle", "cycle", "none"), ("verify.forward", "leaf", "none"), ("draft.graph", "leaf", "none"),
          ("accept.sample", "leaf", "none")]  # fmt: skip
UNIX = 1_790_000_000_123_456_789  # what to add to perf_counter for the calendar
_CATEGORIES = {KERNEL: "kernel", MEMCPY: "gpu_memcpy", MEMSET: "gpu_memset"}
Event = dict[str, Any]

GRAPH = tuple(Kernel(name, 5_000) for name in ["fill", *["gemm", "relu", "copy"] * 3, "argmax"])
USUAL = (
    Call(DRAFT, GRAPH, host_ns=3_000, graph=True),
    Call(VERIFY, (Kernel("gemm", 40_000), Kernel("softmax", 7_000)), host_ns=2_000),
    Call(SAMPLE, (Kernel("Memcpy DtoH", 1_500, kind=MEMCPY, bytes=4),), sync="cudaStreamSynchronize"),
)


@dataclass
class Files:
    """A link with one window: what was played, the profiler's events and the runtime's words, to be changed at will."""

    folder: Path
    truth: DeepWindow
    events: list[Event]
    meta: dict[str, Any]
    base_ns: int
    rows: list[tuple[int, ...]] = field(default_factory=list)

    def write(self, text: Callable[[str], str] = lambda text: text) -> Path:
        """Write plan, ring, report, profile and meta; gives the folder."""
        deep = self.folder / "deep"
        deep.mkdir(parents=True, exist_ok=True)
        (self.folder / "plan.json").write_text(json.dumps(make_plan(POINTS)))
        write_ring(self.folder / f"{PID}-{START}.ring", make_records(self.rows), pid=PID)  # type: ignore[arg-type]
        lanes = [{"lane": 0, "ident": IDENT, "native_id": NATIVE, "name": "MainThread"}]
        (self.folder / f"{PID}-{START}.json").write_text(json.dumps({"lanes": lanes}))
        document = {"schemaVersion": 1, "baseTimeNanoseconds": self.base_ns, "traceEvents": self.events}
        (deep / f"{PID}-{START}-7.json").write_text(text(json.dumps(document)))
        (deep / f"{PID}-{START}-7.meta.json").write_text(json.dumps(self.meta))
        return self.folder


def played(
    folder: Path,
    count: int = 6,
    calls: Sequence[Call] = USUAL,
    drift_ppm: float = 0.0,
    device_ahead_ns: int = 0,
    thread: int = RECORDED,
    wanted: int | None = None,
) -> Files:
    """Play cycles, and write down what probes, runtime and profiler would have seen of them.

    The profiler's clock is the calendar's, faster by ``drift_ppm``; the device's is ``device_ahead_ns`` early.
    """
    truth = build_window([calls] * count, pid=PID, begin_ns=5_000_000_000)
    begin = truth.begin_ns

    def profiler(time_ns: int) -> int:
        return time_ns + UNIX + round((time_ns - begin) * drift_ppm / 1e6)

    base = (UNIX + begin) // 1_000_000_000 * 1_000_000_000
    events: list[Event] = []

    def event(category: str, name: str, t0: int, dur: int, tid: int, **args: Any) -> None:
        ts = (profiler(t0) - base) / 1000
        events.append(
            {
                "ph": "X",
                "cat": category,
                "name": name,
                "pid": PID,
                "tid": tid,
                "ts": ts,
                "dur": dur / 1000,
                "args": args,
            }
        )

    _launches(truth, event, thread, device_ahead_ns)
    marks = {}
    for when, at in (("start", begin - 200_000), ("stop", truth.end_ns + 50_000)):
        # The call lies somewhere in its bracket, and the brackets are of several lengths.
        marks[when] = [[at + 10_000 * i, at + 10_000 * i + 900 + 300 * i] for i in range(5)]
        for i, (before, after) in enumerate(marks[when]):
            event(
                "cuda_runtime",
                "cudaStreamIsCapturing",
                before + 100 + 40 * i,
                (after - before) // 3,
                OURS,
                correlation=0,
            )
    meta = {
        "format": 1, "id": 7, "label": "k=3", "pid": PID, "start": START, "host": "host", "boot_id": "boot", "rank": 0,
        "activity": "cuda", "torch": "2.11.0", "mark_name": "cudaStreamIsCapturing", "first_cycle": 1,
        "cycles": wanted or count, "thread": 0x7000_0000_0001, "native_thread": OURS, "device": "Synthetic device",
        "start_marks": marks["start"], "stop_marks": marks["stop"], "complete": True,
        "start_pairs": [[begin - 300_000, begin - 299_950 + UNIX, begin - 299_900]],
        "stop_pairs": [[truth.end_ns + 90_000, truth.end_ns + 90_040 + UNIX, truth.end_ns + 90_100]],
        "begin_ns": begin - 1_000, "end_ns": truth.end_ns + 20_000,
        "prepare_ns": [begin - 9_000_000, begin - 500_000], "start_ns": [begin - 250_000, begin - 210_000],
        "stop_ns": [truth.end_ns + 60_000, truth.end_ns + 99_000],
        "export_ns": [truth.end_ns + 200_000, truth.end_ns + 300_000],
    }  # fmt: skip
    return Files(folder, truth, events, meta, base, _spans(calls, count, begin, truth))


def _launches(truth: DeepWindow, event: Callable[..., None], thread: int, ahead: int) -> None:
    kernels = truth.kernels
    rows = zip(
        *(
            kernels[key].tolist()
            for key in ("name", "kind", "stream", "t0_ns", "dur_ns", "launch_ns", "graph", "bytes")
        ),
        strict=True,
    )
    seen: dict[tuple[int, int], int] = {}
    for name, kind, stream, t0, dur, launch, graph, size in rows:
        key = (launch, graph)
        if key not in seen:
            seen[key] = 100 + len(seen)
            call = "cudaGraphLaunch" if graph >= 0 else ("cudaMemcpyAsync" if kind == MEMCPY else "cudaLaunchKernel")
            event("cuda_runtime", call, launch, 4_000, thread, correlation=seen[key], cbid=211)
        args = {"correlation": seen[key], "stream": stream, "device": 0, "context": 1}
        if size >= 0:
            args["bytes"] = size
        event(_CATEGORIES[kind], truth.names[name], t0 - ahead, dur, stream, **args)
    for name, t0, dur in zip(*(truth.syncs[key].tolist() for key in ("name", "t0_ns", "dur_ns")), strict=True):
        event("cuda_runtime", truth.sync_names[name], t0, dur, thread, correlation=0)


def _spans(calls: Sequence[Call], count: int, begin: int, truth: DeepWindow) -> list[tuple[int, ...]]:
    """Ring rows: each call's span around what it launches, each cycle's around its calls."""
    rows: list[tuple[int, ...]] = []
    kernels, syncs = truth.kernels, truth.syncs
    end = begin
    for cycle in range(1, count + 1):
        start = end
        for call in calls:
            ours = (kernels["cycle"] == cycle) & (kernels["point"] == call.point)
            last = int((kernels["launch_ns"] + 4_000)[ours].max(initial=end + call.host_ns))
            waits = (syncs["cycle"] == cycle) & (syncs["point"] == call.point)
            last = max(last, int((syncs["t0_ns"] + syncs["dur_ns"])[waits].max(initial=0)))
            if call.point != CYCLE:  # what the cycle itself launches lies between the spans of its points
                rows.append((end, last - 1, cycle, call.point, layout.KIND_HOST_SPAN, 0, 0))
            end = last
        rows.append((start, end - 1, cycle, CYCLE, layout.KIND_HOST_SPAN, 0, 0))
    rows.append((end, end + 1, count + 1, CYCLE, layout.KIND_HOST_SPAN, 0, 0))
    return rows


def same(window: DeepWindow, truth: DeepWindow, column: str) -> bool:
    """Whether a column of the kernels is the truth's, entry by entry."""
    return bool(np.array_equal(window.kernels[column], truth.kernels[column]))
