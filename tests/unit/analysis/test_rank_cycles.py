"""Which cycle of one rank is which of another."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from specmeter.analysis.rank_cycles import RankCycles, common_rows, cycle_lags
from specmeter.trace.host_clock import HostClock

CLOCKS = {"a": HostClock("boot-a", 10**18), "b": HostClock("boot-b", 10**18)}


def cycles(seed: int, count: int, jitter_ns: int = 300_000) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    rng = np.random.default_rng(seed)
    return 10**15 + np.cumsum(rng.integers(5_000_000 - jitter_ns, 5_000_000 + jitter_ns, count))


def seen(host: str, moments: np.ndarray[tuple[int], np.dtype[np.int64]], first: int, clock_ns: int = 0) -> RankCycles:
    return RankCycles(host, 0, first + np.arange(len(moments), dtype=np.int64), moments + clock_ns)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 999), st.integers(40, 300), st.integers(0, 20), st.integers(-50, 50), st.booleans(),
    st.integers(-(10**13), 10**13), st.sampled_from([0, 200, 5_000]),
)  # fmt: skip
def test_the_lag_is_found_on_one_machine_and_on_machines_hours_apart(
    seed: int, count: int, cut: int, lag: int, far: bool, clock_ns: int, noise_ns: int
) -> None:
    moments = cycles(seed, count)
    late = np.random.default_rng(seed + 1).integers(-noise_ns, noise_ns + 1, count)
    other = (
        seen("b", (moments + late)[cut:], 100 + lag + cut, clock_ns)
        if far
        else seen("a", moments[cut:], 100 + lag + cut)
    )
    assert cycle_lags([seen("a", moments, 100), other], CLOCKS)[1].cycles == lag


def test_a_lapped_ring_is_lined_up_by_its_end() -> None:
    moments = cycles(5, 9_000)
    lapped = seen("b", moments[8_000:], 0, 10**13)
    assert cycle_lags([seen("a", moments, 0), lapped], CLOCKS)[1].cycles == -8_000


def test_cycles_too_much_alike_are_not_guessed_but_calendars_that_agree_settle_it() -> None:
    regular = 10**15 + 5_000_000 * np.arange(100, dtype=np.int64)
    agreeing = cycle_lags([seen("a", regular, 0), seen("b", regular[3:], 7, 40_000)], CLOCKS)[1]
    assert agreeing.cycles == 4
    nothing_known = cycle_lags([seen("a", regular, 0), seen("b", regular[3:], 7)], {})[1]
    assert nothing_known.cycles is None and "alike" in nothing_known.reason


def test_a_rank_without_cycles_is_named() -> None:
    empty = RankCycles("a", 1, np.zeros(0, np.int64), np.zeros(0, np.int64))
    assert cycle_lags([seen("a", cycles(1, 20), 0), empty], CLOCKS)[1].reason == "it has no cycle"


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=6), min_size=1, max_size=6), st.integers(1, 4), st.data())
def test_rows_are_common_exactly_where_all_ranks_did_the_same(
    done: list[list[int]], ranks: int, data: st.DataObject
) -> None:
    """Dropping one call of one rank leaves that cycle out and no other."""
    cells = [np.array(sorted(4 * cycle + what for cycle, calls in enumerate(done) for what in calls), np.int64)] * ranks
    victim = data.draw(st.integers(0, ranks - 1))
    if not len(cells[victim]):
        return
    at = data.draw(st.integers(0, len(cells[victim]) - 1))
    gone = int(cells[victim][at] // 4)
    cells[victim] = np.delete(cells[victim], at)
    rows, apart = common_rows(cells, 4)
    assert apart.tolist() == ([gone] if ranks > 1 else [])
    left = [cell[row].tolist() for cell, row in zip(cells, rows, strict=True)]
    assert all(other == left[0] for other in left)
    whole = sorted(4 * cycle + what for cycle, calls in enumerate(done) for what in calls)
    assert left[0] == [cell for cell in whole if cell // 4 != gone] if ranks > 1 else len(left[0]) == len(whole) - 1
