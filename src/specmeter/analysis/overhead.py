"""What the probes add to a cycle, from cycles in which they were in or out at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.analysis.stats import Interval, Overhead, ab_overhead
from specmeter.trace.build import RankTrace
from specmeter.trace.cycles import FIRST, KEPT
from specmeter.trace.requests import Request

NEIGHBOURS = 41


def drawn_overhead(rank: RankTrace, requests: Sequence[Request] = (), trim: float = 0.2) -> Overhead | None:
    """Yuen's interval on the probes' cost, each cycle measured in medians of ``NEIGHBOURS`` clean cycles around it.

    The neighbours take out drift of the machine and growth of the context, alike for both sides; those with probes are
    not among them, as their cost would be in the measure, more of it by chance here than there. Cycles are chosen
    without the probes' own values, which cycles of the original code lack: cycles that run while a request waits for
    its first token are left out, and the one after. Fifths are trimmed, as Wilcox advises for tails as heavy as theirs
    (Introduction to Robust Estimation and Hypothesis Testing, 2017): 1 cycle in 100 takes 1.5 times the median here.
    None where nothing was drawn, or with fewer than 10 cycles a side.
    """
    usable = comparable(rank, requests)
    at = np.flatnonzero(usable)
    inside = rank.cycles.probed[at] == 1
    clean = np.flatnonzero(~inside)
    if min(len(clean), len(at) - len(clean)) < 10:
        return None
    ms = rank.cycles.dur_ns[at] / 1e6
    place = np.minimum(np.searchsorted(clean, np.arange(len(at))), len(clean) - 1)
    relative = ms / _local_medians(ms[clean])[place]
    found = ab_overhead(relative[inside], relative[~inside], trim)
    if found is None:
        return None
    return replace(found, ms=_scaled(found.ms, float(np.median(ms[clean]))))


def overhead_facts(rank: RankTrace, requests: Sequence[Request]) -> dict[str, Any] | None:
    """Cycles with probes in against cycles of the original code, drawn at random; None where nothing was drawn."""
    found = drawn_overhead(rank, requests)
    if found is None:
        return None
    return {
        "ms": found.ms.as_json(),
        "percent": found.percent.as_json(),
        "cycles_in": found.cycles_in,
        "cycles_out": found.cycles_out,
    }


def comparable(rank: RankTrace, requests: Sequence[Request]) -> NDArray[np.bool_]:
    """Kept cycles with the probes drawn in or out, none of them with or right after prefill, whichever side."""
    table = rank.cycles
    usable: NDArray[np.bool_] = table.drawn & (table.drop == KEPT) & (table.probed != 2)
    return usable & ~near_prefill(rank, requests)


def near_prefill(rank: RankTrace, requests: Sequence[Request]) -> NDArray[np.bool_]:
    """Cycles that run while a request waits for its first token, and the one after."""
    table = rank.cycles
    prefill: NDArray[np.bool_] = table.drop == FIRST
    for request in requests:
        first = request.first_ns or request.end_ns
        prefill |= (table.t0_ns <= first) & (table.t0_ns + table.dur_ns >= request.send_ns)
    after: NDArray[np.bool_] = prefill.copy()
    after[1:] |= prefill[:-1]
    return after


def _local_medians(values: NDArray[np.float64]) -> NDArray[np.float64]:
    width = min(NEIGHBOURS, len(values))
    windows = np.median(np.lib.stride_tricks.sliding_window_view(values, width), axis=1)
    before = (width - 1) // 2
    padded: NDArray[np.float64] = np.pad(windows, (before, width - 1 - before), mode="edge")
    return padded


def _scaled(interval: Interval, by: float) -> Interval:
    return replace(interval, low=interval.low * by, point=interval.point * by, high=interval.high * by)
