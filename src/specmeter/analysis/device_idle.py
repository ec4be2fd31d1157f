"""Why the device was idle: each gap between kernels shared out to the host code that caused it.

A gap ends with a kernel. Until the call that launched it returned, the device had nothing to do because the host had
not come that far: this part goes to the points the host was in, by time, as work or as waiting. What follows the launch
is the launch's own latency. A gap whose kernel had been launched before it began is the device's own (the next node of
a graph, an event of another stream): no host code caused it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.analysis.device_join import Joined, Mask
from specmeter.analysis.intervals import Ints

WORK, WAITING, LATENCY, QUEUED, UNSEEN = range(5)
CAUSES = ("host at work", "host waiting", "launched, not begun", "queued on the device", "launch not seen")
OUTSIDE_NAME = "outside of all points"
MOST_ROWS = 12


@dataclass(frozen=True)
class Blame:
    """Parts of gaps, one entry a part: ``gap`` a position in the join's gaps, ``cause`` (CAUSES), ``name`` the host's
    innermost point (-1: none) and ``sync`` the call it waited in (-1: none) for the first two causes, ``ns``."""

    gap: Ints
    cause: Ints
    name: Ints
    sync: Ints
    ns: Ints


def attribute(joined: Joined, at: Ints) -> Blame:
    """Share out the gaps at some positions; the parts of a gap sum to its length."""
    gaps, line = joined.gaps, joined.line
    begin, end, launched = gaps.begin[at], gaps.end[at], _ready(joined)[gaps.ends[at]]
    seen = launched >= 0
    host_end = np.where(seen, np.clip(launched, begin, end), begin)
    which, piece, ns = line.share(begin, host_end)
    rest = np.flatnonzero(end > host_end)
    late = np.where(~seen, UNSEEN, np.where(launched <= begin, QUEUED, LATENCY))[rest]
    none = np.full(len(rest), -1, np.int64)
    return Blame(
        np.concatenate([at[which], at[rest]]),
        np.concatenate([np.where(line.waiting[piece], WAITING, WORK), late]),
        np.concatenate([line.name[piece], none]),
        np.concatenate([line.sync[piece], none]),
        np.concatenate([ns, (end - host_end)[rest]]),
    )


def _ready(joined: Joined) -> Ints:
    """When each kernel was there for the device to run: its launch's end, or the begin of its graph's first kernel (a
    replay begins before the call has returned). -1: not seen."""
    graph = joined.window.kernels["graph"]
    found: Ints = joined.launched.copy()
    at = np.flatnonzero((graph >= 0) & (found >= 0))
    if len(at):
        _, first, replay = np.unique(graph[at], return_index=True, return_inverse=True)
        found[at] = np.minimum(found[at], joined.t0[at[first]][replay])
    return found


def by_cause(blame: Blame, group: Ints, count: int) -> NDArray[np.float64]:
    """ns by (group, cause): ``group`` has an entry a part, 0..count-1."""
    cell = group * len(CAUSES) + blame.cause
    total = np.asarray(np.bincount(cell, weights=blame.ns, minlength=count * len(CAUSES)), float)
    return total.reshape(count, len(CAUSES))


def idle_facts(joined: Joined, chosen: Mask, blame: Blame) -> dict[str, Any]:
    """The idle time of the chosen cycles, mean ms a cycle: by cause, and by host code and the phase that came next.

    Rows beyond MOST_ROWS are summed in ``rest_ms``, so that all add up to ``total_ms``.
    """
    count = max(int(np.count_nonzero(chosen)), 1)
    following = joined.name[joined.gaps.ends[blame.gap]]
    total = float(blame.ns.sum())
    keys = np.stack([blame.cause, blame.name, blame.sync, following], axis=1)
    rows, at = np.unique(keys, axis=0, return_inverse=True) if len(keys) else (keys, np.zeros(0, np.int64))
    ns = np.bincount(at.reshape(-1), weights=blame.ns, minlength=len(rows))
    listed = [
        {
            "cause": CAUSES[cause],
            "point": _name(joined, int(name)) if cause in (WORK, WAITING) else None,
            "call": joined.window.sync_names[sync] if sync >= 0 else None,
            "next": _name(joined, int(after)),
            "ms": float(part) / count / 1e6,
            "percent": 100 * float(part) / total if total else 0.0,
        }
        for (cause, name, sync, after), part in sorted(
            zip(rows.tolist(), ns.tolist(), strict=True), key=lambda row: -row[1]
        )
    ]
    causes = by_cause(blame, np.zeros(len(blame.ns), np.int64), 1)[0]
    return {
        "total_ms": total / count / 1e6,
        "gaps": len(np.unique(blame.gap)) / count,
        "causes_ms": {name: float(part) / count / 1e6 for name, part in zip(CAUSES, causes, strict=True)},
        "points_ms": _by_point(joined, blame, count),
        "rows": listed[:MOST_ROWS],
        "rest_ms": sum(row["ms"] for row in listed[MOST_ROWS:]),
    }


def _by_point(joined: Joined, blame: Blame, count: int) -> dict[str, float]:
    """Idle time by the host's point alone, work and waiting together, the longest first; mean ms a cycle."""
    host = np.flatnonzero(blame.cause <= WAITING)
    names, at = np.unique(blame.name[host], return_inverse=True)
    ns = np.bincount(at, weights=blame.ns[host], minlength=len(names)) / count / 1e6
    order = np.argsort(-ns, kind="stable")
    return {_name(joined, int(names[i])): float(ns[i]) for i in order}


def _name(joined: Joined, name: int) -> str:
    return joined.index.names[name] if name >= 0 else OUTSIDE_NAME
