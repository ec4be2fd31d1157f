"""A deep window beside the trace of its process: each kernel's cycle, point, call and class, and the device's idle
gaps.

A kernel belongs to the cycle, the point and the call that launched it, however much later it ran. The device's time is
shared out without rest: each kernel gets what it adds to the union of those before it, and each gap in that union
belongs to the kernel that ends it, the one the device waited for. So phases of neighbouring cycles never mix, and the
parts of a cycle sum to its time on the device, also where the host is a cycle ahead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.analysis.host_line import HostLine, host_line, main_lane
from specmeter.analysis.intervals import Ints, fresh
from specmeter.analysis.kernel_classes import Patterns, classes_of, mark_lm_head
from specmeter.trace.build import RankTrace, Trace
from specmeter.trace.by_cycle import SpanColumns
from specmeter.trace.cycles import DECODE, KEPT, OUTSIDE, cycle_at
from specmeter.trace.deep import DeepWindow
from specmeter.trace.plan import LEAF, OVERLAPPED, WAIT, PlanIndex

Mask = NDArray[np.bool_]
NOWHERE = -1
# A clock error of so much says that it is not known.
UNKNOWN_NS = 1 << 60


@dataclass(frozen=True)
class Gaps:
    """Times in which nothing ran on the device, in order: ``begin``..``end`` ns, the kernel that ``ends`` each, and the
    kernel before it that ran longest (``after``)."""

    begin: Ints
    end: Ints
    ends: Ints
    after: Ints


@dataclass(frozen=True)
class Joined:
    """A window's kernels, in order of begin, beside its rank's trace.

    ``cycle`` is the row of the rank's cycle table by the launch's time (NOWHERE: not launched in one), ``name`` the
    launching point's index in the plan's names (NOWHERE: none), ``call`` numbers the host calls of named points
    (NOWHERE: none), ``kind`` the kernel's class; ``t0``, ``end`` and ``launched`` (the end of the launching call, -1:
    not seen) are ns of the host's clock. ``added`` is what each kernel adds to the time the device was busy.
    """

    window: DeepWindow
    rank: RankTrace
    index: PlanIndex
    lane: SpanColumns
    cycle: Ints
    name: Ints
    call: Ints
    kind: Ints
    t0: Ints
    end: Ints
    launched: Ints
    added: Ints
    gaps: Gaps
    line: HostLine

    @property
    def leaf(self) -> Mask:
        """Which kernels a named leaf phase launched; on the device also one that the host runs beside the cycle."""
        roles = np.array([*self.index.roles, 255])
        found: Mask = np.isin(roles[self.name], (LEAF, WAIT, OVERLAPPED))
        return found


def rank_of(trace: Trace, window: DeepWindow) -> RankTrace | None:
    """The rank whose process, or whose worker's process, the window is of; None where the trace has none."""
    mine = [r for r in trace.ranks if r.host == window.host or not window.host]
    return next((r for r in mine if any(lane.pid == window.pid for lane in r.spans)), None)


def join(trace: Trace, window: DeepWindow, patterns: Patterns | None = None) -> Joined | None:
    """Join a window to its trace. None where the trace holds no spans of the window's process."""
    rank = rank_of(trace, window)
    lane = main_lane(rank.spans, window.pid) if rank is not None else None
    if rank is None or lane is None:
        return None
    kernels, index = window.kernels, trace.index
    t0 = kernels["t0_ns"]
    end = t0 + kernels["dur_ns"]
    seen = kernels["launch_ns"] >= 0
    cycle = np.where(seen, cycle_at(rank.cycles.t0_ns, kernels["launch_ns"]), NOWHERE)
    point = kernels["point"]
    name = np.where((point >= 0) & (cycle >= 0), index.name_of[np.maximum(point, 0)], NOWHERE).astype(np.int64)
    call = _calls(lane, name, kernels["launch_ns"])
    kind = _kinds(window, index, name, call, patterns)
    added = fresh(t0, end)
    launched = np.where(seen, kernels["launch_ns"] + kernels["launch_dur_ns"], -1)
    line = _line(window, lane, index, t0, end)
    return Joined(window, rank, index, lane, cycle, name, call, kind, t0, end, launched, added, _gaps(t0, end), line)


