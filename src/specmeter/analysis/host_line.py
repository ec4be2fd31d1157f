"""What one thread of the host did at every moment: the innermost point it was in, and whether it waited there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specmeter.analysis.intervals import Ints, pieces
from specmeter.trace.by_cycle import SpanColumns
from specmeter.trace.plan import WAIT, PlanIndex

OUTSIDE = -1


@dataclass(frozen=True)
class HostLine:
    """A line of time cut into pieces: piece i lies between ``edges[i-1]`` and ``edges[i]``, ns, the first and the last
    have no end. ``name`` is the innermost point (an index in the plan's names; OUTSIDE: in none), ``sync`` an index in
    the window's sync names where the thread was in such a call (-1: none), ``waiting`` says that it was, or that the
    point is one of role wait."""

    edges: Ints
    name: Ints
    sync: Ints
    waiting: NDArray[np.bool_]

    def share(self, a: Ints, b: Ints) -> tuple[Ints, Ints, Ints]:
        """Cut intervals at the line's edges: (interval, piece, ns)."""
        return pieces(a, b, self.edges)


def main_lane(lanes: Sequence[SpanColumns], pid: int) -> SpanColumns | None:
    """The spans of the thread that runs the cycle in the process ``pid``, or None: a rank's lanes begin with those."""
    return next((lane for lane in lanes if lane.pid == pid), None)


def host_line(
    lane: SpanColumns, index: PlanIndex, begin_ns: int, end_ns: int, sync_t0: Ints, sync_dur: Ints, sync_name: Ints
) -> HostLine:
    """The line of one thread between two times from its spans, and from its calls that wait for the device."""
    near = np.flatnonzero((lane.t0_ns < end_ns) & (lane.t0_ns + lane.dur_ns > begin_ns))
    edges, names = _innermost(lane.t0_ns[near], lane.t0_ns[near] + lane.dur_ns[near], lane.name[near])
    waits = np.zeros(len(sync_t0) * 2, np.int64)
    waits[0::2], waits[1::2] = sync_t0, sync_t0 + sync_dur
    cut = np.unique(np.concatenate([edges, waits]))
    # The piece before each edge of the finer line, found by the moment just before it.
    middle = np.append(cut, np.iinfo(np.int64).max) - 1
    name = names[np.searchsorted(edges, middle, side="right")]
    order = np.argsort(sync_t0, kind="stable")
    last = np.searchsorted(sync_t0[order], middle, side="right") - 1
    inside = np.zeros(len(middle), bool)
    if len(order):
        at = order[np.maximum(last, 0)]
        inside = (last >= 0) & (middle < (sync_t0 + sync_dur)[at])
    else:
        at = np.zeros(len(middle), np.int64)
    sync = np.where(inside, sync_name[at] if len(order) else -1, -1)
    waits_by_role = np.array([role == WAIT for role in index.roles] + [False])
    return HostLine(cut, name, sync, inside | waits_by_role[name])


def _innermost(begin: Ints, end: Ints, name: NDArray[np.int16]) -> tuple[Ints, Ints]:
    """Edges in order of time and, one more than edges, the innermost span's name before, between and after them."""
    edges: list[int] = []
    names: list[int] = [OUTSIDE]
    open_: list[tuple[int, int]] = []

    def turn(at: int, to: int) -> None:
        at = max(at, edges[-1]) if edges else at
        edges.append(at)
        names.append(to)

    # Spans stand in order of their end, so of two that are equal the later one is around the other.
    for i in np.lexsort((-np.arange(len(begin)), -end, begin)).tolist():
        a = int(begin[i])
        while open_ and open_[-1][0] <= a:
            turn(open_.pop()[0], open_[-1][1] if open_ else OUTSIDE)
        open_.append((int(end[i]), int(name[i])))
        turn(a, open_[-1][1])
    while open_:
        turn(open_.pop()[0], open_[-1][1] if open_ else OUTSIDE)
    found, at = np.array(edges, np.int64), np.array(names, np.int64)
    if not len(found):
        return found, at
    # Of several turns at one moment the last holds.
    keep = np.append(found[1:] != found[:-1], True)
    return found[keep], np.concatenate([at[:1], at[1:][keep]])
