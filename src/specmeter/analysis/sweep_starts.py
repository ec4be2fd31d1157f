"""Cycles of a setting that had server starts of its own: the start is the unit, since equal starts differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specmeter.analysis.acceptance import acceptance
from specmeter.analysis.breakdown import select
from specmeter.analysis.stalls import stall_facts, without_stalls
from specmeter.analysis.stats import mean_interval, ratio_interval
from specmeter.trace.build import Trace
from specmeter.trace.requests import Request

START = "server start"


@dataclass(frozen=True)
class StartCycles:
    """One start: its mean cycle without stalls and all its cycles' time (ms), accept length (tokens; None where the
    accepted counts were not read), and what was left out as stalls."""

    cycle_ms: float
    total_ms: float
    accept_length: float | None
    stalled: dict[str, Any]


def start_cycles(trace: Trace, requests: Sequence[Request]) -> StartCycles | None:
    """What one start's trace holds of these requests; None without a cycle of them."""
    names = {r.request_id for r in requests}
    rank = trace.main
    chosen = select(rank, np.array([r.request_id in names for r in trace.requests], bool))
    if not chosen.any():
        return None
    dur_ns, accepted = rank.cycles.dur_ns, acceptance(rank, chosen)
    return StartCycles(
        float(dur_ns[without_stalls(dur_ns, chosen)].mean()) / 1e6,
        float(dur_ns[chosen].sum()) / 1e6,
        accepted.length.point if accepted else None,
        stall_facts(dur_ns, chosen),
    )


def over_starts(starts: Sequence[StartCycles], base: Sequence[StartCycles]) -> dict[str, Any]:
    """Cycle, accept length and stalls over the starts, and break-even over those of ``base`` (none: left out)."""
    lengths = [one.accept_length for one in starts if one.accept_length is not None]
    total = sum(one.total_ms for one in starts)
    lost = sum(one.total_ms * one.stalled["percent_of_time"] for one in starts)
    found: dict[str, Any] = {
        "cycle_ms": mean_interval([one.cycle_ms for one in starts], START).as_json(),
        "accept_length_tokens": mean_interval(lengths, START).as_json() if lengths else None,
        "stalled": {
            "cycles": sum(one.stalled["cycles"] for one in starts),
            "percent_of_time": lost / total if total else 0.0,
            "limit_ms": max(one.stalled["limit_ms"] for one in starts),
        },
    }
    if base:
        even = ratio_interval([one.cycle_ms for one in starts], [one.cycle_ms for one in base], START)
        found |= {"break_even_tokens": even.point, "break_even_interval": even.as_json()}
    return found
