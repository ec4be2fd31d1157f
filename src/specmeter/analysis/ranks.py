"""Several ranks beside each other: each one's phases, its time in collectives, and which rank the others wait for.

A collective ends for all ranks at once, so a rank that comes early spends the difference in it, waiting. Own work is
therefore the cycle without collectives, and the straggler is the rank whose own work is longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.analysis.breakdown import breakdown, select
from specmeter.analysis.costmodel_collectives import COLLECTIVE
from specmeter.analysis.rank_arrivals import rank_skew
from specmeter.analysis.stalls import without_stalls
from specmeter.trace.build import RankTrace, Trace

# A rank is named for a phase when it is so much of the others' mean behind in it, and that is so much of the cycle:
# less is noise between equal ranks.
_BEHIND, _WORTH = 0.05, 0.005


@dataclass(frozen=True)
class RankRow:
    """One rank's mean cycle. ``phases_ms`` and ``collectives_ms`` by name, ``own_ms`` the cycle without collectives."""

    host: str
    rank: int
    cycle_ms: float
    cycles: int
    phases_ms: dict[str, float]
    collectives_ms: dict[str, float]
    collective_calls: float
    own_ms: float


def rank_row(rank: RankTrace, trace: Trace, requests: NDArray[np.bool_]) -> RankRow:
    """The row of ``rank`` over the decode cycles of the ``requests`` chosen."""
    chosen = select(rank, requests) & (rank.cycles.probed == 1)
    table = breakdown(rank, trace.index, without_stalls(rank.cycles.dur_ns, chosen))
    collectives = {row.name: row for row in table.rows if COLLECTIVE.search(row.name)}
    spent = {name: row.ms for name, row in collectives.items()}
    return RankRow(
        rank.host,
        rank.rank,
        table.cycle_ms,
        table.cycles,
        {row.name: row.ms for row in table.phases},
        spent,
        sum(row.calls for row in collectives.values()),
        table.cycle_ms - sum(spent.values()),
    )


def rank_tables(trace: Trace, requests: NDArray[np.bool_]) -> dict[str, Any]:
    """The keys ``ranks``, ``straggler``, ``phase_stragglers`` and ``rank_skew`` of analysis.json.

    Empty and None for a single rank.
    """
    if len(trace.ranks) < 2:
        return {"ranks": [], "straggler": None, "phase_stragglers": [], "rank_skew": None}
    rows = [rank_row(rank, trace, requests) for rank in trace.ranks]
    chosen = select(trace.main, requests) & (trace.main.cycles.probed == 1)
    skew = rank_skew(trace, without_stalls(trace.main.cycles.dur_ns, chosen))
    return {
        "ranks": [asdict(row) for row in rows],
        "straggler": straggler(rows),
        "phase_stragglers": phase_stragglers(rows),
        "rank_skew": skew.as_json() if skew is not None else None,
    }


def phase_stragglers(rows: Sequence[RankRow]) -> list[dict[str, Any]]:
    """For each phase the rank that spends longest in it, where that is clearly more than the others do.

    Phases that are waits are left out: there the longest one is the rank that has least to do.
    """
    timed = [row for row in rows if row.cycles]
    found = []
    for phase in dict.fromkeys(name for row in timed for name in row.phases_ms):
        if phase == "wait" or len(timed) < 2:
            continue
        slowest = max(timed, key=lambda row: row.phases_ms.get(phase, 0.0))
        own = slowest.phases_ms.get(phase, 0.0)
        others = float(np.mean([row.phases_ms.get(phase, 0.0) for row in timed if row is not slowest]))
        if own > (1 + _BEHIND) * others and own - others > _WORTH * slowest.cycle_ms:
            facts = {"phase": phase, "rank": slowest.rank, "host": slowest.host, "own_ms": own}
            found.append({**facts, "others_own_ms": others, "behind_ms": own - others})
    return sorted(found, key=lambda row: -row["behind_ms"])


def straggler(rows: Sequence[RankRow]) -> dict[str, Any] | None:
    """The rank whose own work is longest, and by how much over the mean of the others; None without collectives."""
    timed = [row for row in rows if row.collectives_ms and row.cycles]
    if len(timed) < 2:
        return None
    slowest = max(timed, key=lambda row: row.own_ms)
    others = float(np.mean([row.own_ms for row in timed if row is not slowest]))
    return {
        "rank": slowest.rank,
        "host": slowest.host,
        "own_ms": slowest.own_ms,
        "others_own_ms": others,
        "behind_ms": slowest.own_ms - others,
    }
