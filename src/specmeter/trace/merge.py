"""Puts a worker process's spans into the engine core's timeline, so that no moment is counted twice.

The core's own work stands as it is. A worker's time counts where the core does not work; what a wait of the core lasts
beyond the worker's busy time stays a wait. All of it is arithmetic on cumulated lengths of disjoint intervals.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specmeter.trace.plan import LEAF, OVERLAPPED, WAIT
from specmeter.trace.spans import LaneSpans


@dataclass(frozen=True)
class Cover:
    """Disjoint intervals in order of time, and the length that counts of each, cumulated (ns)."""

    t0: NDArray[np.int64]
    t1: NDArray[np.int64]
    before: NDArray[np.int64]
    without: Cover | None = None

    def until(self, time: NDArray[np.int64]) -> NDArray[np.int64]:
        """How much of the time before each of ``time`` is covered, ns."""
        if not len(self.t0):
            return np.zeros(len(time), np.int64)
        at = np.maximum(np.searchsorted(self.t0, time, side="right") - 1, 0)
        start = self.t0[at]
        stop = np.clip(time, start, self.t1[at])
        length = stop - start
        if self.without is not None:
            length = length - self.without.inside(start, stop)
        covered: NDArray[np.int64] = self.before[at] + length
        return covered

    def inside(self, t0: NDArray[np.int64], t1: NDArray[np.int64]) -> NDArray[np.int64]:
        """How much of each interval is covered, ns."""
        return self.until(t1) - self.until(t0)


def cover(spans: LaneSpans, keep: NDArray[np.bool_], without: Cover | None = None) -> Cover:
    """The intervals of the spans under ``keep``, which must not overlap, less what ``without`` covers."""
    t0 = spans.t0[keep]
    t1 = t0 + spans.dur[keep]
    length = t1 - t0
    if without is not None:
        length = length - without.inside(t0, t1)
    return Cover(t0, t1, np.cumsum(length) - length, without)


def merge(core: LaneSpans, worker: LaneSpans) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
    """Self time (ns) of the core's and of the worker's spans on one timeline, and which worker spans count.

    The worker's outermost waits do not: then it waits for the core.
    """
    childless = np.ones(len(core), bool)
    childless[core.containers] = False
    working = cover(core, childless & (core.role == LEAF))
    outermost = (worker.parent < 0) & (worker.role != OVERLAPPED)
    counted = (worker.role != OVERLAPPED) & ~(outermost & (worker.role == WAIT))
    busy = cover(worker, outermost & counted, working)
    t1 = core.t0 + core.dur
    core_self = core.self_ns(core.dur - busy.inside(core.t0, t1))
    clipped = worker.dur - working.inside(worker.t0, worker.t0 + worker.dur)
    return core_self, worker.self_ns(clipped), counted
