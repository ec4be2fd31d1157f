"""Spans of one thread: which span contains which, and the time each spends outside the spans it contains.

A thread's records are written when spans end, so they stand in order of their end and a span follows everything it
contains. That order makes nesting a vector operation: no sorting, no loop over records.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specmeter.errors import SpecmeterError
from specmeter.runtime import layout
from specmeter.trace.plan import CYCLE, MARK, OVERLAPPED, UNKNOWN, PlanIndex
from specmeter.trace.ring import Records, Ring

# A span with more direct containing siblings before its parent than this is taken to have no parent: only spans that
# hold hundreds of cycles do, and they are outside of every cycle anyway.
_MAX_STEPS = 1024
# Threads beyond the 255th share this lane, so its records are in no order.
OTHER_LANES = 255
# The ring is made at the first record, so a span cannot have begun much earlier.
_SLACK_NS = 3_600 * 1_000_000_000


@dataclass(frozen=True)
class LaneSpans:
    """Host spans of one thread, in the order in which they ended; all arrays have one entry a span.

    ``point`` is the site's id, ``name`` an index in the plan's names, ``role`` a role code, ``loop`` says that the site
    runs once a draft step; times are nanoseconds of perf_counter; ``containers``
    holds the positions of spans that contain others and ``parent`` each span's parent as an index in ``containers``
    (-1: none).
    """

    point: NDArray[np.uint16]
    name: NDArray[np.int16]
    role: NDArray[np.uint8]
    loop: NDArray[np.bool_]
    t0: NDArray[np.int64]
    dur: NDArray[np.int64]
    containers: NDArray[np.int64]
    parent: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.t0)

    def self_ns(self, effective: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Time inside each span and outside its children, ns. ``effective`` replaces the durations."""
        own: NDArray[np.int64] = np.array(self.dur if effective is None else effective)
        if len(self.containers):
            inside = self.parent >= 0
            weights = own if bool(inside.all()) else own[inside]
            parents = self.parent if weights is own else self.parent[inside]
            spent = np.bincount(parents, weights=weights, minlength=len(self.containers))
            own[self.containers] -= spent.astype(np.int64)
        return own


def lane_spans(ring: Ring, index: PlanIndex) -> dict[int, LaneSpans]:
    """The host spans of each thread (lane) of a ring, without marks and points that the plan does not know.

    Raises SpecmeterError when times contradict the order of writing, which means a damaged file.
    """
    records = ring.records
    role = index.role_of[records["point"]]
    usable = (records["kind"] == layout.KIND_HOST_SPAN) & (role != UNKNOWN) & (role != MARK)
    lanes = np.ascontiguousarray(records["lane"])
    present = np.flatnonzero(np.bincount(lanes[usable], minlength=1)).tolist()
    found: dict[int, LaneSpans] = {}
    for lane in present:
        keep = usable if len(present) == 1 else usable & (lanes == lane)
        found[lane] = _build(ring, records if bool(keep.all()) else records[keep], index, lane)
    return found


def _build(ring: Ring, records: Records, index: PlanIndex, lane: int) -> LaneSpans:
    t0 = np.ascontiguousarray(records["t0"])
    t1 = np.array(records["t1"])
    point = np.ascontiguousarray(records["point"])
    if (lane != OTHER_LANES and bool(np.any(t1[1:] < t1[:-1]))) or (
        len(t0) and int(t0.min()) < ring.header.perf_counter_ns - _SLACK_NS
    ):
        raise SpecmeterError(
            f"The ring {ring.header.path} is damaged",
            "Its spans are not in the order of their ends.",
            "Leave it out, or record again; numbers from a damaged ring are not shown.",
        )
    name, role = index.name_of[point], index.role_of[point]
    overlapped = role == OVERLAPPED
    containers, parent = nest(t0, overlapped if bool(overlapped.any()) else None)
    t1 -= t0
    return LaneSpans(point, name, role, index.loop_of[point], t0, t1, containers, parent)


def nest(t0: NDArray[np.int64], skip: NDArray[np.bool_] | None = None) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Find each span's parent, for spans in order of their end.

    ``t0`` are their starts; spans under ``skip`` become nobody's parent and nobody's child. Gives the positions of the
    spans that contain another and, for each span, its parent as an index in them (-1: none). The parent is the next
    span in order that began no later.
    """
    if skip is not None:
        return _nest_without(t0, skip)
    count = len(t0)
    inside = np.zeros(count, bool)
    # In order of ends a span contains something exactly when the one before it began no earlier than itself.
    inside[1:] = t0[:-1] >= t0[1:]
    containers = np.flatnonzero(inside)
    parent = np.full(count, -1, np.int32)
    if not len(containers):
        return containers, parent
    begun = t0[containers]
    earliest = np.minimum.accumulate(begun[::-1])[::-1]
    # The first container after each span: the number of containers up to and including the span itself.
    candidate = np.cumsum(inside, dtype=np.int32)
    limit = len(containers)
    begun = np.append(begun, np.iinfo(np.int64).min)
    earliest = np.append(earliest, np.iinfo(np.int64).min)
    active = np.flatnonzero(begun[candidate] > t0)
    parent[:] = candidate
    at, start = candidate[active], t0[active]
    for _ in range(_MAX_STEPS):
        open_ = (at < limit) & (begun[at] > start) & (earliest[at] <= start)
        done = ~open_
        parent[active[done]] = np.where((at[done] < limit) & (begun[at[done]] <= start[done]), at[done], -1)
        active, at, start = active[open_], at[open_] + 1, start[open_]
        if not len(active):
            break
    parent[active] = -1
    parent[parent == limit] = -1
    return containers, parent


def _nest_without(t0: NDArray[np.int64], skip: NDArray[np.bool_]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    kept = np.flatnonzero(~skip)
    containers, inner = nest(t0[kept])
    parent = np.full(len(t0), -1, np.int32)
    parent[kept] = inner
    return kept[containers], parent


def outside_of_cycles(spans: LaneSpans, starts: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which spans are not part of any cycle because a cycle begins inside them. ``starts``: cycle starts, ascending."""
    outer = np.zeros(len(spans), bool)
    where = spans.containers[spans.role[spans.containers] != CYCLE]
    t0 = spans.t0[where]
    begun = np.searchsorted(starts, t0, side="right")
    outer[where] = np.searchsorted(starts, t0 + spans.dur[where], side="left") > begun
    return outer
