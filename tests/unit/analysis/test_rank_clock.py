"""Clocks of several hosts joined by collectives, against clocks whose offset and drift are known."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specmeter.analysis.rank_clock import CALENDAR, COLLECTIVES, SHARED, UNKNOWN, fit_clocks
from specmeter.trace.host_clock import HostClock, calendar_shift, same_clock

HOUR_NS = 3_600_000_000_000
RANKS = [("a", 0), ("a", 1), ("b", 2), ("b", 3)]
CLOCKS = {"a": HostClock("boot-a", 10**18), "b": HostClock("boot-b", 10**18)}


@dataclass(frozen=True)
class World:
    """Collectives of four ranks on two hosts: moments on the true clock, which is host a's, and as each reads them."""

    begin: NDArray[np.int64]
    end: NDArray[np.int64]
    true_begin: NDArray[np.int64]


def world(seed: int, count: int, offset_ns: int, drift: float, gap_ns: int = 500_000) -> World:
    """Ranks come up to 300 us apart; a collective then takes 20 us and ends within 3 us on all."""
    rng = np.random.default_rng(seed)
    start = 10**15 + np.cumsum(rng.integers(gap_ns // 2, 2 * gap_ns, count))
    begin = start[:, None] + rng.integers(0, 300_000, (count, 4))
    end = begin.max(axis=1)[:, None] + 20_000 + rng.integers(0, 3_000, (count, 4))

    def as_read(true: NDArray[np.int64]) -> NDArray[np.int64]:
        read = true.copy()
        read[:, 2:] -= offset_ns + np.rint(drift * (true[:, 2:] - start[0])).astype(np.int64)
        return read

    return World(as_read(begin), as_read(end), begin)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(8, 1_500), st.integers(-2 * HOUR_NS, 2 * HOUR_NS), st.floats(-1e-4, 1e-4))
def test_offset_and_drift_are_recovered_within_the_stated_bound(
    seed: int, count: int, offset_ns: int, drift: float
) -> None:
    seen = world(seed, count, offset_ns, drift)
    found = fit_clocks(RANKS, seen.begin, seen.end, CLOCKS)
    assert [clock.source for clock in found] == [SHARED, SHARED, COLLECTIVES, COLLECTIVES]
    for at in (2, 3):
        wrong = np.abs(found[at].onto(seen.begin[:, at]) - seen.true_begin[:, at]).max()
        bound = found[at].error_ns
        # The bound is what one collective takes on the rank that came last, at most, and a tenth of it is the usual.
        assert bound is not None and wrong <= bound <= 40_000


def test_a_long_recording_is_exact_to_the_ends_scatter() -> None:
    seen = world(1, 3_000, HOUR_NS + 12_345, 40e-6)
    found = fit_clocks(RANKS, seen.begin, seen.end, CLOCKS)[2]
    assert np.abs(found.onto(seen.begin[:, 2]) - seen.true_begin[:, 2]).max() < 1_000
    assert abs(found.drift - 40e-6) < 1e-6
    assert "differ by 3600.0 s" in found.note


def test_hosts_an_hour_apart_without_collectives_keep_the_calendar_and_claim_no_bound() -> None:
    nothing = np.zeros((0, 4), np.int64)
    clocks = {"a": HostClock("boot-a", 10**18), "b": HostClock("boot-b", 10**18 + HOUR_NS)}
    found = fit_clocks(RANKS, nothing, nothing, clocks)
    assert (found[2].source, found[2].offset_ns, found[2].error_ns) == (CALENDAR, HOUR_NS, None)
    unknown = fit_clocks(RANKS, nothing, nothing, {"a": clocks["a"]})[2]
    assert (unknown.source, unknown.offset_ns, unknown.error_ns) == (UNKNOWN, 0, None)
    assert "too few" in unknown.note


def test_the_bound_covers_a_host_on_which_collectives_always_end_late() -> None:
    """Nothing tells late ends from a clock that is behind, so the line is wrong by them, and the bound must say so."""
    seen = world(6, 500, 77_777, 10e-6)
    late = 15_000 * np.array([0, 0, 1, 1])
    found = fit_clocks(RANKS, seen.begin, seen.end + late, CLOCKS)[2]
    wrong = np.abs(found.onto(seen.begin[:, 2]) - seen.true_begin[:, 2]).max()
    assert found.error_ns is not None and 10_000 < wrong <= found.error_ns


def test_a_rate_that_changes_is_reported_and_no_bound_given() -> None:
    seen = world(3, 400, 0, 0.0)
    jump = np.where(np.arange(400) < 200, 0, 5_000_000)[:, None] * np.array([0, 0, 1, 1])
    found = fit_clocks(RANKS, seen.begin + jump, seen.end + jump, CLOCKS)[2]
    assert found.error_ns is None
    assert "contradict" in found.note


def test_names_of_one_machine_share_its_clock() -> None:
    clocks = {"pod-1": HostClock("boot", 5), "pod-2": HostClock("boot", 9), "far": HostClock("other", 7)}
    assert same_clock(clocks, "pod-1", "pod-2") and not same_clock(clocks, "pod-1", "far")
    assert calendar_shift(clocks, "pod-2", "pod-1") == 0 and calendar_shift(clocks, "far", "pod-1") == 2
    assert calendar_shift(clocks, "nobody", "pod-1") is None


def test_device_clocks_of_one_machine_that_disagree_are_named() -> None:
    seen = world(4, 50, 0, 0.0)
    early = np.array([0, 0, 0, 90_000])
    ranks = [("a", rank) for rank in range(4)]
    found = fit_clocks(ranks, seen.begin - early, seen.end - early, CLOCKS, [1_000] * 4)
    assert all("of the same machine" in clock.note for clock in found)
    assert found[1].error_ns == 2_000
    clean = fit_clocks(ranks, seen.begin, seen.end, CLOCKS, [1_000] * 4)
    assert not any(clock.note for clock in clean)
