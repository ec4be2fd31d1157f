"""Deep windows with the trace that goes with them: the host of ``trace.deep_synthetic`` also leaves its spans in a
ring."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specmeter.runtime import layout
from specmeter.trace import Trace, load_rings
from specmeter.trace.deep_synthetic import LAUNCH_NS, Call, build_window
from specmeter.trace.deep_window import DeepWindow
from specmeter.trace.synthetic import make_plan, make_records, write_ring

SPAN, VALUE = layout.KIND_HOST_SPAN, layout.KIND_VALUE
BEGIN = 1_000_000_000
POINTS = (
    ("cycle", "cycle", "none"),
    ("verify.forward", "leaf", "none"),
    ("draft.graph", "leaf", "none"),
    ("accept.sample", "leaf", "none"),
    ("extend.forward", "leaf", "none"),
    ("wait.copy", "wait", "none"),
    ("kv.meta", "leaf", "none"),
    ("target", "span", "none"),
    ("kv.schedule", "overlapped", "none"),
)
NAMES = {name: i + 1 for i, (name, _, _) in enumerate(POINTS)}
VALUES = ("batch", "steps", "drafted", "accepted")
PLAN = make_plan(POINTS, [f"cycle.{name}" for name in VALUES])
# A call of this point is the host between two cycles: it lies in no span.
BETWEEN = 0
Rows = list[tuple[int, ...]]


def on(point: str) -> int:
    """The plan's id of a point."""
    return NAMES[point]


def recorded(
    folder: Path,
    cycles: Sequence[Sequence[Call]],
    *,
    numbers: Sequence[tuple[int, int, int, int]] | None = None,
    plan: dict[str, Any] | None = None,
    rank: int = 0,
    pid: int = 1,
    **how: Any,
) -> tuple[Trace, DeepWindow]:
    """The window of these cycles, and its trace. One more cycle stands before and after: those never count.

    ``numbers`` are (batch, steps, drafted, accepted) of each cycle, (1, 3, 3, 1) by default.
    """
    played = [cycles[0], *cycles, cycles[-1]]
    window = build_window(played, begin_ns=BEGIN, pid=pid, rank=rank, **how)
    told = list(numbers or [(1, 3, 3, 1)] * len(cycles))
    rows = host_rows(played, window, [told[0], *told, told[-1]])
    folder.mkdir(exist_ok=True, parents=True)
    path = write_ring(folder / f"{pid}-1.ring", make_records(rows), pid=pid, rank=rank)  # type: ignore[arg-type]
    return load_rings([path], plan or PLAN), window


def host_rows(cycles: Sequence[Sequence[Call]], window: DeepWindow, numbers: Sequence[tuple[int, ...]]) -> Rows:
    """The records of the host that the window was played by."""
    waits = dict(zip(window.syncs["t0_ns"].tolist(), window.syncs["dur_ns"].tolist(), strict=True))
    rows: Rows = []
    now = window.begin_ns
    for number, calls in enumerate(cycles, 1):
        first, last = now, now
        for call in calls:
            start = now
            now += call.host_ns + LAUNCH_NS * (1 if call.graph and call.kernels else len(call.kernels))
            now += waits[now] if call.sync else 0
            if call.point > 0:
                rows.append((start, now, number, call.point, SPAN, 0, 0))
            last = last if call.point == BETWEEN else now
        rows.append((first, last, number, 1, SPAN, 0, 0))
        told = enumerate(numbers[number - 1], len(POINTS) + 1)
        rows += [(value, last - 1, number, identity, VALUE, 0, 0) for identity, value in told]
    return rows
