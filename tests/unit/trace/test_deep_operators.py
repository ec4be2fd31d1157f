"""Operators on the host as a device's kernels: each moment of a thread belongs to the innermost one, none twice."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specmeter.trace.deep_build import _segments

Call = tuple[int, int]


def nested(draw: st.DrawFn, begin: int, end: int, depth: int) -> list[Call]:
    """Calls between two moments that contain each other or lie apart; they may share begins and ends."""
    calls: list[Call] = []
    at = begin
    while at < end and len(calls) < 30 and draw(st.booleans()):
        first = draw(st.integers(at, end))
        last = draw(st.integers(first, end))
        calls.append((first, last))
        if depth and last > first:
            calls += nested(draw, first, last, depth - 1)
        at = last
    return calls


@st.composite
def calls(draw: st.DrawFn) -> list[Call]:
    return nested(draw, 0, 100, 3)


@given(calls())
def test_segments_are_the_innermost_calls_and_cover_all(given: list[Call]) -> None:
    # As they stand in a profile: by their begin, callers first.
    order = sorted(range(len(given)), key=lambda at: (given[at][0], -given[at][1]))
    rows = [given[at] for at in order]
    t0 = np.array([row[0] for row in rows], np.int64)
    dur = np.array([row[1] - row[0] for row in rows], np.int64)
    found = _segments(t0, dur, np.arange(len(rows)), 7)
    owner = np.full(100, -1)
    for begin, length, name in zip(found["t0_ns"], found["dur_ns"], found["name"], strict=True):
        assert length > 0 and (owner[begin : begin + length] == -1).all()
        owner[begin : begin + length] = name
    for moment in range(100):
        around = [at for at, (begin, end) in enumerate(rows) if begin <= moment < end]
        shortest = min((rows[at][1] - rows[at][0] for at in around), default=None)
        if shortest is None:
            assert owner[moment] == -1
        else:
            assert owner[moment] in around and rows[owner[moment]][1] - rows[owner[moment]][0] == shortest
    assert set(found["stream"].tolist()) <= {7}
