"""The figures of one rank that metrics show, whether they come from a saved run or from a server that runs now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmeter.analysis.saved import phase_times, profile_tables, timed
from specmeter.analysis.saved_baseline import baseline_step
from specmeter.exports.cycle_kinds import CycleFacts, cycle_kinds, kind_counts
from specmeter.trace.rundir import Run

# Seconds, 10 us to 10 s: a leaf of the embedded engine and a cycle of a large one both fall inside.
BOUNDS_S = (*(float(f"{m}e{e}") for e in range(-5, 1) for m in (1, 2.5, 5)), 10.0)


@dataclass(frozen=True)
class Buckets:
    """A histogram of seconds: ``counts`` has one entry a bound of BOUNDS_S and one for all above, not cumulated."""

    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(BOUNDS_S) + 1, np.int64))
    sum_s: float = 0.0

    def with_values(self, seconds: ArrayLike) -> Buckets:
        """This histogram with more values in it."""
        values = np.asarray(seconds, float)
        at = np.searchsorted(BOUNDS_S, values, side="left")
        return Buckets(self.counts + np.bincount(at, minlength=len(BOUNDS_S) + 1), self.sum_s + float(values.sum()))

    @property
    def count(self) -> int:
        """How many values it holds."""
        return int(self.counts.sum())

    def plus(self, other: Buckets) -> Buckets:
        """The values of both."""
        return Buckets(self.counts + other.counts, self.sum_s + other.sum_s)


@dataclass(frozen=True)
class Position:
    """One draft position, from 1: sequences that drafted so far, that kept the one before, and that kept this one."""

    drafted: int
    reached: int
    kept: int


@dataclass(frozen=True)
class Figures:
    """One rank of one server.

    Histograms are over speculative decode cycles: whole cycles, seconds of each phase in a cycle, and, where the
    device's time is recorded, gaps between its timed points (``seam``, None: not measured). ``cycles`` counts by the
    kinds of ``cycle_kinds``.
    ``tokens`` were yielded by ``sequences`` (a sequence in a cycle is one), bonus included. ``accept_length`` and
    ``cycle_s`` are means (of the last minute, on a server that runs), ``baseline_step_s`` one decode step without
    speculation; ``overhead_ratio`` is the probes' share of a cycle as measured. None: not known.
    """

    server: str
    host: str
    rank: int
    cycle: Buckets = field(default_factory=Buckets)
    phases: Mapping[str, Buckets] = field(default_factory=dict)
    seam: Buckets | None = None
    cycles: Mapping[str, int] = field(default_factory=dict)
    tokens: int = 0
    sequences: int = 0
    positions: tuple[Position, ...] = ()
    accept_length: float | None = None
    cycle_s: float | None = None
    baseline_step_s: float | None = None
    overhead_ratio: float | None = None
    lost: int = 0
    armed: bool | None = None

    @property
    def break_even(self) -> float | None:
        """The accept length below which speculation loses: cycle / baseline step."""
        if not self.baseline_step_s or self.cycle_s is None:
            return None
        return self.cycle_s / self.baseline_step_s

    def with_baseline(self, step_s: float | None, overhead_ratio: float | None) -> Figures:
        """These figures with a baseline step and an overhead measured elsewhere; known ones stay."""
        return replace(
            self,
            baseline_step_s=self.baseline_step_s or step_s,
            overhead_ratio=self.overhead_ratio if self.overhead_ratio is not None else overhead_ratio,
        )


def baseline_of(run: Run) -> tuple[float | None, float | None]:
    """(baseline step in seconds, probes' share of a cycle) as a saved run measured them; None where it did not."""
    step = baseline_step(run.analysis)
    sampled = (run.analysis.get("sampling") or {}).get("overall_percent")
    overhead = sampled or (run.analysis.get("overhead") or {}).get("percent")
    return step.point / 1e3 if step else None, overhead["point"] / 100 if overhead else None


def run_figures(run: Run) -> list[Figures]:
    """The figures of each rank of a saved run, over the cycles that its report is over.

    Raises SpecmeterError when the run has no profile or no tables.
    """
    cycles, spans = profile_tables(run)
    pairs = dict.fromkeys(zip(cycles["host"].tolist(), cycles["rank"].tolist(), strict=True))
    step_s, overhead = baseline_of(run)
    found = []
    for number, (host, rank) in enumerate(pairs):
        of = (cycles["host"] == host) & (cycles["rank"] == rank)
        chosen = of & timed(run, cycles)
        row = np.full(int(cycles["cycle"].max()) + 1, -1, np.int64)
        row[cycles["cycle"][chosen]] = np.arange(int(chosen.sum()))
        mine = (spans["host"] == host) & (spans["rank"] == rank)
        times = phase_times(run, spans, mine, row)
        figures = Figures(
            str(run.run.get("id", "run")), str(host), int(rank), Buckets().with_values(cycles["dur_ns"][chosen] / 1e9),
            {name: Buckets().with_values(seconds) for name, seconds in times.items()},
            cycles=kind_counts(cycle_kinds(CycleFacts.of_run(run, cycles, spans, of, mine))[0]),
            cycle_s=float(cycles["dur_ns"][chosen].mean()) / 1e9 if chosen.any() else None,
            lost=int((run.analysis.get("records") or {}).get("overwritten", 0)) if number == 0 else 0,
        )  # fmt: skip
        found.append(_acceptance(run, figures if number else figures.with_baseline(step_s, overhead), number == 0))
    return found


def _acceptance(run: Run, figures: Figures, leading: bool) -> Figures:
    """Accept length and positions of the run's report; they belong to the leading rank, all ranks agree on them."""
    found = run.analysis.get("acceptance") or {}
    if not leading or not found.get("length_tokens"):
        return figures
    sequences, length = int(found.get("sequences", 0)), float(found["length_tokens"]["point"])
    positions = []
    for place in found.get("positions", ()):
        reached, cumulative = int(place.get("reached", 0)), place.get("cumulative")
        kept = round((place.get("conditional") or 0.0) * reached)
        drafted = round(kept / cumulative) if cumulative else sequences
        positions.append(Position(drafted, reached, kept))
    return replace(
        figures, sequences=sequences, tokens=round(sequences * length), accept_length=length, positions=tuple(positions)
    )
