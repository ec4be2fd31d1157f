"""Stamps in graphs and outside, on a simulated device in virtual time: ordering, run-ahead, laps, re-capture, drift."""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from specmeter.runtime.device_graphs import KEY
from specmeter.runtime.device_ptx import PARAMETERS
from specmeter.runtime.device_stamps import StampRing
from specmeter.trace.device_clock import device_clock, graph_spans
from tests.support.sim_device import STAMP_NS, Sim, SimDriver, SimStream, failing, other_torch
from tests.support.taken import Taken
from tests.unit.runtime.test_device_events import records_of

STEP, REPLAY = 3, 4
MS = 1_000_000


class Server:
    """A server of the simulated device with the clock in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, torch: Any = None, outside: Any = "events", **sim: Any) -> None:
        self.sim = Sim(**sim)
        self.torch = torch or self.sim.torch
        monkeypatch.setitem(sys.modules, "torch", self.torch)
        self.taken = Taken(clock=self.sim.clock, outside=outside, inside=True, make_driver=self.sim.driver)
        self.taken.clock.follow_graphs()
        self.replay = self.taken.point(REPLAY)
        self.step = self.taken.point(STEP, stamp=True)

    def capture(self, *steps: int, before: int = 20_000) -> Any:
        """A graph: some work, then a step of each length."""
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            self.sim.kernel(before)
            for length in steps:
                self.step(lambda length=length: self.sim.kernel(length))
        return graph

    def cycle(self, graph: Any) -> int:
        """One cycle with a replay; its number."""
        number = self.taken.cycle
        self.replay(graph.replay)
        self.taken.turn()
        return number

    def settle(self) -> None:
        """Until everything is read."""
        for _ in range(6):
            self.sim.wait()
            self.sim.wait(25 * MS)
            self.taken.turn()
        stamps = self.taken.clock.stamps
        if stamps is not None and stamps.ring is not None and stamps.ring.in_flight:
            self.sim.wait()
            self.taken.turn()

    def begin(self) -> None:
        """Arm, and get over the first cycles."""
        self.taken.arm()
        self.step(lambda: None)
        self.settle()
        self.taken.records[:] = self.taken.pairs()

    @property
    def report(self) -> dict[str, Any]:
        found: dict[str, Any] = self.taken.clock.describe()["stamps"]
        return found


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    return Server(monkeypatch)


def test_steps_and_graphs_come_in_their_cycles_however_far_the_host_ran_ahead(server: Server) -> None:
    graph = server.capture(100_000, 300_000)
    server.begin()
    cycles = [server.cycle(graph) for _ in range(30)]
    assert not server.taken.spans(STEP)  # the device is milliseconds behind
    server.settle()
    assert [s.own_cycle for s in server.taken.spans(STEP)] == [cycle for cycle in cycles for _ in range(2)]
    assert [s.own_cycle for s in server.taken.graphs()] == cycles
    assert {s.point for s in server.taken.graphs()} == {REPLAY}
    lengths = [s.length for s in server.taken.spans(STEP)]
    assert lengths == pytest.approx([100_000, 300_000] * 30, abs=64)
    # From the first node to the last: all the work and the stamps between, nothing before.
    assert [s.length for s in server.taken.graphs()] == pytest.approx([420_000 + 4 * STAMP_NS] * 30, abs=64)


def test_the_device_waits_before_a_graph_and_not_inside_it(server: Server) -> None:
    graph = server.capture(50_000)
    server.begin()
    for _ in range(3):
        server.cycle(graph)
        server.sim.wait(5 * MS)
    server.settle()
    assert max(s.length for s in server.taken.graphs()) < 100_000
    begins = [s.t0 for s in server.taken.graphs()]
    assert min(np.diff(begins)) > 4 * MS


def test_graphs_captured_before_arming_are_stamped_and_dormant_replays_are_not_read(server: Server) -> None:
    graph = server.capture(50_000)
    for _ in range(7):
        server.cycle(graph)
    assert not server.taken.records
    server.begin()
    number = server.cycle(graph)
    server.settle()
    assert [s.own_cycle for s in server.taken.graphs()] == [number]
    assert server.report["rows_lapped"] == 0


def test_a_replay_that_the_first_copy_after_arming_cuts_in_two_is_whole(server: Server) -> None:
    graph = server.capture(3 * MS, 3 * MS)
    server.taken.arm()
    cycles = []
    for _ in range(3):
        cycles.append(server.taken.cycle)
        server.replay(graph.replay)
        server.sim.wait(MS)  # the device is in the first step
        server.taken.turn()
    server.settle()
    assert [s.own_cycle for s in server.taken.graphs()] == cycles
    assert [s.own_cycle for s in server.taken.spans(STEP)] == [cycle for cycle in cycles for _ in range(2)]
    assert server.report["spans_lost"] == server.report["rows_lapped"] == 0


@pytest.mark.parametrize("dormant", [0, 3000])
def test_arming_again_follows_nothing_from_before_and_counts_no_old_lap(monkeypatch: Any, dormant: int) -> None:
    server = Server(monkeypatch, outside="stamps")
    graph = server.capture(1_000)
    server.begin()
    call = server.taken.point(9)
    for _ in range(20):
        call(lambda: server.sim.kernel(5_000))
        server.cycle(graph)
    server.taken.clock.set_taking(False)  # the rows of most of these have not been read
    for _ in range(dormant):
        graph.replay()
    server.taken.records.clear()
    server.taken.arm()
    wanted = server.taken.cycle
    call(lambda: server.sim.kernel(5_000))
    server.replay(graph.replay)
    server.settle()
    assert [s.own_cycle for s in server.taken.spans(9)] == [wanted]
    assert [s.own_cycle for s in server.taken.graphs()] == [wanted]
    assert server.report["spans_lost"] == server.report["rows_lapped"] == 0
    assert server.report["rows_read"] < 1000


def test_batch_sizes_step_counts_and_recaptures_are_graphs_of_their_own(server: Server) -> None:
    one, two = server.capture(10_000), server.capture(10_000, 20_000, 30_000)
    server.begin()
    wanted = []
    for turn in range(12):
        chosen = two if turn % 3 == 0 else one
        wanted.append((server.cycle(chosen), getattr(chosen, KEY).key, 3 if chosen is two else 1))
    with server.torch.cuda.graph(one):  # captured again into the same object
        server.step(lambda: server.sim.kernel(40_000))
    assert getattr(one, KEY).key == 3
    wanted.append((server.cycle(one), 3, 1))
    server.settle()
    spans = graph_spans(records_of(server.taken))
    assert list(zip(spans.cycle.tolist(), spans.key.tolist(), strict=True)) == [w[:2] for w in wanted]
    assert spans.point.tolist() == [REPLAY] * len(wanted)
    steps = [s.own_cycle for s in server.taken.spans(STEP)]
    assert steps == [cycle for cycle, _, count in wanted for _ in range(count)]
    assert server.report["graphs"] == 3 and server.report["stamps_in_graphs"] == {"1": 4, "2": 8, "3": 4}


def test_a_lapped_ring_is_counted_and_the_rest_is_right(server: Server) -> None:
    graph = server.capture(1_000)
    server.begin()
    first, count = server.taken.cycle, 3000
    for _ in range(count):
        server.replay(graph.replay)
        server.taken.cycle += 1  # nothing is read meanwhile
    server.settle()
    assert server.report["rows_lapped"] == 4 * count - 8192
    kept = [s.own_cycle for s in server.taken.graphs()]
    assert kept == list(range(first + count - 2048, first + count))
    assert all(900 < s.length < 1100 for s in server.taken.spans(STEP))
    assert not getattr(graph, KEY).followed


def test_a_begin_that_was_lapped_gives_no_span(server: Server) -> None:
    graph = server.capture(1_000, 1_000)
    server.begin()
    for _ in range(1400):  # 6 rows each: the ring begins in the middle of one
        server.replay(graph.replay)
        server.taken.cycle += 1
    server.settle()
    assert server.report["rows_lapped"] == 6 * 1400 - 8192
    assert server.report["spans_lost"] == 2  # the second step's, and the whole graph's
    assert len(server.taken.graphs()) == 1365 and len(server.taken.spans(STEP)) == 2 * 1365
    assert all(900 < s.length < 1100 for s in server.taken.spans(STEP))
    assert all(s.length == pytest.approx(22_000 + 4 * STAMP_NS, abs=64) for s in server.taken.graphs())


def test_rows_half_written_when_the_copy_passed_come_with_the_next_one(server: Server) -> None:
    graph = server.capture(200_000)
    server.begin()
    numbers = []
    for _ in range(40):  # copies overtake the device's work all the time
        numbers.append(server.cycle(graph))
        server.sim.wait(7 * MS // 10)
    server.settle()
    assert [s.own_cycle for s in server.taken.graphs()] == numbers


@pytest.mark.parametrize("torn", [(8, 4), (16, 16), (24, 4), (0, 32)])
def test_a_row_of_which_a_half_is_there_is_read_later(torn: tuple[int, int]) -> None:
    sim = Sim()
    ring = StampRing(sim.driver(), rows=8)
    assert not ring.ready()
    sim.wait()
    assert ring.ready()
    stream = SimStream(sim)
    for what in (1, 2, 3):
        ring.stamp(stream.handle, what, 0, 0, 5)
    sim.wait()
    ring.start_copy()
    sim.wait()
    place = 3 * 8 + 2 * 32 + torn[0]  # the second row after the ring's own first one
    ring._host.view[place : place + torn[1]] = bytes(torn[1])
    assert [row.what for row in ring.rows()] == [1]
    ring.start_copy()
    sim.wait()
    assert [row.what for row in ring.rows()] == [2, 3]


def test_one_clock_for_events_and_stamps_and_the_hosts_within_the_bound(monkeypatch: Any) -> None:
    server = Server(monkeypatch, drift=-30e-6, step_ns=1024)
    graph = server.capture(300_000)
    server.begin()
    eager, wanted = server.taken.point(9), []
    for _ in range(150):
        server.sim.wait(200 * MS)
        eager(lambda: server.sim.kernel(100_000))
        wanted.append(server.sim.default.free_at - 100_000)
        server.cycle(graph)
    server.settle()
    assert len(server.taken.pairs()) >= 3
    clock = device_clock(records_of(server.taken))
    assert clock is not None and clock.error_ns is not None and clock.error_ns < 20_000
    assert server.report["tick_ns"] == 1024
    events = clock.to_host(np.array([s.t0 for s in server.taken.spans(9)], np.int64))
    assert len(events) == 150
    assert np.abs(events - np.array(wanted)).max() < clock.error_ns + 12_000
    for graph_span, event in zip(server.taken.graphs(), server.taken.spans(REPLAY), strict=True):
        assert event.t0 - 8_000 < graph_span.t0 < graph_span.t1 < event.t1 + 8_000


def test_events_lie_where_they_are_against_stamps_however_long_the_host_takes_to_make_one(monkeypatch: Any) -> None:
    """The event that ties both clocks was launched 34 us behind the stamp that it was taken to stand beside."""
    server = Server(monkeypatch, making_ns=34_000)
    graph = server.capture(300_000)
    server.begin()
    for _ in range(30):
        server.cycle(graph)
        server.sim.wait(2 * MS)
    server.settle()
    both = list(zip(server.taken.spans(REPLAY), server.taken.graphs(), strict=True))
    assert len(both) == 30
    # In this simulation a begin's time is its end: the stamp's own microsecond lies between.
    for event, graph_span in both[2:]:  # the first events are made then
        assert -1_000 < graph_span.t0 - event.t0 < 3_000
        assert -1_000 < event.t1 - graph_span.t1 < 3_000
    assert all(pair.value >= server.taken.clock.stamps.beside_ns > 0 for pair in server.taken.pairs())  # type: ignore[union-attr]


def test_what_the_host_takes_to_launch_does_not_lie_between_the_tying_events(server: Server) -> None:
    graph = server.capture(5_000)
    server.sim.tick_ns = 1_500
    server.taken.arm()
    server.cycle(graph)
    server.cycle(graph)
    # Half of the stamp's own time, and an event's step: nothing of the three launches, 1.5 us each.
    assert server.taken.clock.stamps.beside_ns == pytest.approx(STAMP_NS / 2 + 500, abs=50)  # type: ignore[union-attr]


def test_a_device_that_lets_a_tie_wait_is_asked_ever_more_seldom(server: Server) -> None:
    asked: list[int] = []
    clock = server.taken.clock
    server.capture(5_000)
    server.taken.arm()
    assert clock._events is not None

    def tie(ring: Any, now: Any) -> None:
        asked.append(server.sim.now)
        server.sim.wait(MS)

    clock._events.tie = tie  # type: ignore[method-assign]
    for _ in range(1_000):
        server.taken.turn()
        server.sim.wait(4 * MS)
    gaps = [round((b - a) / 1e8) for a, b in pairwise(asked)]
    assert gaps[:5] == [1, 2, 4, 8, 16] and len(asked) < 8


def test_events_are_tied_again_where_the_device_did_not_answer(server: Server) -> None:
    graph = server.capture(5_000)
    server.taken.arm()
    ring = server.taken.clock.stamps.ring  # type: ignore[union-attr]
    server.sim.by_handle[ring.stream].push(50 * MS)
    server.cycle(graph)
    began = server.sim.now
    server.cycle(graph)
    assert not server.taken.spans() and server.sim.now - began < MS  # asked, given up, not waited for
    server.sim.wait(150 * MS)
    for _ in range(10):
        server.cycle(graph)
        server.sim.wait(4 * MS)
    server.settle()
    assert len(server.taken.spans(REPLAY)) == 12
    assert min(s.t0 for s in server.taken.spans()) > server.sim.epoch


def test_no_event_is_given_before_its_clock_is_that_of_the_stamps(server: Server) -> None:
    graph = server.capture(5_000)
    server.taken.arm()
    for _ in range(20):
        server.cycle(graph)
        server.sim.wait(4 * MS)
    server.settle()
    assert len(server.taken.spans(REPLAY)) == 20
    assert min(s.t0 for s in server.taken.spans()) > server.sim.epoch


def test_calls_outside_graphs_by_stamps(monkeypatch: Any) -> None:
    server = Server(monkeypatch, outside="stamps")
    server.begin()
    call = server.taken.point(9)
    for length in (40_000, 60_000):
        call(lambda length=length: server.sim.kernel(length))
        server.taken.turn()
    server.settle()
    assert [s.length for s in server.taken.spans(9)] == pytest.approx([40_000, 60_000], abs=64)
    assert [s.cycle - s.value for s in server.taken.spans(9)] == sorted({s.own_cycle for s in server.taken.spans(9)})


def test_events_take_over_from_stamps_that_fail_on_the_same_clock(monkeypatch: Any) -> None:
    server = Server(monkeypatch, outside="stamps", drift=10e-6)
    server.begin()
    call, wanted = server.taken.point(9), []

    def calls() -> None:
        for _ in range(20):
            call(lambda: server.sim.kernel(100_000))
            wanted.append(server.sim.default.free_at - 100_000)
            server.sim.wait(7 * MS)
            server.taken.turn()
        server.settle()

    calls()
    monkeypatch.setattr(server.taken.clock.stamps.ring, "stamp", failing("gone"))  # type: ignore[union-attr]
    call(lambda: server.sim.kernel(1))  # its marks are lost
    calls()
    assert server.taken.clock.describe()["outside_graphs"] == "events" and "gone" in server.report["reason"]
    clock = device_clock(records_of(server.taken))
    assert clock is not None and clock.error_ns is not None
    found = clock.to_host(np.array([s.t0 for s in server.taken.spans(9)], np.int64))
    assert len(found) == len(wanted)
    assert np.abs(np.sort(found) - np.array(wanted)).max() < clock.error_ns + 12_000


def test_a_graph_launched_by_somebody_else_is_left_out_and_named(server: Server) -> None:
    graph = server.capture(5_000)
    server.begin()
    server.cycle(graph)
    server.settle()
    for length, effect in graph.nodes:  # by its raw handle, past torch
        server.sim.current.push(length, effect)
    server.settle()
    server.taken.records.clear()
    for _ in range(3):
        server.cycle(graph)
        server.settle()
    assert server.report["graphs_astray"] == [1]
    assert len(server.taken.graphs()) <= 1  # until it shows, one replay's rows carry a number that was given before


def test_a_graph_replayed_inside_a_capture_is_left_out(server: Server) -> None:
    inner = server.capture(5_000)
    server.capture(1_000)
    server.begin()
    outer = server.torch.cuda.CUDAGraph()
    with server.torch.cuda.graph(outer):
        inner.replay()
    server.cycle(outer)
    server.settle()
    assert server.report["graphs_astray"] == [getattr(inner, KEY).key]
    assert [s.value >> 12 for s in server.taken.graphs()] == [getattr(outer, KEY).key]


def test_a_replay_that_fails_is_not_counted(server: Server) -> None:
    graph = server.capture(5_000)
    server.begin()
    server.sim.lost = True
    with pytest.raises(RuntimeError, match="launch failure"):
        graph.replay()
    server.sim.lost = False
    assert getattr(graph, KEY).replays == 0
    number = server.cycle(graph)
    server.settle()
    assert [s.own_cycle for s in server.taken.graphs()] == [number]


def test_every_kernel_was_launched_before_the_first_capture(monkeypatch: Any) -> None:
    sim, launched = Sim(), set()
    driver = sim.driver()
    real = driver.kernel

    def kernel(module: str, name: str) -> Any:
        run = real(module, name)
        return lambda *numbers: (launched.add(name), run(*numbers))

    monkeypatch.setattr(driver, "kernel", kernel)
    StampRing(driver)
    assert launched == set(PARAMETERS)


def test_the_cost_on_the_device_is_two_stamps_a_graph_and_two_a_step(server: Server) -> None:
    graph = server.capture(1_000, 1_000)
    assert len(graph.nodes) == 3 + 2 + 4


def test_a_stamps_cost_is_measured_before_the_first_capture_and_told_with_their_number(server: Server) -> None:
    first = server.capture(1_000, 1_000)
    assert len(first.nodes) == 3 + 2 + 4  # nothing of the measurement is in the server's graph
    assert server.sim.graphs == server.sim.events == 0, "given back"
    server.begin()
    cost = server.taken.clock.describe()["stamps_cost"]
    assert cost["stamp_ns"] == pytest.approx(STAMP_NS, abs=32) and cost["upper_ns"] == pytest.approx(STAMP_NS, abs=64)
    for number in range(12):
        server.cycle(first) if number % 3 else server.taken.turn()
    cost = server.taken.clock.describe()["stamps_cost"]
    cycles = server.taken.cycle - 1
    assert cost["stamps_a_cycle"] == pytest.approx(6 * 8 / cycles) and cost["reason"] == ""


def test_without_being_asked_a_process_makes_no_graphs_of_its_own(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPECMETER_STAMPS_COST")
    server.capture(1_000)
    assert server.taken.clock.stamps is not None and server.taken.clock.stamps.cost is None
    cost = server.taken.clock.describe()["stamps_cost"]
    assert cost["stamp_ns"] is None and "SPECMETER_STAMPS_COST=1" in cost["reason"]


def test_a_stamps_cost_is_measured_once_a_process_and_no_row_of_it_is_in_the_ring(server: Server) -> None:
    graphs = [server.capture(1_000) for _ in range(3)]
    taken, ring = server.taken, server.taken.clock.stamps.ring  # type: ignore[union-attr]
    cost = taken.clock.stamps.cost  # type: ignore[union-attr]
    server.begin()
    numbers = [server.cycle(graph) for graph in graphs]
    server.settle()
    assert taken.clock.stamps.cost is cost  # type: ignore[union-attr]
    assert [span.own_cycle for span in taken.graphs()] == numbers
    assert ring.read == 4 * 3 and ring.lapped == 0


def test_a_busy_device_is_not_waited_for_and_tells_a_stamps_cost_later(monkeypatch: Any) -> None:
    server = Server(monkeypatch)
    ring = StampRing(server.sim.driver())
    server.sim.wait()
    assert ring.ready()
    monkeypatch.setattr(server.taken.clock.stamps, "ring", ring)
    monkeypatch.setattr(server.taken.clock.stamps, "_raw", lambda: server.sim.current.handle)
    server.sim.by_handle[ring.stream].push(500 * MS)
    began = server.sim.now
    graph = server.capture(1_000)
    assert server.sim.now - began < 30 * MS
    cost = server.taken.clock.describe()["stamps_cost"]
    assert cost["stamp_ns"] is None and "not come round" in cost["reason"]
    server.taken.arm()
    server.sim.wait(600 * MS)
    for _ in range(8):
        server.cycle(graph)
        server.sim.wait(25 * MS)
    cost = server.taken.clock.describe()["stamps_cost"]
    assert cost["stamp_ns"] == pytest.approx(STAMP_NS, abs=32) and not server.sim.graphs


@pytest.mark.parametrize("call", ["begin_capture", "made_graph", "launch_graph", "elapsed_ns"])
def test_where_a_stamps_cost_cannot_be_measured_stamps_go_on_and_the_reason_is_told(
    monkeypatch: Any, call: str
) -> None:
    server = Server(monkeypatch)
    monkeypatch.setattr(SimDriver, call, failing(f"{call} is not to be had"))
    graph = server.capture(5_000)
    server.begin()
    number = server.cycle(graph)
    server.settle()
    assert [s.own_cycle for s in server.taken.graphs()] == [number] and server.report["reason"] == ""
    cost = server.taken.clock.describe()["stamps_cost"]
    assert cost["stamp_ns"] is None and f"{call} is not to be had" in cost["reason"]


@pytest.mark.parametrize("fault", ["driver", "compiler", "launch", "reading"])
def test_a_fault_turns_stamps_off_alone_and_capture_and_replay_go_on(monkeypatch: Any, fault: str) -> None:
    server = Server(monkeypatch)
    if fault == "driver":
        server.taken.clock.stamps._make_driver = failing("libcuda.so.1: cannot open shared object file")  # type: ignore[union-attr]
    if fault == "compiler":
        monkeypatch.delitem(sys.modules, "triton", raising=False)
        server.sim.compiles = False
    graph = server.capture(5_000)
    if fault in ("launch", "reading"):
        server.begin()
        ring = server.taken.clock.stamps.ring  # type: ignore[union-attr]
        broken = failing("CUDA_ERROR_ILLEGAL_ADDRESS")
        monkeypatch.setattr(ring, "stamp" if fault == "launch" else "start_copy", broken)
        graph = server.capture(5_000) if fault == "launch" else graph
        server.settle()
    else:
        server.taken.arm()
        assert len(graph.nodes) == 2  # no stamps in it
    before = len(server.taken.spans(REPLAY))
    for _ in range(3):
        server.cycle(graph)
        server.settle()
    assert server.report["reason"]
    assert server.taken.clock.describe()["reason"] == ""
    # Events go on, on whatever clock they were on.
    assert len(server.taken.spans(REPLAY)) - before == 3


def test_a_lost_device_turns_both_clocks_off_at_a_cycles_begin_and_says_so(server: Server) -> None:
    graph = server.capture(5_000)
    server.begin()
    server.cycle(graph)
    server.sim.lost = True
    with pytest.raises(RuntimeError, match="launch failure"):
        server.replay(graph.replay)  # the server's own
    for _ in range(5):
        server.sim.wait(25 * MS)
        server.taken.turn()
    report = server.taken.clock.describe()
    assert "launch failure" in report["reason"] and "launch failure" in report["stamps"]["reason"]
    assert server.step(lambda: 7) == 7


def test_a_device_that_is_lost_before_arming_is_asked_once_and_no_more(server: Server) -> None:
    server.capture(5_000)
    server.sim.lost = True
    server.taken.arm()
    for _ in range(3):
        server.sim.wait(25 * MS)
        server.taken.turn()
    asked = server.sim._count
    for _ in range(10):
        server.sim.wait(150 * MS)
        server.taken.turn()
    assert server.sim._count == asked
    report = server.taken.clock.describe()
    assert "launch failure" in report["reason"] and "launch failure" in report["stamps"]["reason"]


def test_a_stream_destroyed_under_a_stamp_ends_stamps_and_the_call_goes_on(monkeypatch: Any) -> None:
    server = Server(monkeypatch, outside="stamps")
    server.begin()
    call, stream = server.taken.point(9), SimStream(server.sim)
    with server.sim.on(stream):
        stream.destroyed = True
        assert call(lambda: 3) == 3
    assert "invalid resource handle" in server.report["reason"]


def test_stamps_wait_for_a_ring_that_the_device_has_not_emptied_yet(monkeypatch: Any) -> None:
    server = Server(monkeypatch, outside="stamps")

    class Busy(SimDriver):
        def stream(self) -> int:
            handle = super().stream()
            self.sim.by_handle[handle].push(60 * MS)  # something else has the device
            return handle

    server.taken.clock.stamps._make_driver = lambda: Busy(server.sim)  # type: ignore[union-attr]
    early = server.capture(5_000)
    assert len(early.nodes) == 2
    server.begin()
    late = server.capture(5_000)
    assert len(late.nodes) == 6
    number = server.cycle(late)
    server.settle()
    assert [s.own_cycle for s in server.taken.graphs()] == [number]


def test_without_a_compiler_both_reasons_are_said(monkeypatch: Any) -> None:
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    server = Server(monkeypatch)
    server.sim.compiles = False
    server.capture(5_000)
    assert "JIT_COMPILER_NOT_FOUND" in server.report["reason"] and "triton is not imported" in server.report["reason"]


@pytest.mark.parametrize("name", ["rocm", "npu", "xpu"])
def test_events_stand_in_where_there_can_be_no_stamps(monkeypatch: Any, name: str) -> None:
    sim = Sim()
    monkeypatch.setitem(sys.modules, "torch", other_torch(sim, name))
    taken = Taken(clock=sim.clock, outside="stamps", make_driver=sim.driver)
    taken.arm()
    call = taken.point(9)
    for _ in range(3):
        call(lambda: sim.kernel(8_000))
        sim.wait()
        taken.turn()
    assert [s.length for s in taken.spans(9)] == pytest.approx([8_000] * len(taken.spans(9)), abs=300)
    assert len(taken.spans(9)) >= 2 and "CUDA driver" in taken.clock.describe()["stamps"]["reason"]


def test_rocm_is_told_that_graphs_take_no_stamps(monkeypatch: Any) -> None:
    sim = Sim()
    torch = other_torch(sim, "rocm")
    own = torch.cuda.CUDAGraph.replay
    monkeypatch.setitem(sys.modules, "torch", torch)
    taken = Taken(clock=sim.clock, inside=True, make_driver=sim.driver)
    taken.clock.follow_graphs()
    assert torch.cuda.CUDAGraph.replay is own
    taken.arm()
    call = taken.point(9)
    call(lambda: sim.kernel(8_000))
    sim.wait()
    taken.turn()
    assert [s.length for s in taken.spans(9)] == pytest.approx([8_000], abs=300)
    assert "ROCm" in taken.clock.describe()["stamps"]["reason"]


def test_leaving_puts_torchs_own_methods_back_and_old_graphs_still_run(monkeypatch: Any) -> None:
    sim = Sim()
    own = dict(vars(sim.torch.cuda.CUDAGraph))
    server = Server(monkeypatch, torch=sim.torch)
    server.sim = sim
    graph = sim.torch.cuda.CUDAGraph()
    server.taken.clock.leave()
    for name in ("capture_begin", "capture_end", "replay"):
        assert vars(sim.torch.cuda.CUDAGraph)[name] is own[name]
    with sim.torch.cuda.graph(graph):
        sim.kernel(1_000)
    graph.replay()
    assert len(graph.nodes) == 1


def test_a_point_outside_a_watched_capture_is_not_stamped(server: Server) -> None:
    graph = server.capture(5_000)
    server.begin()
    raw = SimStream(server.sim)
    raw.captured = []
    with server.sim.on(raw):  # a capture that did not come through torch's class
        server.step(lambda: server.sim.kernel(1_000))
    assert len(raw.captured) == 1
    server.cycle(graph)
    server.settle()
    assert len(server.taken.graphs()) == 1


def test_more_graphs_than_there_is_room_for_are_left_out_and_counted(server: Server) -> None:
    hooks = server.taken.clock.stamps.hooks  # type: ignore[union-attr]
    hooks._most = 3
    graphs = [server.capture(1_000) for _ in range(4)]
    assert [len(graph.nodes) for graph in graphs] == [6, 6, 2, 2]
    assert server.report["graphs_left_out"] == 2
