"""Ranks side by side on the host's clock: when each begins its cycles and comes to its collectives, on one clock."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.analysis.costmodel_collectives import COLLECTIVE
from specmeter.analysis.rank_clock import CALENDAR, COLLECTIVES, RankClock, fit_clocks
from specmeter.analysis.rank_cycles import RankCycles, common_rows, cycle_lags
from specmeter.trace.build import RankTrace, Trace
from specmeter.trace.host_clock import HostClock, calendar_shift

# On no rank does such a call end before every rank has begun it, where calls block.
_NEEDS_ALL = re.compile(r"\.(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)$")
_MS = 1e6
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Arrivals:
    """The calls of one collective point: ``calls`` a cycle, milliseconds between the first and the last rank's begin.

    ``transfer_ms`` and ``waiting_ms`` are a cycle's: a call ends on all ranks at once, so that its shortest time on any
    rank is what it takes and the rest is waiting. ``last_percent`` says how often each rank came last.
    """

    name: str
    calls: float
    skew_p50_ms: float
    skew_p95_ms: float
    skew_most_ms: float
    transfer_ms: float
    waiting_ms: float
    last_percent: tuple[float, ...]


@dataclass(frozen=True)
class RankSkew:
    """``ranks`` (host, rank) as joined, their ``clocks``, and how far apart they begin a cycle and its collectives.

    ``cycles`` of all ranks were compared, ``left_out`` had other collectives on some rank. ``notes`` are sentences.
    """

    ranks: tuple[tuple[str, int], ...]
    cycles: int
    left_out: int
    cycle_p50_ms: float | None
    cycle_p95_ms: float | None
    arrivals: tuple[Arrivals, ...]
    clocks: tuple[RankClock, ...]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """As the analysis document has it under ``rank_skew``."""
        fields = asdict(self)
        fields["clocks"] = [clock.as_json() for clock in self.clocks]
        return fields


def rank_skew(trace: Trace, chosen: NDArray[np.bool_]) -> RankSkew | None:
    """Compare all ranks over the ``chosen`` cycles of the leading one; None for fewer than two ranks."""
    if len(trace.ranks) < 2:
        return None
    lags = cycle_lags([_cycles(rank) for rank in trace.ranks], trace.clocks)
    good = [(rank, lag.cycles) for rank, lag in zip(trace.ranks, lags, strict=True) if lag.cycles is not None]
    notes = [
        f"rank {rank.rank} on {rank.host} is not compared: {lag.reason}"
        for rank, lag in zip(trace.ranks, lags, strict=True) if lag.cycles is None
    ]  # fmt: skip
    notes += [*_lost(trace), *trace.warnings]
    if len(good) < 2:
        return RankSkew((), 0, 0, None, None, (), (), tuple(notes))
    return _Compared(trace, good, np.flatnonzero(chosen)).skew(notes)


def _cycles(rank: RankTrace) -> RankCycles:
    return RankCycles(rank.host, rank.rank, np.arange(len(rank.cycles), dtype=np.int64), rank.cycles.t0_ns)


def _lost(trace: Trace) -> list[str]:
    """Ranks whose records were overwritten, and ranks that recorded nothing."""
    notes = [
        f"the ring of rank {rank.rank} on {rank.host} was lapped: {rank.overwritten} records from before its first "
        "cycle here are gone"
        for rank in trace.ranks if rank.overwritten
    ]  # fmt: skip
    if notes and len(notes) == len(trace.ranks):
        notes = [
            f"the rings of all ranks were lapped: up to {max(r.overwritten for r in trace.ranks)} records are gone"
        ]
    return notes + missing_ranks([rank.rank for rank in trace.ranks], max(rank.world for rank in trace.ranks))


def missing_ranks(present: list[int], world: int) -> list[str]:
    """A sentence that names the ranks below the highest one (or below ``world``) that recorded nothing, if any did."""
    known = {rank for rank in present if rank >= 0}
    absent = sorted(set(range(max(world, max(known, default=-1) + 1))) - known)
    if not absent or not known:
        return []
    return [f"no cycles of rank {', '.join(map(str, absent))}: its ring was not recorded"]


class _Compared:
    """The ranks that could be joined, over the cycles that each of them has."""

    def __init__(self, trace: Trace, ranks: list[tuple[RankTrace, int]], chosen: Ints) -> None:
        self.trace, self.ranks = trace, ranks
        first = max(-lag for _rank, lag in ranks)
        stop = min(len(rank.cycles) - lag for rank, lag in ranks)
        self.chosen = chosen[(chosen >= max(0, first)) & (chosen < stop)]
        names = [i for i, name in enumerate(trace.index.names) if COLLECTIVE.search(name)]
        self.names = np.array(names, np.int64)

    def skew(self, notes: list[str]) -> RankSkew:
        """The whole comparison."""
        taken = [self._calls(rank, lag) for rank, lag in self.ranks]
        count = max(1, len(self.trace.index.names))
        rows, apart = common_rows([cell for cell, _t0, _dur in taken], count)
        begin = np.stack([t0[keep] for (_c, t0, _d), keep in zip(taken, rows, strict=True)], axis=1)
        length = np.stack([dur[keep] for (_c, _t, dur), keep in zip(taken, rows, strict=True)], axis=1)
        name = taken[0][0][rows[0]] % count
        exchanged = np.isin(name, [i for i in self.names if _NEEDS_ALL.search(self.trace.index.names[i])])
        clocks = self._clocks(begin[exchanged], (begin + length)[exchanged])
        if len(apart):
            notes.append(f"cycles with other collectives on some rank, left out of the skew: {len(apart)}")
        notes += list(dict.fromkeys(clock.note for clock in clocks if clock.note))
        onto = np.stack([clock.onto(begin[:, i]) for i, clock in enumerate(clocks)], axis=1)
        p50, p95 = self._starts(clocks)
        cycles = len(self.chosen) - len(apart)
        return RankSkew(
            tuple((rank.host, rank.rank) for rank, _lag in self.ranks), cycles, len(apart), p50, p95,
            tuple(self._arrivals(i, onto[name == i], length[name == i], max(1, cycles))
                  for i in self.names if bool((name == i).any())),
            clocks, tuple(notes),
        )  # fmt: skip

    def _calls(self, rank: RankTrace, lag: int) -> tuple[Ints, Ints, Ints]:
        """The cell (cycle, name), begin and length of each collective's call in the chosen cycles, rising."""
        cells, begins, lengths = [], [], []
        count = max(1, len(self.trace.index.names))
        for spans in rank.spans:
            cycle = spans.cycle - lag
            at = np.flatnonzero(spans.inside & np.isin(spans.name, self.names) & np.isin(cycle, self.chosen))
            cells.append(cycle[at] * count + spans.name[at])
            begins.append(spans.t0_ns[at])
            lengths.append(spans.dur_ns[at])
        cell, begin, length = (np.concatenate(parts).astype(np.int64) for parts in (cells, begins, lengths))
        order = np.lexsort((begin, cell))
        return cell[order], begin[order], length[order]

    def _clocks(self, begin: Ints, end: Ints) -> tuple[RankClock, ...]:
        """Clocks by the calls that block until all have come; by the calendar where they turn out not to block."""
        found = fit_clocks([(rank.host, rank.rank) for rank, _lag in self.ranks], begin, end, self.trace.clocks)
        return tuple(_or_calendar(clock, found[0].host, self.trace.clocks) for clock in found)

    def _starts(self, clocks: tuple[RankClock, ...]) -> tuple[float | None, float | None]:
        if not len(self.chosen):
            return None, None
        starts = [
            clock.onto(rank.cycles.t0_ns[self.chosen + lag])
            for (rank, lag), clock in zip(self.ranks, clocks, strict=True)
        ]
        apart = np.ptp(np.stack(starts), axis=0) / _MS
        return float(np.percentile(apart, 50)), float(np.percentile(apart, 95))

    def _arrivals(self, name: int, begin: Ints, length: Ints, cycles: int) -> Arrivals:
        skew = np.ptp(begin, axis=1) / _MS
        least = length.min(axis=1)
        last = np.bincount(length.argmin(axis=1), minlength=len(self.ranks))
        return Arrivals(
            self.trace.index.names[name], len(begin) / cycles, float(np.percentile(skew, 50)),
            float(np.percentile(skew, 95)), float(skew.max()), float(least.sum()) / cycles / _MS,
            float((length.mean(axis=1) - least).sum()) / cycles / _MS,
            tuple(100 * float(share) for share in last / len(begin)),
        )  # fmt: skip


def _or_calendar(clock: RankClock, first: str, clocks: Mapping[str, HostClock]) -> RankClock:
    shift = calendar_shift(clocks, clock.host, first)
    if clock.source != COLLECTIVES or clock.error_ns is not None or shift is None:
        return clock
    return replace(clock, offset_ns=shift, drift=0.0, source=CALENDAR)
