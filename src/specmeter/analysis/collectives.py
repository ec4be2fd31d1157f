"""Collectives of a deep window: how many, by whom served, and how much of their time is transfer and how much waiting.

A collective ends on all ranks at about the same time and lasts, on each, from that rank's arrival. So what it took on
the rank that came last is the transfer (the minimum over ranks), and what it took longer on another one that rank
waited. No setting of NCCL takes waiting away.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.analysis.collective_match import Matched, match
from specmeter.analysis.collective_words import notes_on, sentences_on
from specmeter.analysis.intervals import fresh
from specmeter.analysis.rank_clock import RankClock, fit_clocks
from specmeter.analysis.stats import Interval, mean_interval
from specmeter.trace.deep import DeepWindow
from specmeter.trace.host_clock import HostClock
from specmeter.trace.plan import PHASES, PlanIndex, phase_of

# The last rank must come so much later than the one before it, or the two count as together.
TOGETHER_NS = 500
_US, _MS = 1e3, 1e6
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Straggler:
    """The rank that came last most often: in ``percent`` of the collectives, ``behind_ms`` a cycle after the mean of
    the others."""

    host: str
    rank: int
    percent: float
    behind_ms: float


@dataclass(frozen=True)
class PhaseCollectives:
    """The collectives of one phase in a mean cycle.

    ``count`` and ``bytes`` (None: not told by every one) are a cycle's. ``ms`` is their time on the device, the mean
    over ranks, with ``transfer_ms`` and ``waiting_ms`` its parts (None with one rank's window alone); ``exposed_ms`` is
    the part during which the rank's device did nothing else. ``busy_ms`` is the device's busy time in the phase and
    ``percent`` the share of collectives in it. ``skew_us`` is how far arrivals of one collective lie apart.
    """

    phase: str
    count: float
    by_nccl: float
    bytes: float | None
    ms: Interval
    transfer_ms: float | None
    waiting_ms: Interval | None
    exposed_ms: float
    busy_ms: float
    percent: float
    waiting_percent: float | None
    skew_us: Mapping[str, float] | None
    straggler: Straggler | None

    def as_json(self) -> dict[str, Any]:
        """All fields, intervals as elsewhere."""
        fields = asdict(self)
        fields["ms"] = self.ms.as_json()
        fields["waiting_ms"] = self.waiting_ms.as_json() if self.waiting_ms else None
        return fields


@dataclass(frozen=True)
class KindCollectives:
    """Collectives of one phase, operation, backend and size: a cycle's ``count``, and the mean of one in ``us``.

    ``gb_s`` is ``bytes`` over the transfer, which for small messages says that they are bound by latency.
    """

    phase: str
    operation: str
    backend: str
    count: float
    bytes: float | None
    us: float
    transfer_us: float | None
    waiting_us: float | None
    gb_s: float | None


@dataclass(frozen=True)
class RankCollectives:
    """One rank's time in collectives in a mean cycle, how often it came last, and its host's clock."""

    host: str
    rank: int
    device: str
    ms: float
    waiting_ms: float | None
    last_percent: float | None
    clock: RankClock

    def as_json(self) -> dict[str, Any]:
        """All fields."""
        return {**asdict(self), "clock": self.clock.as_json()}


@dataclass(frozen=True)
class Collectives:
    """All of it: ``document["collectives"]``. ``cycles`` were counted on every rank, ``left_out`` on none."""

    cycles: int
    left_out: int
    phases: tuple[PhaseCollectives, ...]
    kinds: tuple[KindCollectives, ...]
    ranks: tuple[RankCollectives, ...]
    sentences: tuple[str, ...]
    notes: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """As the analysis document has it."""
        return {
            "cycles": self.cycles,
            "left_out": self.left_out,
            "phases": [row.as_json() for row in self.phases],
            "kinds": [asdict(row) for row in self.kinds],
            "ranks": [row.as_json() for row in self.ranks],
            "sentences": list(self.sentences),
            "notes": list(self.notes),
        }


def collectives(
    windows: Sequence[DeepWindow],
    index: PlanIndex,
    clocks: Mapping[str, HostClock] | None = None,
    ranks: Sequence[int] = (),
    only: Callable[[DeepWindow], Ints] | None = None,
) -> Collectives | None:
    """What the ``windows`` (one a rank) say about collectives; None without any window or any collective in them.

    ``clocks`` are the hosts' as the rings' headers have them, ``ranks`` all that the server is known to have; ``only``
    gives the cycles of a window that count, as its ring numbers them (None: all that lie wholly inside).
    """
    if not windows:
        return None
    # A window without a whole cycle says nothing, so it cannot be what the others are compared with.
    ordered = sorted(windows, key=lambda w: (w.cycle_count == 0, w.rank < 0, w.rank, w.host, w.pid))
    found = match(ordered, clocks or {}, only)
    if not len(found.cycle) and not len(found.apart):
        return None
    facts = _Facts(found, index, clocks or {})
    phases = tuple(row for phase in PHASES if (row := facts.phase(phase)) is not None)
    joined = facts.ranks()
    return Collectives(
        len(found.cycles), len(found.apart), phases, facts.kinds(), joined, sentences_on(phases, len(joined)),
        notes_on(found, joined, ranks),
    )  # fmt: skip


class _Facts:
    """Arrays of the shape (collectives, ranks), and the sums over them."""

    def __init__(self, found: Matched, index: PlanIndex, clocks: Mapping[str, HostClock]) -> None:
        self.found, self.index = found, index
        self.cycles = max(1, len(found.cycles))
        self.begin, self.length = found.column("t0_ns"), found.column("dur_ns")
        bytes_ = found.column("bytes")
        self.bytes = bytes_.max(axis=1) if bytes_.size else np.zeros(0, np.int64)
        self.phase_of = self._phases(found.point)
        self.several = len(found.windows) > 1
        self.transfer = self.length.min(axis=1) if self.length.size else np.zeros(0, np.int64)
        needs_all = np.array([kind.needs_all for kind in found.kinds] + [False])[found.kind]
        self.clocks = fit_clocks(
            [(w.host, w.rank) for w in found.windows],
            self.begin[needs_all], (self.begin + self.length)[needs_all],
            clocks, [w.clock_error_ns for w in found.windows],
        )  # fmt: skip
        onto = [clock.onto(self.begin[:, i]) for i, clock in enumerate(self.clocks)]
        arrived = np.stack(onto, axis=1)
        self.skew = arrived.max(axis=1) - arrived.min(axis=1) if len(arrived) else np.zeros(0, np.int64)
        self.last = self._last()
        self.busy, self.exposed = self._device()

    def _phases(self, point: Ints) -> Ints:
        """The phase of each plan id, as an index in PHASES."""
        names = [PHASES.index(phase_of(name)) for name in self.index.names] + [PHASES.index("other")]
        name = np.where(point >= 0, self.index.name_of[np.maximum(point, 0)], -1)
        found: Ints = np.array(names, np.int64)[name]
        return found

    def _last(self) -> Ints:
        """Which rank came last to each collective, by what it took there; -1 where two came together."""
        if not self.several or not len(self.length):
            return np.full(len(self.length), -1)
        two = np.sort(self.length, axis=1)[:, :2]
        return np.where(two[:, 1] - two[:, 0] > TOGETHER_NS, self.length.argmin(axis=1), -1)

    def _device(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Busy time of each phase, and what collectives have alone of it: ns over all cycles, the mean of the ranks."""
        busy, without = np.zeros(len(PHASES)), np.zeros(len(PHASES))
        for at, window in enumerate(self.found.windows):
            kernels = window.kernels
            keep = np.flatnonzero(self.found.counted(at))
            begin, end = kernels["t0_ns"][keep], kernels["t0_ns"][keep] + kernels["dur_ns"][keep]
            phase = self._phases(kernels["point"][keep].astype(np.int64))
            busy += np.bincount(phase, weights=fresh(begin, end, phase), minlength=len(PHASES))
            other = ~np.isin(keep, self._collective_rows(at))
            begin, end, phase = begin[other], end[other], phase[other]
            without += np.bincount(phase, weights=fresh(begin, end, phase), minlength=len(PHASES))
        ranks = max(1, len(self.found.windows))
        return busy / ranks, (busy - without) / ranks

    def _collective_rows(self, at: int) -> Ints:
        rows: Ints = self.found.row[:, at]
        return rows

    def _per_cycle(self, mine: NDArray[np.bool_], ns: NDArray[np.float64]) -> Interval:
        """The mean over cycles of the sum of ``ns`` of some collectives, ms."""
        at = np.searchsorted(self.found.cycles, self.found.cycle[mine])
        return mean_interval(np.bincount(at, weights=ns[mine], minlength=self.cycles) / _MS, "cycle")

    def phase(self, phase: str) -> PhaseCollectives | None:
        """The row of one phase; None where it has no collective."""
        number = PHASES.index(phase)
        mine = self.phase_of == number
        if not bool(mine.any()):
            return None
        mean = self.length.mean(axis=1)
        nccl = np.array([kind.by_nccl for kind in self.found.kinds])[self.found.kind]
        ms = self._per_cycle(mine, mean)
        waiting = self._per_cycle(mine, mean - self.transfer) if self.several else None
        busy = float(self.busy[number]) / self.cycles / _MS
        known = bool((self.bytes[mine] >= 0).all())
        return PhaseCollectives(
            phase, float(np.count_nonzero(mine)) / self.cycles, float(np.count_nonzero(mine & nccl)) / self.cycles,
            float(self.bytes[mine].sum()) / self.cycles if known else None, ms,
            float(self.transfer[mine].sum()) / self.cycles / _MS if self.several else None, waiting,
            float(self.exposed[number]) / self.cycles / _MS, busy, 100 * ms.point / busy if busy else 0.0,
            100 * waiting.point / ms.point if waiting and ms.point else None, self._skew(mine), self._straggler(mine),
        )  # fmt: skip

    def _skew(self, mine: NDArray[np.bool_]) -> dict[str, float] | None:
        if not self.several or any(clock.source == "unknown" for clock in self.clocks):
            return None
        p50, p95 = np.percentile(self.skew[mine], (50, 95)) / _US
        return {"p50": float(p50), "p95": float(p95), "most": float(self.skew[mine].max()) / _US}

    def _straggler(self, mine: NDArray[np.bool_]) -> Straggler | None:
        times = np.bincount(self.last[mine] + 1, minlength=1)[1:]
        if not times.sum():
            return None
        at = int(np.argmax(times))
        here = mine & (self.last == at)
        others = np.delete(self.length[here], at, axis=1).mean(axis=1)
        behind = float((others - self.length[here, at]).sum()) / self.cycles / _MS
        window = self.found.windows[at]
        return Straggler(window.host, window.rank, 100 * float(times[at]) / int(np.count_nonzero(mine)), behind)

    def kinds(self) -> tuple[KindCollectives, ...]:
        """A row for each phase, operation, backend and size, the longest first; sizes that nothing tells are one."""
        rows = []
        keys = zip(self.phase_of.tolist(), self.found.kind.tolist(), np.maximum(self.bytes, -1).tolist(), strict=True)
        for phase, kind, told in sorted(set(keys)):
            mine = (self.phase_of == phase) & (self.found.kind == kind) & (np.maximum(self.bytes, -1) == told)
            of, us = self.found.kinds[kind], float(self.length[mine].mean()) / _US
            size = float(told) if told >= 0 else None
            moved = float(self.transfer[mine].mean()) / _US
            rows.append(
                KindCollectives(
                    PHASES[phase],
                    of.operation,
                    of.backend,
                    float(np.count_nonzero(mine)) / self.cycles,
                    size,
                    us,
                    moved if self.several else None,
                    us - moved if self.several else None,
                    size / moved / 1e3 if size is not None and moved and self.several else None,
                )
            )
        return tuple(sorted(rows, key=lambda row: -row.count * row.us))

    def ranks(self) -> tuple[RankCollectives, ...]:
        """A row for each rank."""
        rows = []
        for at, window in enumerate(self.found.windows):
            total = float(self.length[:, at].sum())
            waited = (total - float(self.transfer.sum())) / self.cycles / _MS if self.several else None
            last = 100 * float((self.last == at).mean()) if self.several and len(self.last) else None
            rows.append(
                RankCollectives(
                    window.host, window.rank, window.device, total / self.cycles / _MS, waited, last, self.clocks[at]
                )
            )
        return tuple(rows)
