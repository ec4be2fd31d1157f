"""Intervals of time as arrays of begins and ends, ns: unions, gaps, and overlaps with the pieces of a line."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def fresh(begin: Ints, end: Ints, group: Ints | None = None) -> Ints:
    """What each interval adds to the union of those of its ``group`` that began before it (all one group by default).

    Over a group these sum to the length of its union, so they share it out among the intervals: where several overlap,
    the time goes to the one that began first.
    """
    if not len(begin):
        return np.zeros(0, np.int64)
    number = np.zeros(len(begin), np.int64) if group is None else np.unique(group, return_inverse=True)[1]
    order = np.lexsort((begin, number))
    base = int(begin.min())
    # Groups are laid one behind another on one line, so that no interval meets those of another group.
    shift = number[order] * (int(end.max()) - base + 1) - base
    a, b = begin[order] + shift, end[order] + shift
    reach = np.maximum.accumulate(b)
    before = np.concatenate([a[:1], reach[:-1]])
    out = np.empty(len(begin), np.int64)
    out[order] = np.maximum(b - np.maximum(a, before), 0)
    return out


def union(begin: Ints, end: Ints) -> tuple[Ints, Ints]:
    """The intervals merged where they touch or overlap: disjoint, in order."""
    if not len(begin):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    order = np.argsort(begin, kind="stable")
    a, reach = begin[order], np.maximum.accumulate(end[order])
    first = np.ones(len(a), bool)
    first[1:] = a[1:] > reach[:-1]
    last = np.append(first[1:], True)
    return a[first], reach[last]


def covered(a: Ints, b: Ints, begin: Ints, end: Ints) -> Ints:
    """How much of each interval ``a``..``b`` a union of disjoint, ordered intervals covers."""
    found: Ints = _until(b, begin, end) - _until(a, begin, end)
    return found


def _until(time: Ints, begin: Ints, end: Ints) -> Ints:
    """How much of everything before ``time`` is covered."""
    total = np.concatenate([[0], np.cumsum(end - begin)])
    at = np.searchsorted(begin, time, side="right")
    if not len(begin):
        return np.zeros(len(time), np.int64)
    ahead = np.where(at > 0, np.maximum(end[np.maximum(at - 1, 0)] - time, 0), 0)
    found: Ints = total[at] - ahead
    return found


def spans_of(begin: Ints, end: Ints, group: Ints, count: int) -> tuple[Ints, Ints]:
    """First begin and last end of each group 0..count-1; 0 and 0 for an empty one."""
    first = np.full(count, np.iinfo(np.int64).max)
    last = np.full(count, np.iinfo(np.int64).min)
    np.minimum.at(first, group, begin)
    np.maximum.at(last, group, end)
    empty = last < first
    return np.where(empty, 0, first), np.where(empty, 0, last)


def pieces(a: Ints, b: Ints, edges: Ints) -> tuple[Ints, Ints, Ints]:
    """Cut each interval ``a``..``b`` at ``edges`` (ascending): (interval, piece, ns), one entry a part that is not
    empty.

    Piece i reaches from edges[i-1] to edges[i]; piece 0 is all before the first edge and piece len(edges) all after the
    last, so that the parts of an interval sum to its length.
    """
    first = np.searchsorted(edges, a, side="right")
    last = np.searchsorted(edges, b, side="left")
    count = np.where(b > a, last - first + 1, 0)
    interval = np.repeat(np.arange(len(a)), count)
    start = np.concatenate([[0], np.cumsum(count)[:-1]]) if len(count) else count
    piece = np.arange(len(interval)) - np.repeat(start, count) + np.repeat(first, count)
    line = np.concatenate([[np.iinfo(np.int64).min], edges, [np.iinfo(np.int64).max]])
    ns = np.minimum(b[interval], line[piece + 1]) - np.maximum(a[interval], line[piece])
    return interval, piece, ns
