"""Where a cycle's time goes: each named point, each phase, frames between them, and what nothing covers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.trace.build import RankTrace
from specmeter.trace.cycles import DECODE, KEPT
from specmeter.trace.plan import CYCLE, LEAF, PHASES, SPAN, WAIT, PlanIndex, phase_of


@dataclass(frozen=True)
class Row:
    """One line of the table: mean ms a cycle, percent of the cycle, calls a cycle, and p50 and p95 over cycles (ms)."""

    name: str
    phase: str
    role: str
    ms: float
    percent: float
    calls: float
    p50_ms: float
    p95_ms: float


@dataclass(frozen=True)
class Step:
    """One draft step: mean ms over the cycles that made it, and how many did. Step 1 is made by the extend phase."""

    step: int
    ms: float
    cycles: int
    parts_ms: dict[str, float]


@dataclass(frozen=True)
class Breakdown:
    """The mean cycle, in ms; leaf, glue and unattributed percent add up to 100.

    ``rows`` are the leaves and waits, ``frames`` the self time of spans around them (the glue), ``beside`` work on
    other threads or overlapped points, which is not part of the sum.
    """

    cycles: int
    cycle_ms: float
    p50_ms: float
    p95_ms: float
    phases: tuple[Row, ...]
    rows: tuple[Row, ...]
    frames: tuple[Row, ...]
    steps: tuple[Step, ...]
    beside: tuple[Row, ...]
    leaf_percent: float
    wait_percent: float
    glue_percent: float
    unattributed_percent: float


def select(rank: RankTrace, requests: NDArray[np.bool_] | None = None, kind: int = DECODE) -> NDArray[np.bool_]:
    """Which cycles the averages are over: kept, of one kind, and, where given, of the requests under the mask."""
    table = rank.cycles
    keep: NDArray[np.bool_] = (table.drop == KEPT) & (table.kind == kind)
    if requests is not None and len(requests):
        keep &= (table.request >= 0) & requests[table.request]
    return keep


def breakdown(rank: RankTrace, index: PlanIndex, chosen: NDArray[np.bool_] | None = None) -> Breakdown:
    """The mean cycle over the ``chosen`` cycles (default: all kept decode cycles) that ran with probes in."""
    table = rank.cycles
    keep = (select(rank) if chosen is None else chosen) & (table.probed == 1)
    at = np.flatnonzero(keep)
    dur = table.dur_ns[at] / 1e6
    count = len(at)
    total = float(dur.mean()) if count else 0.0
    own = rank.self_ns[at] / 1e6
    calls = rank.calls[at]
    leaves = [i for i in index.with_role(LEAF, WAIT) if count and calls[:, i].any()]
    frames = [i for i in index.with_role(SPAN, CYCLE) if count and calls[:, i].any()]
    rows = tuple(_row(index, i, own[:, i], calls[:, i], total) for i in leaves)
    phases = []
    for phase in PHASES:
        of = [i for i in leaves if phase_of(index.names[i]) == phase]
        if of:
            phases.append(_summed(phase, own[:, of], calls[:, of], total))
    glue = tuple(_row(index, i, own[:, i], calls[:, i], total) for i in frames)
    outside = rank.outside_ns[at] / 1e6
    beside = tuple(
        _row(index, i, outside[:, i], np.zeros(count), total)
        for i, name in enumerate(index.names) if count and outside[:, i].any()
    )  # fmt: skip
    leaf, wait = sum(r.percent for r in rows), sum(r.percent for r in rows if r.role == "wait")
    frame = sum(r.percent for r in glue)
    p50, p95 = np.percentile(dur, [50, 95]).tolist() if count else (0.0, 0.0)
    return Breakdown(
        count, total, p50, p95, tuple(phases), rows, glue, _steps(rank, at), beside,
        leaf, wait, frame, 100 - leaf - frame if count else 0.0,
    )  # fmt: skip


def _row(index: PlanIndex, i: int, own: NDArray[np.float64], calls: NDArray[Any], total: float) -> Row:
    role = ("cycle", "leaf", "span", "mark", "wait", "overlapped")[index.roles[i]]
    p50, p95 = np.percentile(own, [50, 95]).tolist()
    ms = float(own.mean())
    return Row(index.names[i], phase_of(index.names[i]), role, ms, 100 * ms / total, float(np.mean(calls)), p50, p95)


def _summed(phase: str, own: NDArray[np.float64], calls: NDArray[np.int32], total: float) -> Row:
    each = own.sum(axis=1)
    p50, p95 = np.percentile(each, [50, 95]).tolist()
    ms = float(each.mean())
    return Row(phase, phase, "phase", ms, 100 * ms / total, float(calls.sum(axis=1).mean()), p50, p95)


def _steps(rank: RankTrace, at: NDArray[np.int64]) -> tuple[Step, ...]:
    width = max((steps.shape[1] for steps in rank.steps_ns.values()), default=0)
    found = []
    for step in range(width):
        parts, made = {}, np.zeros(len(at), bool)
        for name, steps in rank.steps_ns.items():
            if step < steps.shape[1]:
                ran = steps[at, step] > 0
                made |= ran
                if ran.any():
                    parts[name] = float(steps[at, step][ran].mean() / 1e6)
        if parts:
            found.append(Step(step + 2, sum(parts.values()), int(made.sum()), parts))
    return tuple(found)
