"""From rings to a Trace: cycles, and for each cycle the self time and calls of every named point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.errors import SpecmeterError
from specmeter.runtime import layout
from specmeter.trace.by_cycle import SpanColumns, columns_of, steps_of, total_of
from specmeter.trace.cycles import CycleSources, CycleTable, build_cycles
from specmeter.trace.host_clock import HostClock, host_clocks
from specmeter.trace.joining import Process, distinct_ranks, masters_of, pairs_of
from specmeter.trace.marks import change_us, missing, sampling_marks
from specmeter.trace.merge import merge
from specmeter.trace.plan import CYCLE, OVERLAPPED, PlanIndex, index_plan
from specmeter.trace.regular import read_regular
from specmeter.trace.requests import Request
from specmeter.trace.ring import Ring, read_ring
from specmeter.trace.spans import lane_spans
from specmeter.trace.strict_json import parse_json
from specmeter.trace.values import read_values


@dataclass(frozen=True)
class RankTrace:
    """One rank's cycles and what they were spent on.

    ``self_ns`` and ``calls`` have the shape (cycles, names of the plan); ``outside_ns`` likewise, for work that ran
    beside the cycle (other threads, overlapped points). ``steps_ns`` gives, for each name that is called in a loop, an
    array (cycles, calls in a cycle). ``self_ns`` sums to the cycle's duration less what no span covered. ``world`` is
    how many ranks there are as the process says (-1: it does not), ``overwritten`` how many of its records are lost;
    ``change_us`` is the median time that putting the probes in or out took, where they were drawn at random.
    ``steps_beyond`` calls in loops are in no column of ``steps_ns``, which has a bounded width.
    """

    host: str
    pid: int
    rank: int
    cycles: CycleTable
    self_ns: NDArray[np.float64]
    calls: NDArray[np.int32]
    outside_ns: NDArray[np.float64]
    steps_ns: dict[str, NDArray[np.float64]]
    spans: tuple[SpanColumns, ...]
    world: int = -1
    overwritten: int = 0
    change_us: float = 0.0
    steps_beyond: int = 0


@dataclass(frozen=True)
class Trace:
    """A recording: the plan, the requests, each rank's cycles, the leading rank first, and each host's clock.

    ``warnings`` are sentences on what of the recording could not be told apart or joined.
    """

    plan: Mapping[str, Any]
    index: PlanIndex
    requests: tuple[Request, ...]
    ranks: tuple[RankTrace, ...]
    records: int
    overwritten: int
    holes: int
    clocks: Mapping[str, HostClock] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def main(self) -> RankTrace:
        """The rank that the report shows: the lowest one."""
        return self.ranks[0]


def load_link(link_dir: Path, requests: Sequence[Request] = ()) -> Trace:
    """Read the plan and every ring of a link directory. Raises SpecmeterError when nothing was recorded."""
    path = link_dir / "plan.json"
    try:
        plan = parse_json(read_regular(path))
    except (OSError, ValueError) as error:
        raise SpecmeterError(f"The plan {path} cannot be read", str(error)) from error
    return load_rings(sorted(link_dir.glob("*.ring")), plan, requests)


def load_rings(rings: Sequence[Path], plan: Mapping[str, Any], requests: Sequence[Request] = ()) -> Trace:
    """Read rings and reduce them to cycles and phases.

    ``requests`` must carry times of the same machine's perf_counter. Raises SpecmeterError when a ring is damaged or
    no cycle was recorded. Ranks that share a number get numbers of their own, and ``warnings`` say so.
    """
    return _numbered(build_trace([read_ring(path) for path in rings], plan, requests))


def build_trace(
    read: Sequence[Ring], plan: Mapping[str, Any], requests: Sequence[Request] = (), index: PlanIndex | None = None
) -> Trace:
    """As ``load_rings``, from rings or parts of rings that were read already; ``index`` saves indexing the plan."""
    index = index_plan(plan) if index is None else index
    processes = [Process(ring, lane_spans(ring, index)) for ring in read if len(ring.records)]
    masters, followers = masters_of(processes, index)
    if not masters:
        raise SpecmeterError(
            "No cycle was recorded",
            f"{len(read)} ring files hold {sum(len(r.records) for r in read)} records, none of the plan's cycle point.",
            "Check with `specmeter status` that the probes were armed while requests ran.",
        )
    pairs, warnings = pairs_of(masters, followers)
    ranks = [_rank(*pair, index, requests) for pair in pairs]
    ranks.sort(key=_order)
    warnings += [note for rank in ranks if (note := _beyond(rank))]
    return Trace(
        plan, index, tuple(requests), tuple(ranks), sum(len(r.records) for r in read),
        sum(r.overwritten for r in read), sum(r.holes for r in read), host_clocks(r.header for r in read),
        tuple(warnings),
    )  # fmt: skip


def _order(rank: RankTrace) -> tuple[bool, int, int]:
    return rank.rank < 0, rank.rank, -len(rank.cycles)


def _numbered(trace: Trace) -> Trace:
    """The trace with a number of its own for each rank: tables and reports tell ranks by it."""
    numbers, warnings = distinct_ranks([(rank.host, _pid(rank), rank.rank) for rank in trace.ranks])
    if not warnings:
        return trace
    ranks = [replace(rank, rank=number) for rank, number in zip(trace.ranks, numbers, strict=True)]
    return replace(trace, ranks=tuple(sorted(ranks, key=_order)), warnings=(*trace.warnings, *warnings))


def _pid(rank: RankTrace) -> int:
    """The process that the rank is known by: the worker's, where an engine core leads it."""
    return next((spans.pid for spans in rank.spans if spans.pid != rank.pid), rank.pid)


