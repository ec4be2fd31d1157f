"""Where in a process's ring a moment of the host lies: the innermost point of its thread, and the cycle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.runtime import layout
from specmeter.trace.deep_clock import of_thread
from specmeter.trace.plan import CYCLE, UNKNOWN, PlanIndex
from specmeter.trace.ring import Ring
from specmeter.trace.spans import nest

_DEPTH = 64
_MARGIN_NS = 1_000_000_000
# A thread that the report does not name is taken to be a lane's when so much of what it launched lies in its spans.
_MOSTLY = 0.9


@dataclass(frozen=True)
class Lane:
    """The spans of one thread: ``t0``, ``t1``, ``point`` in order of begin, outer ones first, ``parent`` (-1: none)."""

    ident: int
    native: int
    t0: NDArray[np.int64]
    t1: NDArray[np.int64]
    point: NDArray[np.int64]
    parent: NDArray[np.int64]

    def innermost(self, time_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """The innermost span around each moment; -1 outside of all."""
        at = np.searchsorted(self.t0, time_ns, side="right") - 1
        for _ in range(_DEPTH):
            past = at >= 0
            past[past] = self.t1[at[past]] < time_ns[past]
            if not bool(past.any()):
                return at
            at[past] = self.parent[at[past]]
        at[past] = -1
        return at

    def points(self, time_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """The plan's id of that span's point."""
        at = self.innermost(time_ns)
        found = np.full(len(at), -1, np.int64)
        found[at >= 0] = self.point[at[at >= 0]]
        return found


@dataclass(frozen=True)
class Host:
    """A process's ring around one window: its threads, and its cycles as they are numbered there.

    ``starts`` (ns) and ``numbers`` have one entry a cycle; ``lost`` says that the ring no longer holds the beginning.
    """

    lanes: tuple[Lane, ...]
    starts: NDArray[np.int64]
    numbers: NDArray[np.int64]
    lost: bool

    def cycles_of(self, time_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """The cycle that each moment falls in, from its begin to the next one's; -1 before the first."""
        at = np.searchsorted(self.starts, time_ns, side="right") - 1
        found = np.full(len(at), -1, np.int64)
        found[at >= 0] = self.numbers[at[at >= 0]]
        return found

    def points_of(self, thread: NDArray[np.int64], time_ns: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[str]]:
        """The innermost point of each moment's own thread, and what a reader has to know of it."""
        found = np.full(len(time_ns), -1, np.int64)
        left = np.ones(len(time_ns), bool)
        for lane in self.lanes:
            ours = left & of_thread(thread, lane.ident, lane.native)
            found[ours] = lane.points(time_ns[ours])
            left &= ~ours
        notes = []
        for number in np.unique(thread[left]).tolist():
            ours = left & (thread == number)
            busiest = max(self.lanes, key=lambda lane: len(lane.t0), default=None)
            points = busiest.points(time_ns[ours]) if busiest is not None else np.zeros(0, np.int64)
            if len(points) and float((points >= 0).mean()) >= _MOSTLY and not self._has(thread, busiest):
                found[ours] = points
                notes.append(
                    f"thread {number} is not named in the ring: taken for its busiest one, whose spans it fits"
                )
        return found, notes

    @staticmethod
    def _has(thread: NDArray[np.int64], lane: Lane | None) -> bool:
        return lane is not None and bool(of_thread(thread, lane.ident, lane.native).any())

    def inside(self, begin_ns: int, end_ns: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Numbers and lengths (ns) of the cycles that lie wholly between two moments."""
        whole = (self.starts[:-1] >= begin_ns) & (self.starts[1:] <= end_ns)
        return self.numbers[:-1][whole], np.diff(self.starts)[whole]


def read_host(ring: Ring, index: PlanIndex, lanes: Sequence[Mapping[str, Any]], begin_ns: int, end_ns: int) -> Host:
    """The part of a ring around ``begin_ns``..``end_ns``; ``lanes`` as the process's report names them."""
    records = ring.records
    host = records["kind"] == layout.KIND_HOST_SPAN
    starts, numbers = _cycles(records[host & (index.role_of[records["point"]] == CYCLE)], index)
    near = host & (records["t1"] >= begin_ns - _MARGIN_NS) & (records["t0"] <= end_ns + _MARGIN_NS)
    near &= index.role_of[records["point"]] != UNKNOWN
    known = {int(lane["lane"]): lane for lane in lanes}
    found = []
    for number in np.unique(records["lane"][near]).tolist():
        found.append(_lane(records[near & (records["lane"] == number)], known.get(number) or {}))
    lost = ring.overwritten > 0 and len(records) > 0 and int(records["t1"][0]) > begin_ns
    return Host(tuple(found), starts, numbers, lost)


def _cycles(records: NDArray[np.void], index: PlanIndex) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Begins and numbers of the cycles from the spans of cycle points.

    Where an engine core and its worker share a process both have one, and the process has counted both: the core's
    (named ``*.core``) are the cycles then, numbered from 0.
    """
    core = np.isin(
        index.name_of[records["point"]], [at for at, name in enumerate(index.names) if name.endswith(".core")]
    )
    both = bool(core.any()) and not bool(core.all())
    records = records[core] if both else records
    records = records[np.argsort(records["t0"], kind="stable")]
    numbers = np.arange(len(records)) if both else records["cycle"].astype(np.int64)
    return np.ascontiguousarray(records["t0"]), numbers


def _lane(records: NDArray[np.void], named: Mapping[str, Any]) -> Lane:
    t0, t1 = np.ascontiguousarray(records["t0"]), np.ascontiguousarray(records["t1"])
    containers, inner = nest(t0)
    parent = np.full(len(t0), -1, np.int64)
    parent[inner >= 0] = containers[inner[inner >= 0]]
    # A span that contains others ended after them, so it stands behind them: of equal begins it is the outer one.
    order = np.lexsort((-np.arange(len(t0)), t0))
    place = np.empty(len(t0), np.int64)
    place[order] = np.arange(len(t0))
    moved = parent[order]
    moved[moved >= 0] = place[moved[moved >= 0]]
    point = records["point"][order].astype(np.int64)
    return Lane(_number(named.get("ident")), _number(named.get("native_id")), t0[order], t1[order], point, moved)


def _number(value: Any) -> int:
    return value if isinstance(value, int) else -1
