"""Which cycles have the probes: alike on all ranks, by chance, and never one in which old code still runs."""

from __future__ import annotations

import threading
from types import FunctionType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specmeter.runtime import layout
from specmeter.runtime.mix import IN, MIXED, MOST_WAITS, OUT, Mixer, drawn


class Place:
    """As much of a swap as the mixer uses, for a function whose probed code gives another result."""

    def __init__(self, function: FunctionType, probed: FunctionType) -> None:
        self.qualname = function.__qualname__
        self.functions, self.originals = [function], [function.__code__]
        self.probed, self.cycle_only = probed.__code__.replace(co_name=function.__name__), None
        self.state = "in"
        function.__code__ = self.probed


class Rank:
    """One process's mixer under an engine's loop: ``marks`` are (ring cycle, state), ``states`` that of each number."""

    def __init__(self, seed: int, permille: int, ring_cycle: int, *places: Place, threads: Any = tuple) -> None:
        self.number: int | None = None
        self.cycle, self.state = ring_cycle, -1
        self.states: dict[int, int] = {}
        self.mixer = Mixer(
            lambda: list(places), self._write, seed, permille, self._take, threads  # type: ignore[arg-type, return-value]
        )  # fmt: skip
        self.mixer.begin()

    def run(self, number: int) -> int:
        """One cycle of the engine, which says its own number when it ends."""
        self.cycle += 1
        self.mixer(self.cycle, 1000 * self.cycle)
        self.states[number] = self.state
        self.number = number
        return self.state

    def _take(self) -> int | None:
        number, self.number = self.number, None
        return number

    def _write(self, kind: int, point: int, t0: int, t1: int, value: int) -> None:
        assert (kind, point) == (layout.KIND_MARK, layout.POINT_SAMPLING) and t1 >= t0
        self.state = value


def test_ranks_that_count_alike_sample_alike_whatever_their_rings_count() -> None:
    one, other = Rank(77, 200, 0), Rank(77, 200, 5_000)
    for number in range(2_000):
        one.run(number)
        if number >= 300:  # armed later
            other.run(number)
    shared = range(302, 2_000)
    assert [one.states[n] for n in shared] == [other.states[n] for n in shared]
    assert 250 < sum(one.states[n] for n in shared) < 450
    assert one.mixer.describe()["counter"] == "iteration"


def test_processes_of_other_versions_of_us_draw_the_same() -> None:
    """splitmix64's output, pinned: ranks may run under different installations for a while."""
    first = [0, 8, 9, 16, 66, 70, 112, 166, 177, 203, 220, 226, 272, 295, 303, 317, 373, 399]
    assert [n for n in range(400) if drawn(n, 77, 40)] == first
    assert [n - 2**31 for n in range(2**31, 2**31 + 100) if drawn(n, 3, 40)] == [3, 14, 42, 60, 72]


def test_another_seed_samples_others() -> None:
    one, other = Rank(1, 200, 0), Rank(2, 200, 0)
    both = sum(one.run(n) == other.run(n) == IN for n in range(5_000))
    assert 100 < both < 310, "independent draws agree on 4 % of the cycles"


def test_without_the_engines_number_the_rings_is_used_and_said() -> None:
    rank = Rank(5, 300, 40)
    rank._take = lambda: None  # type: ignore[method-assign]
    rank.mixer._counter = rank._take
    states = [rank.run(0) for _ in range(1_000)]
    assert states[1:] == [int(drawn(cycle, 5, 300)) for cycle in range(42, 1_041)]
    assert rank.mixer.describe()["counter"] == "cycle"


def test_processes_without_a_common_count_draw_by_the_clock() -> None:
    """A core and a worker that begins each cycle 0.8 ms later, of 12 ms, and counts from elsewhere."""
    core, worker = Rank(5, 300, 0), Rank(5, 300, 900)
    alike = 0
    for rank in (core, worker):
        rank.mixer._own, rank.mixer._drawn = "clock", {"iteration": 0, "clock": 0}
    for number in range(5_000):
        at = 12_000_000 * number
        core.mixer(core.cycle + number, at)
        worker.mixer(worker.cycle + number, at + 800_000)
        alike += core.state == worker.state
    assert alike > 0.98 * 5_000
    assert core.mixer.describe()["counter"] == "clock" and 0.2 < core.mixer.describe()["points"]["sampled"] / 4096 < 0.4


def test_a_number_that_stands_still_does_not_draw_the_same_for_ever() -> None:
    rank = Rank(5, 300, 0)
    found = [rank.run(7) for _ in range(1_000)]
    assert 200 < sum(found) < 400


@given(st.integers(0, 2**31 - 1), st.integers(1, 900), st.integers(2, 64), st.data())
def test_no_phase_of_a_period_is_sampled_more_than_chance_allows(
    seed: int, permille: int, period: int, data: Any
) -> None:
    phase = data.draw(st.integers(0, period - 1))
    count, p = 1_500, permille / 1000
    hits = sum(drawn(phase + period * k, seed, permille) for k in range(count))
    assert abs(hits - count * p) < 6 * np.sqrt(count * p * (1 - p)) + 1


@given(st.integers(0, 2**31 - 1), st.integers(1, 899))
def test_a_smaller_share_is_part_of_a_greater_one(seed: int, permille: int) -> None:
    small = {n for n in range(500) if drawn(n, seed, permille)}
    assert small <= {n for n in range(500) if drawn(n, seed, permille + 100)}


