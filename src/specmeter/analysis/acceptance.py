"""How many drafts the target kept: accept length overall and acceptance by position."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specmeter.analysis.stats import Interval, cluster_ratio
from specmeter.trace.build import RankTrace
from specmeter.trace.cycles import CycleTable

BLOCK = 50


@dataclass(frozen=True)
class Position:
    """One draft position, from 1 (the depth, in a tree).

    ``cumulative`` is the share kept among the sequences that drafted so far, ``conditional`` the share among those
    that kept the position before (``reached`` of them).
    """

    position: int
    cumulative: float | None
    conditional: float | None
    reached: int


@dataclass(frozen=True)
class Acceptance:
    """Accept length (tokens a cycle, bonus included) with its interval over requests, and acceptance by position."""

    length: Interval
    sequences: int
    positions: tuple[Position, ...]


def acceptance(rank: RankTrace, chosen: NDArray[np.bool_]) -> Acceptance | None:
    """Acceptance over the ``chosen`` cycles; None where the engine's accepted counts were not read."""
    table = rank.cycles
    if not len(table.accept):
        return None
    mine = chosen[table.accept[:, 0]]
    rows, count = table.accept[mine], sequences_of(table)[mine]
    if not len(rows):
        return None
    length = cluster_length(rows[:, 1].astype(np.int64), clusters(table.request[rows[:, 0]], rows[:, 0]), count)
    return Acceptance(length, int(count.sum()), _positions(table, rows[count == 1]))


def sequences_of(table: CycleTable) -> NDArray[np.int64]:
    """How many sequences each row of ``table.accept`` counts: one, or the cycle's batch.

    Some engines (SGLang) give one number a cycle for all sequences. Those that give one a sequence have several rows in
    some cycle of a larger batch.
    """
    of, batch = table.accept[:, 0], np.maximum(table.batch, 1).astype(np.int64)
    rows = np.bincount(of, minlength=len(batch))
    several = rows[(batch > 1) & (rows > 0)]
    return batch[of] if len(several) and several.max() == 1 else np.ones(len(of), np.int64)


def _positions(table: CycleTable, rows: NDArray[np.int32]) -> tuple[Position, ...]:
    """Acceptance by position from rows of one sequence each; a sum over several does not tell it."""
    if not len(rows):
        return ()
    cycle, accepted = rows[:, 0], rows[:, 1].astype(np.int64)
    depth = table.steps[cycle].astype(np.int64)
    # In a tree more tokens are drafted than a path is long; a path cannot be longer than the steps.
    depth = np.where(depth > 0, np.where(rows[:, 2] >= 0, np.minimum(depth, rows[:, 2]), depth), rows[:, 2])
    depth = np.where(depth < 0, int(accepted.max()), depth)
    positions = []
    for place in range(1, int(depth.max(initial=0)) + 1):
        drafted = depth >= place
        kept = int(np.count_nonzero(drafted & (accepted >= place)))
        before = int(np.count_nonzero(drafted & (accepted >= place - 1)))
        all_ = int(np.count_nonzero(drafted))
        positions.append(Position(place, kept / all_ if all_ else None, kept / before if before else None, before))
    return tuple(positions)


def clusters(request: NDArray[np.int32], cycle: NDArray[np.int32] | NDArray[np.int64]) -> tuple[NDArray[np.int64], str]:
    """The unit that each cycle belongs to, and its name: the request, or BLOCK cycles where requests are not known.

    The name of a block says how many of the cycles it holds.
    """
    if len(request) and bool(np.all(request >= 0)) and len(np.unique(request)) > 1:
        return request.astype(np.int64), "request"
    _, sizes = np.unique(np.unique(cycle) // BLOCK, return_counts=True)
    most = int(sizes.max(initial=0))
    alike = "" if bool(np.all(sizes == most)) else "up to "
    return np.asarray(cycle, np.int64) // BLOCK, f"block of {alike}{most} cycle{'' if most == 1 else 's'}"


def cluster_length(
    accepted: NDArray[np.int64], unit: tuple[NDArray[np.int64], str], sequences: NDArray[np.int64]
) -> Interval:
    """Tokens a cycle and sequence with an interval over the clusters, from rows of so many ``sequences``."""
    _, at = np.unique(unit[0], return_inverse=True)
    return cluster_ratio(np.bincount(at, weights=accepted + sequences), np.bincount(at, weights=sequences), unit[1])
