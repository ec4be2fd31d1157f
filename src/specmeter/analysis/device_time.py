"""Device time by phase of the decode cycle, from a deep window joined to its trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.analysis.acceptance import clusters
from specmeter.analysis.device_bound import Bound, bounds_of
from specmeter.analysis.device_idle import OUTSIDE_NAME, Blame, attribute
from specmeter.analysis.device_join import NOWHERE, Joined, Mask, counted_gaps
from specmeter.analysis.intervals import Ints, covered, fresh, spans_of, union
from specmeter.analysis.stats import Interval, cluster_ratio
from specmeter.trace.build import RankTrace
from specmeter.trace.plan import LEAF, PHASES, ROLES, WAIT, phase_of

GRAPH, EAGER, BOTH, NONE = "graph", "eager", "graph in some cycles", "nothing launched"


@dataclass(frozen=True)
class Delay:
    """From the end of the launching call to the kernel's begin, us, over ``n`` launches (of a graph: its first kernel).

    Below zero the kernel began before the call had returned. None without launches that were seen.
    """

    median_us: float | None
    p95_us: float | None
    n: int


@dataclass(frozen=True)
class PhaseTime:
    """One point's mean cycle, ms a cycle unless said otherwise.

    ``busy_ms`` is the union of its kernels over all streams, ``span_ms`` from the first kernel's begin to the last
    one's end of each of its calls, ``idle_inside_ms`` what of that no kernel of anyone ran in, ``idle_before_ms`` the
    idle time that a call's first kernel ended. ``host_work_ms`` and ``host_wait_ms`` are the host's own time in the
    point. ``ahead_us``: how long a call's first kernel waited after its launch, median: how far the host was ahead.
    ``kernels``, ``launches`` (single ones) and ``graph_launches`` are counts a cycle; ``graph`` says how it was
    launched.
    """

    name: str
    phase: str
    role: str
    busy_ms: float
    span_ms: float
    idle_inside_ms: float
    idle_before_ms: float
    host_work_ms: float
    host_wait_ms: float
    delay: Delay
    ahead_us: float | None
    kernels: float
    launches: float
    graph_launches: float
    graph: str
    bound: Bound


@dataclass(frozen=True)
class DeviceTime:
    """The mean of ``cycles`` cycles on the device. ``period_ms`` is busy and idle time together; intervals as in all
    analyses. ``leaf_percent`` is the share of the busy time that lies in kernels of named leaf phases, ``glue_percent``
    in those of frames between them; ``outside_percent`` in those of no point, or of no cycle but between its
    kernels."""

    cycles: int
    cycle_ms: Interval
    period_ms: Interval
    busy_ms: Interval
    idle_ms: Interval
    idle_percent: float
    phases: tuple[PhaseTime, ...]
    leaf_percent: float
    glue_percent: float
    outside_percent: float
    bound: Bound


def device_time(joined: Joined, chosen: Mask) -> tuple[DeviceTime, Blame]:
    """The tables over the ``chosen`` cycles (at least one), and the idle time shared out to its causes."""
    rank, cycle = joined.rank, joined.cycle
    at = np.flatnonzero((cycle >= 0) & chosen[np.maximum(cycle, 0)])
    gaps = counted_gaps(joined, chosen)
    blame = attribute(joined, gaps)
    number = len(rank.cycles)
    busy = _summed(cycle[at], joined.added[at], number)
    ended = joined.gaps.ends[gaps]
    idle = _summed(cycle[ended], (joined.gaps.end - joined.gaps.begin)[gaps], number)
    rows = np.flatnonzero(chosen)

    def mean(ns: NDArray[np.float64]) -> Interval:
        return _mean_ms(rank, rows, ns[rows])

    total = busy[rows].sum() + idle[rows].sum()
    whole = bounds_of(joined, at, blame, np.zeros(len(at), np.int64), np.zeros(len(blame.ns), np.int64), 1)[0]
    leaf, glue, outside = _coverage(joined, at)
    found = DeviceTime(
        len(rows), mean(rank.cycles.dur_ns.astype(float)), mean(busy + idle), mean(busy), mean(idle),
        100 * float(idle[rows].sum() / total) if total else 0.0, _phases(joined, chosen, at, gaps, blame),
        leaf, glue, outside, whole,
    )  # fmt: skip
    return found, blame


def _summed(group: Ints, values: NDArray[Any], count: int) -> NDArray[np.float64]:
    return np.asarray(np.bincount(group, weights=values, minlength=count), float)


def _mean_ms(rank: RankTrace, at: Ints, ns: NDArray[np.float64]) -> Interval:
    unit, name = clusters(rank.cycles.request[at], at)
    _, group = np.unique(unit, return_inverse=True)
    return cluster_ratio(np.bincount(group, weights=ns / 1e6), np.bincount(group), name)


def _coverage(joined: Joined, at: Ints) -> tuple[float, float, float]:
    """Percent of the busy time in leaf phases, in frames, and in neither; kernels of no cycle that ran between
    count."""
    if not len(at):
        return 0.0, 0.0, 0.0
    ran = (joined.t0 >= joined.t0[at].min()) & (joined.t0 <= joined.t0[at].max())
    stray = np.flatnonzero((joined.cycle == NOWHERE) & ran)
    total = float(joined.added[at].sum() + joined.added[stray].sum())
    leaf = float(joined.added[at][joined.leaf[at]].sum())
    glue = float(joined.added[at][~joined.leaf[at] & (joined.name[at] >= 0)].sum())
    if not total:
        return 0.0, 0.0, 0.0
    return 100 * leaf / total, 100 * glue / total, 100 * (total - leaf - glue) / total


def _phases(joined: Joined, chosen: Mask, at: Ints, gaps: Ints, blame: Blame) -> tuple[PhaseTime, ...]:
    """One row a point that launched kernels in the chosen cycles or is a leaf that the host spent time in."""
    index, count = joined.index, int(np.count_nonzero(chosen))
    width = len(index.names) + 1
    slot = joined.name[at] + 1
    work, wait = _host(joined, chosen, width)
    busy = np.bincount(
        slot, weights=fresh(joined.t0[at], joined.end[at], joined.cycle[at] * width + slot), minlength=width
    )
    span, inside, before, first = _calls(joined, at, gaps, width)
    blamed = joined.name[joined.gaps.ends[blame.gap]] + 1
    bounds = bounds_of(joined, at, blame, slot, blamed, width)
    kernels = np.bincount(slot, minlength=width)
    shown = [i for i in range(width) if kernels[i] or (i and index.roles[i - 1] in (LEAF, WAIT) and work[i] + wait[i])]
    shown.sort(key=lambda i: PHASES.index(phase_of(index.names[i - 1])) if i else len(PHASES))
    rows = []
    for i in shown:
        name = index.names[i - 1] if i else OUTSIDE_NAME
        mine = at[slot == i]
        single, replays, graph = _launches(joined, mine)
        ahead = _delays(joined, first[joined.name[first] + 1 == i])
        rows.append(
            PhaseTime(
                name, phase_of(name), ROLES[index.roles[i - 1]] if i else "none",
                busy[i] / count / 1e6, span[i] / count / 1e6, inside[i] / count / 1e6, before[i] / count / 1e6,
                work[i] / count / 1e6, wait[i] / count / 1e6, _delay(joined, mine),
                float(np.median(ahead)) if len(ahead) else None,
                float(kernels[i]) / count, single / count, replays / count, graph, bounds[i],
            )
        )  # fmt: skip
    return tuple(rows)


def _host(joined: Joined, chosen: Mask, width: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The host's own time in each point over the chosen cycles, ns: at work and waiting; entry 0 is outside of all."""
    cycles = joined.rank.cycles
    begin = cycles.t0_ns[chosen]
    _, piece, ns = joined.line.share(begin, begin + cycles.dur_ns[chosen])
    slot, waits = joined.line.name[piece] + 1, joined.line.waiting[piece]
    return _summed(slot, np.where(waits, 0, ns), width), _summed(slot, np.where(waits, ns, 0), width)


