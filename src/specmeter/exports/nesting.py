"""Slices of one lane in the order that timeline formats want, and rows for those that do not nest."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray


def rows(t0: NDArray[np.int64], dur: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Split a lane so that in each part any two slices nest or are apart; parts are positions, outer slices first.

    One part where all of it nests, which spans of a thread do. Awaited calls of one thread may interleave; the later
    one goes to the first part where it fits.
    """
    order = np.lexsort((-dur, t0))
    parts: list[list[int]] = []
    stacks: list[list[int]] = []
    begins, ends = t0[order].tolist(), (t0 + dur)[order].tolist()
    for at, begin, end in zip(order.tolist(), begins, ends, strict=True):
        number = next((n for n, stack in enumerate(stacks) if _fits(stack, begin, end)), len(stacks))
        if number == len(stacks):
            parts.append([])
            stacks.append([])
        parts[number].append(at)
        stacks[number].append(end)
    return [np.array(part, np.int64) for part in parts]


def _fits(stack: list[int], begin: int, end: int) -> bool:
    """Whether a slice nests in the open ones of a part, ends in ``stack``; those that have ended are taken out."""
    while stack and stack[-1] <= begin:
        stack.pop()
    return not stack or stack[-1] >= end


def begin_end(t0: NDArray[np.int64], dur: NDArray[np.int64], part: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """The begins and ends of one part of ``rows`` in order of time: (time, position), the position -1 for an end."""
    open_: list[int] = []
    for at in part.tolist():
        begin, end = int(t0[at]), int(t0[at] + dur[at])
        while open_ and open_[-1] <= begin:
            yield open_.pop(), -1
        yield begin, at
        open_.append(end)
    while open_:
        yield open_.pop(), -1
