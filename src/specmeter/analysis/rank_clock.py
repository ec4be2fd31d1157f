"""All ranks on one clock.

Processes of one machine share its monotonic clock. Across machines the rings' headers give a first guess, which is as
wrong as the machines' calendars; collectives make it exact. A collective in which every rank needs the data of all
others cannot end on any rank before it has begun on every one. So each of them bounds the offset between two clocks
from both sides, by what it took, and a straight line (offset and drift) is laid through the ends, which nearly coincide
(Theil-Sen for the slope). The error bound is how far any other line that keeps all those bounds lies from it: lines
between hulls, as in Zhang, Liu and Xia, Clock synchronization algorithms for network measurements (INFOCOM 2002). It
holds as long as the clocks' rates stay constant over the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.trace.host_clock import HostClock, calendar_shift, same_clock

FEWEST = 8
# Quartz is within 100 ppm; what is beyond five times that is no drift.
MOST_DRIFT = 5e-4
# A slope counts when it stands so many standard errors off zero.
SURE = 4.0
_SLOPE_POINTS = 400
_ROUNDS = 60
# Calendars further apart than this are worth a word: NTP keeps them within milliseconds.
_TELL_NS = 1_000_000_000

SHARED, COLLECTIVES, CALENDAR, UNKNOWN = "shared", "collectives", "calendar", "unknown"


@dataclass(frozen=True)
class RankClock:
    """How one rank's host clock maps to that of the first rank's host.

    Add ``offset_ns`` and ``drift`` (ns a ns) for each ns after ``middle_ns``, a moment of its own clock. ``error_ns``
    bounds how wrong that is inside the recording (None: nobody knows). ``source``: ``shared`` (one machine),
    ``collectives``, ``calendar`` (the headers alone) or ``unknown`` (taken as equal). ``note`` says what a report has
    to say of it.
    """

    host: str
    rank: int
    offset_ns: int
    drift: float
    middle_ns: int
    error_ns: int | None
    source: str
    note: str = ""

    def onto(self, moments_ns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Moments of this rank's clock on the first rank's."""
        drifted = np.rint(self.drift * (moments_ns - self.middle_ns)).astype(np.int64)
        moved: NDArray[np.int64] = moments_ns + self.offset_ns + drifted
        return moved

    def as_json(self) -> dict[str, Any]:
        """All fields; the drift in parts per million."""
        fields = asdict(self)
        fields["drift_ppm"] = 1e6 * fields.pop("drift")
        return fields


def saved_clocks(analysis: Mapping[str, Any]) -> dict[tuple[str, int], RankClock]:
    """The clocks of a saved analysis by (host, rank), as far as collectives joined them; empty for a single rank."""
    rows = (analysis.get("rank_skew") or {}).get("clocks") or []
    names = [name for name in RankClock.__dataclass_fields__ if name != "drift"]
    found = {}
    for row in rows:
        fields = {name: row[name] for name in names if name in row}
        clock = RankClock(**fields, drift=row["drift_ppm"] / 1e6)
        if clock.source == COLLECTIVES:
            found[(clock.host, clock.rank)] = clock
    return found


def fit_clocks(
    ranks: Sequence[tuple[str, int]],
    begin_ns: NDArray[np.int64],
    end_ns: NDArray[np.int64],
    clocks: Mapping[str, HostClock],
    device_error_ns: Sequence[int] = (),
) -> tuple[RankClock, ...]:
    """The clock of each of ``ranks`` (host, rank) against the first one's.

    ``begin_ns`` and ``end_ns`` have the shape (collectives, ranks): the same collectives on every rank, each in which
    no rank can end before all have begun, on each rank's own clock. ``device_error_ns`` bounds how far each rank's
    moments are off its host's clock, where they were taken on a device.
    """
    errors = list(device_error_ns) or [0] * len(ranks)
    groups: dict[int, list[int]] = {}
    for at, (host, _rank) in enumerate(ranks):
        leader = next((lead for lead in groups if same_clock(clocks, ranks[lead][0], host)), at)
        groups.setdefault(leader, []).append(at)
    found: dict[int, RankClock] = {}
    for leader, members in groups.items():
        clock = _machine(ranks, begin_ns, end_ns, groups[0], members, clocks, leader == 0)
        for at in members:
            own = errors[at] + (errors[0] if at else 0)
            error = None if clock.error_ns is None else clock.error_ns + own
            host, rank = ranks[at]
            note = clock.note or _within(begin_ns[:, members], end_ns[:, members], max(errors[m] for m in members))
            found[at] = replace(clock, host=host, rank=rank, error_ns=error, note=note)
    return tuple(found[at] for at in range(len(ranks)))


def _machine(
    ranks: Sequence[tuple[str, int]],
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
    reference: list[int],
    members: list[int],
    clocks: Mapping[str, HostClock],
    is_first: bool,
) -> RankClock:
    """The clock of one machine's ranks against that of the ``reference`` ranks' machine."""
    host, rank = ranks[members[0]]
    if is_first:
        return RankClock(host, rank, 0, 0.0, 0, 0, SHARED)
    shift = calendar_shift(clocks, host, ranks[0][0])
    if len(begin) < FEWEST:
        note = f"{len(begin)} collectives are too few to compare the clock of {host}"
        if shift is None:
            return RankClock(host, rank, 0, 0.0, 0, None, UNKNOWN, f"{note}, whose calendar was not recorded")
        return RankClock(host, rank, shift, 0.0, 0, None, CALENDAR, f"{note}: it is as right as the calendars are")
    last = np.median(end[:, members], axis=1).astype(np.int64)
    # No rank of one side can end before the last of the other side has begun.
    lower = begin[:, reference].max(axis=1) - end[:, members].min(axis=1)
    upper = end[:, reference].min(axis=1) - begin[:, members].max(axis=1)
    between = np.median(end[:, reference], axis=1).astype(np.int64) - last
    return _fitted(host, rank, last, between, lower, upper, shift)


