"""Spans by cycle: which cycle each falls in, which draft step it is, and sums over the spans of each cycle."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specmeter.trace.cycles import cycle_at
from specmeter.trace.joining import Process
from specmeter.trace.plan import PlanIndex
from specmeter.trace.spans import LaneSpans, outside_of_cycles

# The table of draft steps: columns at most, columns that are always had, and cells from which on columns are cut (a
# chain has tens of steps; a cell has 8 bytes).
_MOST_STEPS, _FEWEST_STEPS, _MOST_CELLS = 1024, 64, 1 << 24


@dataclass(frozen=True)
class SpanColumns:
    """Spans of one thread, one entry a span.

    ``cycle`` is -1 before the first one, ``name`` an index in the plan's names, ``step`` the draft step (0: none);
    ``inside`` says that the span is part of its cycle's time and does not run beside it.
    """

    pid: int
    rank: int
    cycle: NDArray[np.int64]
    name: NDArray[np.int16]
    step: NDArray[np.int32]
    t0_ns: NDArray[np.int64]
    dur_ns: NDArray[np.int64]
    self_ns: NDArray[np.int64]
    inside: NDArray[np.bool_]


def columns_of(
    process: Process,
    spans: LaneSpans,
    self_ns: NDArray[np.int64],
    counted: NDArray[np.bool_],
    starts: NDArray[np.int64],
    index: PlanIndex,
) -> SpanColumns:
    """The spans of one thread by the cycle that each begins in; only those under ``counted`` can be part of it."""
    cycle = cycle_at(starts, spans.t0)
    inside = counted & (cycle >= 0)
    outer = outside_of_cycles(spans, starts)
    if bool(outer.any()):
        inside &= ~outer
    step = np.zeros(len(spans), np.int32)
    for name, loops in enumerate(index.loops):
        if loops:
            of_name = np.flatnonzero((spans.name == name) & spans.loop)
            for site in np.unique(spans.point[of_name]):
                # Several sites of a loop share a name; each runs once a step.
                at = of_name[spans.point[of_name] == site]
                step[at] = _ordinal(cycle[at]) + 2
    header = process.ring.header
    return SpanColumns(header.pid, header.rank, cycle, spans.name, step, spans.t0, spans.dur, self_ns, inside)


def _ordinal(group: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each entry's place among its neighbours of the same group, from 0; equal groups stand together."""
    place = np.arange(len(group))
    first = np.ones(len(group), bool)
    first[1:] = group[1:] != group[:-1]
    ordinal: NDArray[np.int64] = place - np.maximum.accumulate(np.where(first, place, 0))
    return ordinal


def steps_of(columns: list[SpanColumns], name: int, count: int) -> tuple[NDArray[np.float64], int]:
    """Self time (cycles, steps from the second) of a name that is called in a loop, and how many calls are left out.

    One cycle with very many calls would make every cycle's row as long: the width is bounded.
    """
    picked = [(c, np.flatnonzero(c.inside & (c.name == name) & (c.step > 0))) for c in columns]
    most = min(_MOST_STEPS, max(_FEWEST_STEPS, _MOST_CELLS // max(count, 1)))
    width = min(most, max((int(c.step[at].max()) - 1 for c, at in picked if len(at)), default=0))
    flat, beyond = np.zeros(count * width), 0
    for c, at in picked:
        near = at[c.step[at] - 2 < width]
        beyond += len(at) - len(near)
        if len(near):
            cell = c.cycle[near] * width + c.step[near] - 2
            flat += np.bincount(cell, weights=c.self_ns[near], minlength=count * width)
    return flat.reshape(count, width), beyond


def total_of(
    parts: list[tuple[SpanColumns, NDArray[np.int64] | None, NDArray[np.bool_]]], shape: tuple[int, int]
) -> NDArray[np.float64]:
    """Weights (or calls) summed over spans into a (cycles, names) array."""
    flat = np.zeros(shape[0] * shape[1])
    for spans, weights, keep in parts:
        keep = keep & (spans.cycle >= 0)
        if not bool(keep.any()):
            continue
        cell = spans.cycle * shape[1] + spans.name
        if not bool(keep.all()):
            cell, weights = cell[keep], None if weights is None else weights[keep]
        flat += np.bincount(cell, weights=weights, minlength=len(flat))
    return flat.reshape(shape)
