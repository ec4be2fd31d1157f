"""The same collective on every rank: matched by its place among those of one cycle, point and operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specmeter.analysis.collective_kernels import CollectiveKernel, collective_of
from specmeter.analysis.rank_cycles import Lag, RankCycles, common_rows, cycle_lags
from specmeter.trace.deep import KERNEL, DeepWindow
from specmeter.trace.host_clock import HostClock

_POINTS = 1 << 16


@dataclass(frozen=True)
class Matched:
    """Collectives that every one of ``windows`` has.

    One row a collective, in the order of (cycle, point, operation, time); columns go with ``windows``. ``cycle`` is
    the first window's number, ``point`` a plan's id (-1 none), ``kind`` an index in ``kinds``; ``row`` is where the
    kernel stands in each window. ``cycles`` are the first window's numbers of all cycles that count, also of those
    without a collective; ``lags`` is what to add to them for each window's own. ``apart`` are cycles that were left
    out because the ranks ran different collectives in them, ``unmatched`` windows that could not be joined at all,
    with the reason, and ``split`` how many rows ran by another backend on some rank.
    """

    windows: tuple[DeepWindow, ...]
    lags: tuple[int, ...]
    cycles: NDArray[np.int64]
    apart: NDArray[np.int64]
    unmatched: tuple[tuple[DeepWindow, str], ...]
    kinds: tuple[CollectiveKernel, ...]
    cycle: NDArray[np.int64]
    point: NDArray[np.int64]
    kind: NDArray[np.int64]
    row: NDArray[np.int64]
    split: int

    def column(self, name: str) -> NDArray[np.int64]:
        """A column of the kernels, as int64 of the shape (collectives, windows)."""
        picked = [w.kernels[name][self.row[:, i]].astype(np.int64) for i, w in enumerate(self.windows)]
        stacked: NDArray[np.int64] = np.stack(picked, axis=1)
        return stacked

    def counted(self, at: int) -> NDArray[np.bool_]:
        """Which of all kernels of window ``at`` were launched by cycles that count."""
        found: NDArray[np.bool_] = np.isin(self.windows[at].kernels["cycle"] - self.lags[at], self.cycles)
        return found


def match(
    windows: Sequence[DeepWindow],
    clocks: Mapping[str, HostClock],
    only: Callable[[DeepWindow], NDArray[np.int64]] | None = None,
) -> Matched:
    """Match the collectives of one or more windows, one a rank; the first one's cycle numbers are taken for all.

    ``only`` gives the cycles of the first window that count (None: all that lie wholly inside).
    """
    kinds, found = _kinds(windows)
    lags = list(cycle_lags([_moments(w, of) for w, of in zip(windows, found, strict=True)], clocks))
    moves = [bool((of[w.kernels["name"]] >= 0).any()) for w, of in zip(windows, found, strict=True)]
    if any(moves):
        # An engine's core, or a process beside the ranks: it cannot be asked to have what it never runs.
        lags = [lag if moving else Lag(None, "it holds no collective") for lag, moving in zip(lags, moves, strict=True)]
    good = [i for i, lag in enumerate(lags) if lag.cycles is not None]
    bad = tuple((windows[i], lag.reason) for i, lag in enumerate(lags) if lag.cycles is None)
    if not good:
        none = np.zeros(0, np.int64)
        return Matched((), (), none, none, bad, kinds, none, none, none, np.zeros((0, 0), np.int64), 0)
    joined = [windows[i] for i in good]
    shifts = [lag.cycles for lag in lags if lag.cycles is not None]
    # The window that the lags are against may have been left out.
    shifts = [lag - shifts[0] for lag in shifts]
    low = max((w.cycles[0] - lag for w, lag in zip(joined, shifts, strict=True)), default=0)
    high = min((w.cycles[1] - lag for w, lag in zip(joined, shifts, strict=True)), default=-1)
    operations = sorted({kind.operation for kind in kinds})
    code = np.array([operations.index(kind.operation) for kind in kinds] + [0], np.int64)
    per_cycle = _POINTS * max(1, len(operations))
    taken = [
        _cells(window, lag, found[at], code, (low, high), per_cycle)
        for window, lag, at in zip(joined, shifts, good, strict=True)
    ]
    wanted = np.arange(low, high + 1, dtype=np.int64)
    if only is not None:
        wanted = np.intersect1d(wanted, only(joined[0]))
        mine = [np.isin(cell // per_cycle + low, wanted) for cell, _row in taken]
        taken = [(cell[keep], row[keep]) for (cell, row), keep in zip(taken, mine, strict=True)]
    rows, apart = common_rows([cell for cell, _row in taken], per_cycle)
    row = np.stack([own[keep] for (_cell, own), keep in zip(taken, rows, strict=True)], axis=1)
    cell = taken[0][0][rows[0]]
    by_rank = [found[at][w.kernels["name"][row[:, i]]] for i, (w, at) in enumerate(zip(joined, good, strict=True))]
    return Matched(
        tuple(joined), tuple(shifts), np.setdiff1d(wanted, apart + low), apart + low, bad, kinds,
        cell // per_cycle + low, cell % per_cycle // max(1, len(operations)) - 1, by_rank[0], row,
        int(np.count_nonzero(np.any([other != by_rank[0] for other in by_rank], axis=0))),
    )  # fmt: skip


def _kinds(windows: Sequence[DeepWindow]) -> tuple[tuple[CollectiveKernel, ...], list[NDArray[np.int64]]]:
    """The kinds of collectives, and for each window the kind of each of its kernels' names (-1: no collective)."""
    kinds: dict[CollectiveKernel, int] = {}
    found = []
    for window in windows:
        of = np.full(len(window.names), -1, np.int64)
        for at, name in enumerate(window.names):
            kind = collective_of(name)
            if kind is not None:
                of[at] = kinds.setdefault(kind, len(kinds))
        found.append(of)
    return tuple(kinds), found


def _moments(window: DeepWindow, kind_of: NDArray[np.int64]) -> RankCycles:
    """The end of each cycle's last collective (or last kernel, without any), by which cycles can be compared."""
    kernels = window.kernels
    at = np.flatnonzero(window.inside() & (kernels["kind"] == KERNEL))
    of = at[kind_of[kernels["name"][at]] >= 0] if len(at) else at
    at = of if len(of) else at
    number, which = np.unique(kernels["cycle"][at], return_inverse=True)
    last = np.full(len(number), np.iinfo(np.int64).min)
    np.maximum.at(last, which, kernels["t0_ns"][at] + kernels["dur_ns"][at])
    return RankCycles(window.host, window.rank, number.astype(np.int64), last)


def _cells(
    window: DeepWindow,
    lag: int,
    kind_of: NDArray[np.int64],
    operation: NDArray[np.int64],
    cycles: tuple[int, int],
    per_cycle: int,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """One number for (cycle, point, operation) of each collective in ``cycles``, rising, and its row in the window."""
    kernels = window.kernels
    cycle = kernels["cycle"] - lag
    at = np.flatnonzero((kernels["kind"] == KERNEL) & (cycle >= cycles[0]) & (cycle <= cycles[1]))
    at = at[kind_of[kernels["name"][at]] >= 0] if len(at) else at
    place = (cycle[at].astype(np.int64) - cycles[0]) * _POINTS + kernels["point"][at].astype(np.int64) + 1
    cell = place * (per_cycle // _POINTS) + operation[kind_of[kernels["name"][at]]]
    order = np.argsort(cell, kind="stable")
    return cell[order], at[order].astype(np.int64)
