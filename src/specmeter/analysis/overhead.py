"""What the probes add to a cycle, from cycles in which they were in or out at random."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.analysis.drawn_effect import METHOD, drawn_effect
from specmeter.analysis.stats import Interval
from specmeter.trace.build import RankTrace
from specmeter.trace.cycles import FIRST, KEPT
from specmeter.trace.requests import Request


@dataclass(frozen=True)
class Overhead:
    """What the probes add to a cycle: milliseconds and percent of a cycle without them, with intervals."""

    ms: Interval
    percent: Interval
    cycles_in: int
    cycles_out: int


def drawn_overhead(rank: RankTrace, requests: Sequence[Request] = ()) -> Overhead | None:
    """The probes' cost from cycles in which they were in or out (``drawn_effect``), with a 95 % interval.

    Cycles are chosen without the probes' own values, which cycles of the original code lack: cycles that run while a
    request waits for its first token are left out, and the one after. None where nothing was drawn, or with fewer than
    10 cycles a side.
    """
    at = np.flatnonzero(comparable(rank, requests))
    inside = rank.cycles.probed[at] == 1
    ms = rank.cycles.dur_ns[at] / 1e6
    found = drawn_effect(ms, inside)
    if found is None:
        return None
    low, point, high = (100 * math.expm1(effect) for effect in found)
    count = min(int(inside.sum()), int((~inside).sum()))
    percent = Interval(low, point, high, 0.95, METHOD, count, "cycle")
    scale = float(np.median(ms[~inside])) / 100
    in_ms = Interval(low * scale, point * scale, high * scale, 0.95, METHOD, count, "cycle")
    return Overhead(in_ms, percent, int(inside.sum()), int((~inside).sum()))


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