def _calls(lane: SpanColumns, name: Ints, launch_ns: Ints) -> Ints:
    """For each kernel the position, in the lane, of the span of its point that its launch lies in."""
    call = np.full(len(name), NOWHERE, np.int64)
    for number in np.unique(name[name >= 0]).tolist():
        spans = np.flatnonzero(lane.name == number)
        if not len(spans):
            continue  # a mark, or a point that only other threads pass
        spans = spans[np.argsort(lane.t0_ns[spans], kind="stable")]
        mine = np.flatnonzero(name == number)
        at = np.searchsorted(lane.t0_ns[spans], launch_ns[mine], side="right") - 1
        found = spans[np.maximum(at, 0)]
        good = (at >= 0) & (launch_ns[mine] < lane.t0_ns[found] + lane.dur_ns[found])
        call[mine[good]] = found[good]
    return call


def _kinds(window: DeepWindow, index: PlanIndex, name: Ints, call: Ints, patterns: Patterns | None) -> Ints:
    """The class of every kernel, lm_head told by its place in what one host call launched."""
    kernels = window.kernels
    kinds = classes_of(window.names, patterns)[kernels["name"]] if len(name) else np.zeros(0, np.int64)
    heads = np.array([n.rpartition(".")[2] in ("head", "logits", "lm_head") for n in index.names] + [False])
    return mark_lm_head(kinds, window.names, kernels["name"], kernels["dur_ns"], call, heads[name])


def _gaps(t0: Ints, end: Ints) -> Gaps:
    if len(t0) < 2:
        none = np.zeros(0, np.int64)
        return Gaps(none, none, none, none)
    reach = np.maximum.accumulate(end)
    at = np.flatnonzero(t0[1:] > reach[:-1]) + 1
    # The kernel that reaches furthest so far: the last one at which the running maximum grew.
    grew = np.concatenate([[True], end[1:] > reach[:-1]])
    furthest = np.maximum.accumulate(np.where(grew, np.arange(len(end)), 0))
    return Gaps(reach[at - 1], t0[at], at, furthest[at - 1])


def _line(window: DeepWindow, lane: SpanColumns, index: PlanIndex, t0: Ints, end: Ints) -> HostLine:
    syncs = window.syncs
    # Calls that wait on other threads say nothing of the one that launches.
    at = np.flatnonzero(syncs["cycle"] >= 0)
    if len(at):
        threads, counts = np.unique(syncs["thread"][at], return_counts=True)
        at = at[syncs["thread"][at] == threads[np.argmax(counts)]]
    begin = min(window.begin_ns, int(t0.min())) if len(t0) else window.begin_ns
    until = max(window.end_ns, int(end.max())) if len(end) else window.end_ns
    return host_line(
        lane, index, begin, until, syncs["t0_ns"][at], syncs["dur_ns"][at], syncs["name"][at].astype(np.int64)
    )


def chosen_cycles(joined: Joined, requests: Mask | None = None) -> Mask:
    """The decode cycles that lie wholly inside the window and count: probed, with kernels, of the requests chosen.

    A window is taken while requests run that no measurement is of: cycles outside of all measured requests count.
    """
    rank, window = joined.rank, joined.window
    cycles = rank.cycles
    begin, dur = cycles.t0_ns, cycles.dur_ns
    inside = (begin >= window.begin_ns) & (begin + dur <= window.end_ns) & (dur > 0)
    launched = np.bincount(joined.cycle[joined.cycle >= 0], minlength=len(begin)) > 0
    whole = ((cycles.drop == KEPT) | (cycles.drop == OUTSIDE)) & (cycles.kind == DECODE)
    wanted = np.ones(len(begin), bool)
    if requests is not None and len(requests):
        wanted = (cycles.request < 0) | requests[cycles.request]
    chosen: Mask = whole & wanted & inside & launched & (cycles.probed == 1)
    return chosen


def counted_gaps(joined: Joined, chosen: Mask) -> Ints:
    """The positions of gaps that belong to chosen cycles: a kernel of one ends them, and what ran before was of the
    same cycle or the one just before (else the device had nothing to do: no cycle caused that)."""
    gaps, cycle = joined.gaps, joined.cycle
    if not len(gaps.ends):
        return np.zeros(0, np.int64)
    mine, before = cycle[gaps.ends], cycle[gaps.after]
    keep = (mine >= 0) & chosen[np.maximum(mine, 0)] & (before >= mine - 1) & (before >= 0)
    return np.flatnonzero(keep)


def facts_of(window: DeepWindow) -> dict[str, Any]:
    """What a report says of a window before its numbers."""
    return {
        "host": window.host,
        "rank": window.rank,
        "pid": window.pid,
        "setting": window.setting,
        "device": window.device,
        "on_cpu": window.on_cpu,
        "length_ms": (window.end_ns - window.begin_ns) / 1e6,
        "clock_error_us": window.clock_error_ns / 1e3 if window.clock_error_ns < UNKNOWN_NS else None,
        "cost": dict(window.cost),
        "notes": list(window.notes),
    }
