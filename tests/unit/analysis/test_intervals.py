"""Intervals against sets of moments: unions, what each adds, cover, and pieces that lose nothing."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from specmeter.analysis.intervals import covered, fresh, pieces, spans_of, union

Pairs = list[tuple[int, int]]
LISTS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 15)), max_size=25)


def arrays(listed: Pairs) -> tuple[np.ndarray, np.ndarray]:
    begin = np.array([a for a, _ in listed], np.int64)
    return begin, begin + np.array([b for _, b in listed], np.int64)


def moments(begin: np.ndarray, end: np.ndarray) -> set[int]:
    return {t for a, b in zip(begin.tolist(), end.tolist(), strict=True) for t in range(a, b)}


@given(LISTS, st.lists(st.integers(0, 3), min_size=25, max_size=25))
def test_what_each_adds_sums_to_the_union_of_its_group(listed: Pairs, groups: list[int]) -> None:
    begin, end = arrays(listed)
    assert int(fresh(begin, end).sum()) == len(moments(begin, end))
    group = np.array(groups[: len(listed)], np.int64)
    added = fresh(begin, end, group)
    for number in range(4):
        mine = group == number
        assert int(added[mine].sum()) == len(moments(begin[mine], end[mine]))
    assert (added >= 0).all() and (added <= end - begin).all()


@given(LISTS)
def test_a_union_is_disjoint_in_order_and_covers_the_same(listed: Pairs) -> None:
    a, b = union(*arrays(listed))
    assert (a[1:] > b[:-1]).all() and (a <= b).all()
    assert moments(a, b) == moments(*arrays(listed))


@given(LISTS, LISTS)
def test_cover_counts_the_moments_that_both_have(listed: Pairs, others: Pairs) -> None:
    a, b = arrays(listed)
    found = covered(a, b, *union(*arrays(others)))
    there = moments(*arrays(others))
    assert found.tolist() == [len(set(range(x, y)) & there) for x, y in zip(a.tolist(), b.tolist(), strict=True)]


@settings(max_examples=200)
@given(LISTS, st.lists(st.integers(-5, 80), max_size=15))
def test_pieces_sum_to_the_intervals_and_lie_between_their_edges(listed: Pairs, at: list[int]) -> None:
    begin, end = arrays(listed)
    edges = np.unique(np.array(at, np.int64))
    interval, piece, ns = pieces(begin, end, edges)
    assert np.bincount(interval, weights=ns, minlength=len(begin)).tolist() == (end - begin).tolist()
    assert (ns > 0).all()
    for i, p, length in zip(interval.tolist(), piece.tolist(), ns.tolist(), strict=True):
        low = edges[p - 1] if p else -(10**9)
        high = edges[p] if p < len(edges) else 10**9
        inside = moments(begin[i : i + 1], end[i : i + 1]) & set(range(int(max(low, -10)), int(min(high, 200))))
        assert len(inside) == length


def test_spans_of_empty_groups_are_nothing() -> None:
    first, last = spans_of(np.array([5, 3, 9]), np.array([6, 8, 12]), np.array([0, 0, 2]), 3)
    assert first.tolist() == [3, 0, 9] and last.tolist() == [8, 0, 12]