def _calls(
    joined: Joined, at: Ints, gaps: Ints, width: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], Ints]:
    """By point, ns: spans of its calls on the device, idle time inside them and before them; and each call's first
    kernel."""
    mine = at[joined.call[at] >= 0]
    zero = np.zeros(width)
    if not len(mine):
        return zero, zero, zero, mine
    calls, where, group = np.unique(joined.call[mine], return_index=True, return_inverse=True)
    begin, end = spans_of(joined.t0[mine], joined.end[mine], group, len(calls))
    first = mine[where]
    slot = joined.name[first] + 1
    inside = end - begin - covered(begin, end, *union(joined.t0, joined.end))
    ended = joined.gaps.ends[gaps]
    length = (joined.gaps.end - joined.gaps.begin)[gaps]
    opens = np.isin(ended, first)
    before = _summed(joined.name[ended[opens]] + 1, length[opens], width)
    return _summed(slot, end - begin, width), _summed(slot, inside, width), before, first


def _launches(joined: Joined, at: Ints) -> tuple[int, int, str]:
    """Single launches, graph replays, and whether the cycles that launched anything replayed a graph."""
    kernels = joined.window.kernels
    graph, replay = kernels["graph_launch"][at], kernels["graph"][at]
    replays = len(np.unique(replay[graph & (replay >= 0)]))
    hit, all_ = len(np.unique(joined.cycle[at[graph]])), len(np.unique(joined.cycle[at]))
    word = NONE if not all_ else EAGER if not hit else GRAPH if hit == all_ else BOTH
    return int(np.count_nonzero(~graph)), replays, word


def _delay(joined: Joined, at: Ints) -> Delay:
    kernels = joined.window.kernels
    graph = kernels["graph"][at]
    # A replay's kernels share one launch, and all but the first wait for each other.
    _, first = np.unique(graph[graph >= 0], return_index=True)
    one = np.concatenate([at[graph < 0], at[graph >= 0][first]])
    found = _delays(joined, one)
    if not len(found):
        return Delay(None, None, 0)
    median, p95 = np.percentile(found, [50, 95]).tolist()
    return Delay(median, p95, len(found))


def _delays(joined: Joined, at: Ints) -> NDArray[np.float64]:
    seen = at[joined.launched[at] >= 0]
    found: NDArray[np.float64] = (joined.t0[seen] - joined.launched[seen]) / 1e3
    return found