def _beyond(rank: RankTrace) -> str:
    if not rank.steps_beyond:
        return ""
    shown = max(steps.shape[1] for steps in rank.steps_ns.values())
    return (
        f"rank {rank.rank} on {rank.host}: of the draft steps the first {shown:,} of a cycle are shown; the time of "
        f"{rank.steps_beyond} calls after them is in the phases alone"
    )


def _rank(master: Process, worker: Process | None, index: PlanIndex, requests: Sequence[Request]) -> RankTrace:
    spans = master.spans
    at = np.flatnonzero(spans.role == CYCLE)
    order = np.argsort(spans.t0[at], kind="stable")
    starts = spans.t0[at][order]
    ends = starts + spans.dur[at][order]
    cycles = build_cycles(_sources(master, worker, starts, ends, index), index, requests)
    if worker is None:
        parts = [(master, spans, spans.self_ns(), spans.role != OVERLAPPED)]
    else:
        core_self, worker_self, counted = merge(spans, worker.spans)
        parts = [(master, spans, core_self, spans.role != OVERLAPPED), (worker, worker.spans, worker_self, counted)]
    columns = [columns_of(*part, starts, index) for part in parts]
    beside = [
        columns_of(p, lane, lane.self_ns(), np.zeros(len(lane), bool), starts, index)
        for p in (master, worker) if p is not None
        for number, lane in p.lanes.items() if number != p.main
    ]  # fmt: skip
    shape = (len(starts), len(index.names))
    taken = {name: steps_of(columns, i, len(starts)) for i, name in enumerate(index.names) if index.loops[i]}
    header = master.ring.header
    return RankTrace(
        header.host, header.pid, worker.ring.header.rank if worker else header.rank, cycles,
        total_of([(c, c.self_ns, c.inside) for c in columns], shape),
        total_of([(c, None, c.inside) for c in columns], shape).astype(np.int32),
        total_of([(c, c.self_ns, ~c.inside) for c in [*columns, *beside]], shape),
        {name: steps for name, (steps, _beyond) in taken.items() if steps.shape[1]},
        (*columns, *beside), max(header.world, worker.ring.header.world if worker else -1),
        master.ring.overwritten + (worker.ring.overwritten if worker else 0),
        max(change_us(p.ring) for p in (master, worker) if p is not None),
        sum(beyond for _steps_ns, beyond in taken.values()),
    )  # fmt: skip


def _sources(
    master: Process, worker: Process | None, starts: NDArray[np.int64], ends: NDArray[np.int64], index: PlanIndex
) -> CycleSources:
    values = read_values([master.ring], index)
    if worker is not None:
        # The worker repeats some of the core's values; only those that the core does not have are taken from it.
        own = {name for name in values.names if len(values.pick(name))}
        values = read_values([master.ring, worker.ring], index, skip_after_first=own)
    rings = [master.ring] if worker is None else [master.ring, worker.ring]
    none = np.zeros((0, 2), np.int64)
    return CycleSources(
        starts, ends, values, np.concatenate([_prefill_times(r, index) for r in rings]),
        sampling_marks(master.ring), none if worker is None else sampling_marks(worker.ring),
        np.concatenate([missing(ring) for ring in rings]),
    )  # fmt: skip


def _prefill_times(ring: Ring, index: PlanIndex) -> NDArray[np.int64]:
    names = [i for i, name in enumerate(index.names) if name.startswith("prefill")]
    if not names:
        return np.zeros(0, np.int64)
    ids = np.isin(index.name_of, names)
    records = ring.records
    found = ids[records["point"]] & ((records["kind"] == layout.KIND_HOST_SPAN) | (records["kind"] == layout.KIND_MARK))
    return np.ascontiguousarray(records["t0"][found])
