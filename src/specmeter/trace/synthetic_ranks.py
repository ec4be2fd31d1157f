"""Writes the rings of a made-up server of many ranks on several hosts, whose clocks and stragglers are known.

For tests and for ``benchmarks/rank_scale.py``; nothing of a measurement uses it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.runtime import layout
from specmeter.trace.ring import RECORD_DTYPE, Records
from specmeter.trace.synthetic import make_plan, write_ring

PLAN: dict[str, Any] = make_plan(
    [("cycle", "cycle", "none"), ("verify.forward", "leaf", "none"), ("wait.all_reduce", "wait", "none"),
     ("draft.forward", "leaf", "loop")],
    ("cycle.batch", "cycle.drafted", "cycle.accepted"),
)  # fmt: skip
CYCLE, VERIFY, REDUCE, DRAFT, BATCH, DRAFTED, ACCEPTED = range(1, 8)
DRAFT_STEPS = 2
_UNIX_NS = 1_800_000_000_000_000_000
_START_NS = 5_000_000_000_000
TRANSFER_NS = 20_000
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Ranks:
    """``count`` ranks, spread evenly over ``hosts`` machines, for ``cycles`` cycles of ``calls`` collectives each.

    Machine h's monotonic clock shows ``offset_ns[h]`` less than the first one's and drifts by ``drift[h]``; its
    calendar is wrong by ``calendar_ns[h]``. Rank ``straggler`` computes ``slow_ns`` longer before each collective.
    Ranks in ``missing`` write no ring; those in ``lapped`` keep only the last third of theirs.
    """

    count: int
    hosts: int = 2
    cycles: int = 100
    calls: int = 4
    offset_ns: tuple[int, ...] = (0,)
    drift: tuple[float, ...] = (0.0,)
    calendar_ns: tuple[int, ...] = (0,)
    straggler: int = 0
    slow_ns: int = 100_000
    missing: tuple[int, ...] = ()
    lapped: tuple[int, ...] = ()
    seed: int = 0

    def host(self, rank: int) -> int:
        """The machine of a rank."""
        return rank * self.hosts // self.count

    def read(self, true_ns: Ints, host: int) -> Ints:
        """What a machine's monotonic clock shows at true moments, which are the first machine's."""
        offset = self.offset_ns[host % len(self.offset_ns)]
        drift = self.drift[host % len(self.drift)]
        shown: Ints = true_ns - offset - np.rint(drift * (true_ns - _START_NS)).astype(np.int64)
        return shown

    def begins(self) -> tuple[Ints, Ints, Ints]:
        """True moments: each cycle's begin, each rank's arrival at each collective, each collective's end.

        Shapes (cycles + 1), (ranks, cycles, calls) and (cycles, calls).
        """
        rng = np.random.default_rng(self.seed)
        work = 200_000 + rng.integers(0, 20_000, (self.count, self.cycles, self.calls))
        work[self.straggler] += self.slow_ns
        pause = rng.integers(500_000, 900_000, self.cycles)
        took = work.max(axis=0) + TRANSFER_NS
        begin = np.concatenate([[0], np.cumsum(took.sum(axis=1) + pause)]) + _START_NS + 1_000_000
        end = begin[:-1, None] + np.cumsum(took, axis=1)
        before = np.concatenate([begin[:-1, None], end[:, :-1]], axis=1)
        return begin, before[None] + work, end


def write_ranks(folder: Path, ranks: Ranks) -> list[Path]:
    """Write a ring for each rank that is not missing; returns the paths, in order of rank."""
    begin, arrived, end = ranks.begins()
    paths = []
    for rank in range(ranks.count):
        if rank in ranks.missing:
            continue
        host = ranks.host(rank)
        records = _records(ranks, begin, arrived[rank], end, host)
        shown = int(ranks.read(np.array([_START_NS]), host)[0])
        wrong = ranks.calendar_ns[host % len(ranks.calendar_ns)]
        path = folder / f"{1000 + rank}-1.ring"
        kept = len(records) // 3 if rank in ranks.lapped else None
        write_ring(
            path, records, kept, pid=1000 + rank, rank=rank, host=f"host{host}", boot_id=f"boot{host}",
            perf_counter_ns=shown, time_ns=_UNIX_NS + wrong, world=ranks.count,
        )  # fmt: skip
        paths.append(path)
    return paths


def _records(ranks: Ranks, begin: Ints, arrived: Ints, end: Ints, host: int) -> Records:
    """One rank's records, cycle by cycle in the order in which their spans ended, on its machine's clock."""
    cycles, calls = arrived.shape
    first = begin[:-1]
    rows: list[tuple[int, int, Ints, Ints, int]] = []
    for call in range(calls):
        rows.append((REDUCE, layout.KIND_HOST_SPAN, arrived[:, call], end[:, call], 0))
    last = end[:, -1]
    rows.append((VERIFY, layout.KIND_HOST_SPAN, first + 1_000, last + 1_000, 0))
    for step in range(DRAFT_STEPS):
        rows.append((DRAFT, layout.KIND_HOST_SPAN, last + 5_000 + 40_000 * step, last + 40_000 + 40_000 * step, 0))
    done = last + 200_000
    for value, number in ((BATCH, 1), (DRAFTED, 3), (ACCEPTED, 2)):
        rows.append((value, layout.KIND_VALUE, np.full(cycles, number), done, 0))
    rows.append((CYCLE, layout.KIND_HOST_SPAN, first, done + 1_000, 0))
    records = np.zeros((cycles, len(rows)), RECORD_DTYPE)
    for at, (point, kind, t0, t1, value) in enumerate(rows):
        records["point"][:, at], records["kind"][:, at], records["value"][:, at] = point, kind, value
        records["t0"][:, at] = t0 if kind == layout.KIND_VALUE else ranks.read(t0, host)
        records["t1"][:, at] = ranks.read(t1, host)
    records["cycle"] = np.arange(1, cycles + 1)[:, None]
    flat: Records = records.reshape(-1)
    return flat
