"""What the page shows beyond analysis.json, reduced from a run's tables: distributions, sampled cycles, acceptance by
prompt. Tables are read column by column and rank by rank, so that a long trace does not fill the memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specmeter.analysis.saved import counted
from specmeter.analysis.saved import phase_times as leaf_times
from specmeter.analysis.stalls import without_stalls
from specmeter.trace.rundir import Run
from specmeter.trace.tables import Columns, read_rank

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Rank:
    """A rank's place: host and number (-1: not known)."""

    host: str
    rank: int

    @property
    def name(self) -> str:
        """``rank 3``, or ``server`` where the engine did not tell."""
        return f"rank {self.rank}" if self.rank >= 0 else "server"


@dataclass(frozen=True)
class Cycles:
    """The cycles of one rank in order of time; ``counted`` the analysis is over, of which ``chosen`` give its times."""

    rank: Rank
    table: Columns
    counted: NDArray[np.bool_]
    chosen: NDArray[np.bool_]

    @property
    def ms(self) -> Floats:
        """The chosen cycles' lengths, ms."""
        return np.asarray(self.table["dur_ns"][self.chosen], float) / 1e6


def cycles_by_rank(run: Run, setting: str | None) -> list[Cycles]:
    """The cycles of every rank, the leading one (lowest number) first; empty where the run has no table."""
    table = run.cycles
    if not table or not len(table["rank"]):
        return []
    hosts, ranks = np.asarray(table["host"], str), np.asarray(table["rank"])
    places = sorted({(int(r), h) for h, r in set(zip(hosts.tolist(), ranks.tolist(), strict=True))})
    found, requests = [], run.requests
    for number, host in sorted(places, key=lambda p: (p[0] < 0, p[0])):
        mask = (ranks == number) & (hosts == host)
        part = {key: value[mask] for key, value in table.items()}
        chosen = counted(part, requests, setting)
        found.append(Cycles(Rank(host, number), part, chosen, without_stalls(part["dur_ns"], chosen)))
    return found


def phase_times(run: Run, cycles: Cycles) -> dict[str, Floats]:
    """Own time of each phase's leaf points in each chosen cycle, ms (0 where the phase did not run)."""
    columns = ("cycle", "point", "clock", "self_ns", "inside")
    spans = read_rank(run.path, "spans", columns, (cycles.rank.host, cycles.rank.rank))
    if not spans:
        return {}
    row = np.full(len(cycles.chosen), -1, np.int64)
    row[cycles.chosen] = np.arange(int(np.count_nonzero(cycles.chosen)))
    found = leaf_times(run, spans, np.ones(len(spans["cycle"]), bool), row)
    return {name: np.asarray(seconds * 1e3, float) for name, seconds in found.items() if bool(seconds.any())}


@dataclass(frozen=True)
class Histogram:
    """Counts over equal bins from ``low`` to ``high`` (ms); ``outside`` values lie beyond them."""

    low: float
    high: float
    counts: NDArray[np.int64]
    outside: int


def histogram(values: Floats, bins: int = 30) -> Histogram:
    """Equal bins between the 0.5th and 99.5th percentile: a few stragglers would squeeze everything else into one."""
    low, high = np.percentile(values, [0.5, 99.5]).tolist()
    if high <= low:
        low, high = low - max(abs(low) * 0.05, 1e-3), low + max(abs(low) * 0.05, 1e-3)
    counts, _ = np.histogram(values, bins=bins, range=(low, high))
    return Histogram(low, high, counts.astype(np.int64), int(len(values) - counts.sum()))
