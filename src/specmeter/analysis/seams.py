"""Seams of a recorded run: time inside a cycle in which none of the device's timed points ran.

Where the recipe times all device work and the host runs ahead, that is the device waiting for the host. Work between
timed points is in it too; and a span around calls that the host launches one by one holds the device's waiting for each
of them, which is not: of a host-bound server on an H200 half of the idle time lay inside of spans. A deep window tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.analysis.acceptance import clusters
from specmeter.analysis.stats import Interval, cluster_ratio
from specmeter.trace.build import RankTrace
from specmeter.trace.device import device_times
from specmeter.trace.ring import Ring

HOST_ONLY = "host times only: no device spans were recorded (on a GPU --device-events or --stamps record them)"
NOT_THERE = "no cycle that counts has device spans"


def device_facts(rings: Sequence[Ring], rank: RankTrace, chosen: NDArray[np.bool_]) -> dict[str, Any]:
    """``idle_ms`` (interval), ``idle_percent`` of the cycle, ``busy_ms`` and ``cycles``, over the chosen cycles.

    Only cycles with device spans count: they may be recorded on some cycles alone. Without any the figures are None,
    and ``reason`` (else empty) says why.
    """
    busy = busy_ns(rings, rank)
    at = np.flatnonzero(chosen & (busy > 0)) if busy is not None else np.zeros(0, np.int64)
    if busy is None or not len(at):
        why = HOST_ONLY if busy is None else NOT_THERE
        return {"idle_ms": None, "idle_percent": None, "busy_ms": None, "cycles": 0, "reason": why}
    dur = rank.cycles.dur_ns[at].astype(float)
    idle: Interval = _mean_ms(rank, at, dur - busy[at])
    return {
        "idle_ms": idle.as_json(),
        "idle_percent": 100 * float((dur - busy[at]).sum() / dur.sum()),
        "busy_ms": float(busy[at].mean()) / 1e6,
        "cycles": len(at),
        "reason": "",
    }


def _mean_ms(rank: RankTrace, at: NDArray[np.int64], values_ns: NDArray[np.float64]) -> Interval:
    unit, name = clusters(rank.cycles.request[at], at)
    _, group = np.unique(unit, return_inverse=True)
    return cluster_ratio(np.bincount(group, weights=values_ns / 1e6), np.bincount(group), name)


def busy_ns(rings: Sequence[Ring], rank: RankTrace) -> NDArray[np.float64] | None:
    """For each cycle the time that device spans cover of it, ns, on the host's clock; None without device spans."""
    pids = {rank.pid, *(spans.pid for spans in rank.spans)}
    for ring in rings:
        # With an engine core and a worker, the cycles are the core's and the device is the worker's.
        if ring.header.host != rank.host or ring.header.pid not in pids:
            continue
        times = device_times(ring)
        if times is None:
            continue
        begin, end = times
        # Spans of several streams may overlap: each adds what reaches beyond all before it.
        before = np.concatenate([[begin[0]], np.maximum.accumulate(end)[:-1]])
        begin = np.minimum(np.maximum(begin, before), np.maximum(end, before))
        end = np.maximum(end, begin)
        edges = np.stack([begin, end], axis=1).reshape(-1).astype(float)
        total = np.stack([np.zeros(len(begin)), (end - begin).astype(float)], axis=1).reshape(-1).cumsum()
        t0 = rank.cycles.t0_ns.astype(float)
        found: NDArray[np.float64] = np.interp(t0 + rank.cycles.dur_ns, edges, total) - np.interp(t0, edges, total)
        return found
    return None