def _fitted(
    host: str,
    rank: int,
    at: NDArray[np.int64],
    between: NDArray[np.int64],
    lower: NDArray[np.int64],
    upper: NDArray[np.int64],
    shift: int | None,
) -> RankClock:
    """The line through ``between`` over the moments ``at``, moved into its bounds where those leave room."""
    middle = int(np.median(at))
    offset = int(np.median(between))
    # Small numbers from here on: nanoseconds since boot, or since 1970, are beyond a float's 53 bits.
    x, y = (at - middle).astype(float), (between - offset).astype(float)
    room = _Room(x, (lower - offset).astype(float), (upper - offset).astype(float))
    slope = _slope(x, y)
    if room.at(slope)[0] > room.at(slope)[1]:
        slope = room.widest()
    low, high = room.at(slope)
    lift = float(np.median(y - slope * x))
    error: int | None = None
    note = ""
    if low <= high:
        lift = min(max(lift, low), high)
        error = int(np.ceil(room.furthest(slope, lift)))
        if shift is not None and abs(offset - shift) > _TELL_NS:
            apart = abs(offset - shift) / 1e9
            note = f"the calendars of {host} and the first host differ by {apart:.1f} s; collectives joined the clocks"
    else:
        note = (
            f"collectives contradict each other about the clock of {host} by {(low - high) / 1e3:.1f} us: its rate "
            "changed, or moments were taken on clocks that do not agree"
        )
    return RankClock(host, rank, offset + round(lift), slope, middle, error, COLLECTIVES, note)


@dataclass(frozen=True)
class _Room:
    """Where collectives leave room for a line: above every ``low`` and below every ``high``, ns, at moments ``x``."""

    x: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]

    def at(self, slope: float) -> tuple[float, float]:
        """The lowest and the highest line of that slope, at x = 0; in the wrong order where there is none."""
        drop = slope * self.x
        return float((self.low - drop).max()), float((self.high - drop).min())

    def widest(self) -> float:
        """The slope with the most room."""
        return _most(lambda slope: self.at(slope)[1] - self.at(slope)[0], -MOST_DRIFT, MOST_DRIFT)

    def furthest(self, slope: float, lift: float) -> float:
        """How far any line that fits lies from that of ``slope`` and ``lift``, at most, inside the recording."""
        first, last = self._edge(slope, -MOST_DRIFT), self._edge(slope, MOST_DRIFT)
        found = []
        for end in (float(self.x.min()), float(self.x.max())):
            ours = lift + slope * end
            top = _most(partial(self._top, end=end), first, last)
            bottom = _most(partial(self._bottom, end=end), first, last)
            found += [self._top(top, end) - ours, self._bottom(bottom, end) + ours]
        return max(found)

    def _top(self, slope: float, end: float) -> float:
        return self.at(slope)[1] + slope * end

    def _bottom(self, slope: float, end: float) -> float:
        return -self.at(slope)[0] - slope * end

    def _edge(self, inside: float, towards: float) -> float:
        """The slope furthest ``towards`` an end that still leaves room; ``inside`` does."""
        if self.at(towards)[0] <= self.at(towards)[1]:
            return towards
        good, bad = inside, towards
        for _ in range(_ROUNDS):
            half = (good + bad) / 2
            low, high = self.at(half)
            good, bad = (half, bad) if low <= high else (good, half)
        return good


def _most(of: Callable[[float], float], first: float, last: float) -> float:
    """Where a concave function is greatest between two arguments (golden section would save little here)."""
    for _ in range(_ROUNDS):
        third = (last - first) / 3
        if of(first + third) < of(last - third):
            first += third
        else:
            last -= third
    return (first + last) / 2


def _slope(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """The median of the slopes between pairs (Theil and Sen), 0 where it does not stand clearly off it."""
    step = max(1, len(x) // _SLOPE_POINTS)
    u, v = x[::step], y[::step]
    i, j = np.triu_indices(len(u), 1)
    run = u[j] - u[i]
    apart = np.abs(run) > 0
    spread = float(np.std(x))
    if not bool(apart.any()) or spread == 0:
        return 0.0
    slope = float(np.median((v[j] - v[i])[apart] / run[apart]))
    rest = y - slope * x
    noise = 1.4826 * float(np.median(np.abs(rest - np.median(rest))))
    # Of the slope by least squares, with a robust spread; Theil-Sen's is no larger by much.
    error = noise / (spread * np.sqrt(len(x)))
    return slope if SURE * error < abs(slope) <= MOST_DRIFT else 0.0


def _within(begin: NDArray[np.int64], end: NDArray[np.int64], device_error_ns: int) -> str:
    """What to say where ranks of one machine ended before another one of them had begun: their device clocks differ."""
    if begin.shape[1] < 2 or not len(begin):
        return ""
    early = int((begin.max(axis=1) - end.min(axis=1)).max())
    if early <= 2 * device_error_ns:
        return ""
    return (
        f"a collective ended on one rank {early / 1e3:.1f} us before it began on another of the same machine: their "
        "devices' times differ by at least that"
    )
