"""Which cycle of one rank is which of another: each process counts its own, from when it was armed or its ring begins.

On one machine the clocks tell. Across machines the lengths of the cycles do: ranks in tensor parallel wait for each
other in every cycle, so that their cycles are equally long, whatever their clocks say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specmeter.trace.host_clock import HostClock, calendar_shift, same_clock

# Cycles that must overlap before their lengths say anything, and how far counts are taken to be apart at most.
FEWEST = 8
FURTHEST = 256
# The second best place must be so many times worse than the best, or the lengths are too much alike to tell.
CLEARLY = 2.0


@dataclass(frozen=True)
class RankCycles:
    """One rank's cycles: ``number`` as it counts them, rising, and one moment of each on its host's clock, ns."""

    host: str
    rank: int
    number: NDArray[np.int64]
    at_ns: NDArray[np.int64]


@dataclass(frozen=True)
class Lag:
    """What to take off a rank's cycle numbers for those of the first rank; None with the ``reason`` it is not known."""

    cycles: int | None
    reason: str = ""


def cycle_lags(ranks: Sequence[RankCycles], clocks: Mapping[str, HostClock]) -> tuple[Lag, ...]:
    """The lag of each rank against the first, which has 0.

    Of the ranks on another machine one is compared with the first by lengths, and the rest with that one by time.
    """
    found: list[Lag] = []
    leaders: list[int] = []
    for at, rank in enumerate(ranks):
        leader = next((lead for lead in leaders if same_clock(clocks, ranks[lead].host, rank.host)), None)
        if not len(rank.number):
            found.append(Lag(None, "it has no cycle"))
        elif leader is not None:
            found.append(_through(found[leader], _by_time(ranks[leader], rank, 0)))
        else:
            # A machine whose ranks so far could not be joined gets another chance with the next one.
            lag = Lag(0) if at == 0 else _far(ranks[0], rank, clocks)
            leaders += [at] if lag.cycles is not None else []
            found.append(lag)
    return tuple(found)


def _through(leader: Lag, own: Lag) -> Lag:
    return own if own.cycles is None or leader.cycles is None else Lag(leader.cycles + own.cycles)


def _far(first: RankCycles, other: RankCycles, clocks: Mapping[str, HostClock]) -> Lag:
    """The lag of a rank on another machine than the first one's."""
    if not len(first.number):
        return Lag(None, "the first rank has no cycle to compare with")
    found = _by_lengths(first, other, clocks)
    if found.cycles is not None:
        return found
    shift = calendar_shift(clocks, other.host, first.host)
    if shift is not None:
        by_calendar = _by_time(first, other, shift)
        if by_calendar.cycles is not None:
            return by_calendar
    return found


def _by_time(first: RankCycles, other: RankCycles, shift_ns: int) -> Lag:
    """From moments on one clock: the lag at which cycles of one number lie closest."""
    moments = other.at_ns + shift_ns
    right = np.clip(np.searchsorted(first.at_ns, moments), 1, max(1, len(first.at_ns) - 1))
    right = np.minimum(right, len(first.at_ns) - 1)
    left = np.maximum(right - 1, 0)
    nearer = np.where(moments - first.at_ns[left] <= first.at_ns[right] - moments, left, right)
    off = np.abs(moments - first.at_ns[nearer])
    length = _usual(first)
    close = off <= length / 2
    if not bool(close.any()):
        return Lag(None, "none of its cycles runs at the time of one of the first rank's")
    lags, count = np.unique((other.number - first.number[nearer])[close], return_counts=True)
    best = int(np.argmax(count))
    if count[best] * 2 <= count.sum():
        return Lag(None, "its cycles keep no step with the first rank's")
    return Lag(int(lags[best]))


def _usual(rank: RankCycles) -> float:
    return float(np.median(np.diff(rank.at_ns))) if len(rank.at_ns) > 1 else float("inf")


def _by_lengths(first: RankCycles, other: RankCycles, clocks: Mapping[str, HostClock]) -> Lag:
    """From the lengths of the cycles: the lag at which those of one number differ least (median difference)."""
    mine, theirs = _lengths(first), _lengths(other)
    if min(len(mine[0]), len(theirs[0])) < FEWEST:
        return Lag(None, f"fewer than {FEWEST} cycles on another machine cannot be told apart by their lengths")
    fewest = max(FEWEST, min(len(mine[0]), len(theirs[0])) // 4)
    scored = []
    for lag in sorted(_candidates(first, other, clocks)):
        found = _difference(mine, theirs, lag, fewest)
        if found is not None:
            scored.append((found, lag))
    if not scored:
        return Lag(None, "its cycles and the first rank's do not overlap")
    scored.sort()
    if len(scored) > 1 and scored[1][0] < CLEARLY * max(scored[0][0], 1.0):
        return Lag(None, "its cycles are too much alike to tell which is which on a machine with another clock")
    return Lag(scored[0][1])


def _lengths(rank: RankCycles) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Number and length of each cycle that the next one follows."""
    follows = np.diff(rank.number) == 1
    return rank.number[:-1][follows], np.diff(rank.at_ns)[follows]


def _candidates(first: RankCycles, other: RankCycles, clocks: Mapping[str, HostClock]) -> set[int]:
    """Lags to look at: about equal numbers, equal ends (recording stops everywhere at once), and what calendars say."""
    centres = [0, int(other.number[-1] - first.number[-1]), int(other.number[0] - first.number[0])]
    shift = calendar_shift(clocks, other.host, first.host)
    if shift is not None:
        by_calendar = _by_time(first, other, shift)
        centres += [by_calendar.cycles] if by_calendar.cycles is not None else []
    return {lag for centre in centres for lag in range(centre - FURTHEST, centre + FURTHEST + 1)}


def _difference(
    mine: tuple[NDArray[np.int64], NDArray[np.int64]],
    theirs: tuple[NDArray[np.int64], NDArray[np.int64]],
    lag: int,
    fewest: int,
) -> float | None:
    """Median difference of the lengths of cycles that ``lag`` makes one, ns; None where fewer than ``fewest`` are."""
    at = np.searchsorted(mine[0], theirs[0] - lag)
    at = np.minimum(at, len(mine[0]) - 1)
    both = mine[0][at] == theirs[0] - lag
    if int(np.count_nonzero(both)) < fewest:
        return None
    return float(np.median(np.abs(mine[1][at[both]] - theirs[1][both])))


def common_rows(
    cells: Sequence[NDArray[np.int64]], per_cycle: int
) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
    """The positions in each rank's ``cells`` of what all ranks did alike, and the cycles in which they did not.

    A cell is (cycle * ``per_cycle`` + what was done), rising; things of one cell stand in order of time. A cycle in
    which some cell occurs more often on one rank than on another is left out as a whole: nobody can say which is which.
    """
    if not cells:
        return [], np.zeros(0, np.int64)
    every = np.unique(np.concatenate(cells))
    counts = np.stack([np.bincount(np.searchsorted(every, cell), minlength=len(every)) for cell in cells])
    apart = np.unique(every[np.any(counts != counts[0], axis=0)] // per_cycle)
    return [np.flatnonzero(~np.isin(cell // per_cycle, apart)) for cell in cells], apart