def test_sampled_neighbours_are_independent() -> None:
    found = np.array([drawn(n, 99, 100) for n in range(40_000)], float)
    for lag in (1, 2, 3, 5, 8, 41, 64):
        assert abs(np.corrcoef(found[:-lag], found[lag:])[0, 1]) < 0.025


def plain(mixer_call: Any) -> str:
    mixer_call()
    return "original"


def probed(mixer_call: Any) -> str:
    mixer_call()
    return "probed"


def fresh(source: FunctionType, name: str = "engine_step") -> FunctionType:
    copy = FunctionType(source.__code__.replace(), source.__globals__, name)
    copy.__qualname__ = name
    return copy


def goes_in(seed: int, permille: int) -> int:
    """A cycle that is sampled, after one that is not: the draw goes by the number of the one before."""
    return next(n for n in range(3, 10_000) if drawn(n - 1, seed, permille) and not drawn(n - 2, seed, permille))


def test_code_goes_in_and_out_and_out_is_the_original() -> None:
    function = fresh(plain)
    original, place = function.__code__, Place(function, fresh(probed))
    rank = Rank(3, 300, 0, place)
    assert function.__code__ is original, "out until the first draw"
    rank.run(0)
    for number in range(1, 200):
        state = rank.run(number)
        assert state == int(drawn(number - 1, 3, 300))
        assert (function.__code__ is original) == (state == OUT)
        assert place.state == ("in" if state == IN else "cycle")


def test_a_cycle_with_a_frame_of_old_code_is_a_mixture_and_the_next_is_not() -> None:
    function = fresh(plain)
    rank = Rank(3, 300, 0, Place(function, fresh(probed)))
    rank.run(0)
    number = goes_in(3, 300)
    for quiet in range(1, number):
        rank.run(quiet)
    inside: list[int] = []
    assert rank.state == OUT
    assert function(lambda: inside.append(rank.run(number))) == "original"
    assert inside == [MIXED] and rank.run(number + 1) == IN


def test_a_frame_of_another_writing_thread_keeps_the_cycle_a_mixture_until_it_returns() -> None:
    function, go, there = fresh(plain), threading.Event(), threading.Event()
    threads: list[int] = [threading.get_ident()]
    rank = Rank(3, 500, 0, Place(function, fresh(probed)), threads=lambda: tuple(threads))
    rank.run(0)
    start = goes_in(3, 500)
    for number in range(1, start):
        rank.run(number)

    def ahead() -> None:
        there.set()
        go.wait(60)

    other = threading.Thread(target=function, args=(ahead,))
    other.start()
    there.wait(60)
    threads.append(other.ident or 0)
    assert [rank.run(start), rank.run(start + 1)] == [MIXED, MIXED], "the batch ahead still runs the old code"
    go.set()
    other.join()
    assert rank.run(start + 2) == IN


def test_an_endless_frame_is_waited_for_once_and_named() -> None:
    function = fresh(plain, "endless_loop")
    rank = Rank(3, 500, 0, Place(function, fresh(probed)))
    rank.run(0)
    seen: list[int] = []

    def loop() -> None:
        seen.extend(rank.run(number) for number in range(1, 400))

    function(loop)
    assert seen.count(MIXED) <= 2 * (MOST_WAITS + 1), "later changes do not wait for it again"
    assert rank.mixer.describe()["endless"] == ["endless_loop"]


def test_while_somebody_else_holds_the_lock_nothing_changes_and_after_the_end_neither() -> None:
    function = fresh(plain)
    original = function.__code__
    lock = threading.RLock()
    rank = Rank(3, 900, 0, Place(function, fresh(probed)))
    rank.mixer._lock = lambda: lock
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait(60)

    other = threading.Thread(target=hold)
    other.start()
    held.wait(60)
    for number in range(50):
        rank.run(number)
    assert function.__code__ is original
    done.set()
    other.join()
    rank.mixer.end()
    for number in range(50, 100):
        rank.run(number)
    assert function.__code__ is original, "disarmed meanwhile"


def test_another_share_begins_with_the_next_cycle_and_leaves_the_running_one_alone() -> None:
    function = fresh(plain)
    rank = Rank(3, 900, 0, Place(function, fresh(probed)))
    while rank.run(rank.cycle) != IN:
        pass
    code = function.__code__
    rank.mixer.redraw(3, 100)
    assert function.__code__ is code
    assert sum(rank.run(number) for number in range(1_000, 2_000)) < 200
    assert rank.mixer.describe()["permille"] == 100


@pytest.mark.parametrize("permille", [20, 500])
def test_new_functions_follow_after_renew(permille: int) -> None:
    first, later = fresh(plain), fresh(plain, "later")
    places = [Place(first, fresh(probed))]
    rank = Rank(3, permille, 0)
    rank.mixer._swaps = lambda: places  # type: ignore[assignment, return-value]
    places.append(Place(later, fresh(probed)))
    rank.mixer.renew()
    rank.run(0)
    for number in range(1, 100):
        state = rank.run(number)
        assert all((place.functions[0].__code__ is place.probed) == (state == IN) for place in places)


def test_the_points_own_time_is_told_apart_and_a_stall_is_left_out() -> None:
    rank = Rank(3, 50, 0)
    clock = [0]
    rank.mixer._spent = lambda: clock[0]
    for number in range(2_000):
        before = rank.state
        rank.run(number)
        clock[0] += 3_000_000 if number == 700 else 9_000 if rank.state == IN or before == IN else 2_000
    found = rank.mixer.describe()["points"]
    assert found["cycles"] > 1_900 and 60 < found["sampled"] < 140
    assert found["clean_ns"] == 2_000 and 2_300 < found["mean_ns"] < 3_000
