"""Device spans by events, on a simulated device in virtual time."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from specmeter.runtime.device_events import MOST_PENDING
from specmeter.trace.device_clock import device_clock
from specmeter.trace.ring import RECORD_DTYPE
from tests.support.sim_device import Sim, SimStream, other_torch
from tests.support.taken import Taken

POINT, OTHER = 7, 9


def armed(monkeypatch: pytest.MonkeyPatch, sim: Sim, torch: Any = None, **how: Any) -> Taken:
    monkeypatch.setitem(sys.modules, "torch", torch if torch is not None else sim.torch)
    taken = Taken(clock=sim.clock, **how)
    taken.arm()
    return taken


def records_of(taken: Taken) -> Any:
    rows = [(r.t0, r.t1, r.cycle, r.point, r.kind, 0, r.value, i + 1) for i, r in enumerate(taken.records)]
    return np.array(rows, RECORD_DTYPE)


@pytest.mark.parametrize("name", ["cuda", "rocm", "npu", "xpu"])
def test_every_backend_gives_the_spans_of_its_calls_in_their_cycles(monkeypatch: Any, name: str) -> None:
    sim = Sim()
    taken = armed(monkeypatch, sim, None if name == "cuda" else other_torch(sim, name))
    call = taken.point(POINT)
    for length in (100_000, 300_000, 50_000):
        call(lambda length=length: sim.kernel(length))
        taken.turn()
    sim.wait()
    taken.turn()
    # The marks stand outside the launch, so an idle device sees a little of the host's time too.
    assert [span.length for span in taken.spans(POINT)] == pytest.approx([100_000, 300_000, 50_000], abs=300)
    assert [span.own_cycle for span in taken.spans(POINT)] == [1, 2, 3]
    report = taken.clock.describe()
    assert report["backend"] == name and report["reason"] == ""
    assert bool(report["cannot"]) == (name != "cuda")


def test_a_launch_that_runs_ahead_is_read_cycles_later_and_never_waited_for(monkeypatch: Any) -> None:
    sim = Sim()
    taken = armed(monkeypatch, sim)
    call = taken.point(POINT)
    before = sim.now
    for _ in range(5):
        call(lambda: sim.kernel(50_000_000))
        taken.turn()
    assert sim.now - before < 10_000_000
    assert not taken.spans()
    sim.wait(120_000_000)
    taken.turn()
    assert [span.own_cycle for span in taken.spans()] == [1, 2]
    sim.wait()
    taken.turn()
    begins = [span.t0 for span in taken.spans()]
    assert [span.own_cycle for span in taken.spans()] == [1, 2, 3, 4, 5]
    assert np.diff(begins).tolist() == pytest.approx([50_000_000] * 4, abs=5_000)


def test_events_are_pooled(monkeypatch: Any) -> None:
    sim = Sim()
    made = []
    real = sim.torch.cuda.Event
    sim.torch.cuda.Event = lambda enable_timing: made.append(real(enable_timing)) or made[-1]
    taken = armed(monkeypatch, sim)
    call = taken.point(POINT)
    for _ in range(300):
        call(lambda: sim.kernel(1_000))
        sim.wait()
        taken.turn()
    assert len(taken.spans()) == 300
    assert len(made) < 20


def test_times_lie_on_the_hosts_clock_within_the_bound_that_the_pair_states(monkeypatch: Any) -> None:
    sim = Sim(drift=20e-6)
    taken = armed(monkeypatch, sim)
    call = taken.point(POINT)
    wanted = []
    for _ in range(200):
        sim.wait(150_000_000)  # 30 s in all: 600 us of drift
        call(lambda: sim.kernel(100_000))
        wanted.append(sim.default.free_at - 100_000)
        taken.turn()
    sim.wait()
    taken.turn()
    assert len(taken.pairs()) >= 3
    clock = device_clock(records_of(taken))
    assert clock is not None and clock.error_ns is not None
    assert clock.error_ns < 20_000
    found = clock.to_host(np.array([span.t0 for span in taken.spans(POINT)], np.int64))
    assert np.abs(found - np.array(wanted)).max() <= clock.error_ns + 5_000


def test_the_pair_is_tried_again_when_the_device_does_not_answer(monkeypatch: Any) -> None:
    sim = Sim()
    taken = armed(monkeypatch, sim)
    side = SimStream(sim)
    side.push(3_000_000)  # the stream that the clock gets is busy
    sim.torch.cuda.Stream = lambda: side
    call = taken.point(POINT)
    call(lambda: sim.kernel(1_000))
    taken.turn()
    assert not taken.pairs()
    assert sim.now < 1_000_000_000 + 1_500_000  # given up, not waited for
    sim.wait(200_000_000)
    taken.turn()
    assert len(taken.pairs()) == 1


def test_a_full_queue_drops_and_says_so(monkeypatch: Any) -> None:
    sim = Sim()
    taken = armed(monkeypatch, sim)
    call = taken.point(POINT)
    for _ in range(MOST_PENDING + 3):
        call(lambda: sim.kernel(10))
    assert taken.clock.describe()["dropped"] == 3
    assert taken.clock.describe()["waiting"] == MOST_PENDING


def test_nothing_is_recorded_inside_a_capture_and_the_capture_is_whole(monkeypatch: Any) -> None:
    sim = Sim()
    taken = armed(monkeypatch, sim)
    call = taken.point(POINT)
    graph = sim.torch.cuda.CUDAGraph()
    with sim.torch.cuda.graph(graph):
        taken.turn()
        call(lambda: sim.kernel(1_000))
        taken.turn()
    assert len(graph.nodes) == 1
    sim.wait()
    taken.turn()
    assert not taken.spans() and taken.clock.describe()["reason"] == ""


def test_a_capture_that_begins_inside_the_call_is_left_alone(monkeypatch: Any) -> None:
    sim = Sim()
    taken = armed(monkeypatch, sim)
    call = taken.point(POINT)
    graph = sim.torch.cuda.CUDAGraph()
    call(graph.capture_begin)
    graph.capture_end()
    assert taken.clock.describe()["reason"] == "" and not graph.nodes


def test_a_call_that_raises_leaves_the_next_one_right(monkeypatch: Any) -> None:
    sim = Sim()
    taken = armed(monkeypatch, sim)
    call = taken.point(POINT)

    def fails() -> None:
        raise ValueError("the server's own")

    with pytest.raises(ValueError, match="the server's own"):
        call(fails)
    call(lambda: sim.kernel(70_000))
    sim.wait()
    taken.turn()
    assert [span.length for span in taken.spans()] == pytest.approx([70_000], abs=300)


def test_the_host_span_does_not_hold_what_the_marks_cost(monkeypatch: Any) -> None:
    sim = Sim()
    taken = armed(monkeypatch, sim)
    call = taken.point(POINT)
    call(lambda: None)
    (_, begin, end) = taken.host[0]
    assert end - begin == sim.tick_ns


def test_no_torch_or_no_device_is_said_and_costs_nothing_more(monkeypatch: Any) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    taken = Taken()
    taken.arm()
    assert taken.point(POINT)(lambda: 5) == 5
    assert taken.clock.describe()["reason"] == "torch is not imported"
    sim = Sim()
    sim.torch.cuda.is_available = lambda: False
    without = armed(monkeypatch, sim)
    assert without.point(POINT)(lambda: 6) == 6
    without.turn()
    assert "no CUDA device" in without.clock.describe()["reason"]
    assert not without.records


def test_a_device_that_comes_later_is_waited_for_without_being_made(monkeypatch: Any) -> None:
    sim = Sim()
    up = [False]
    sim.torch.cuda.is_initialized = lambda: up[0]
    taken = armed(monkeypatch, sim)
    call = taken.point(POINT)
    call(lambda: None)
    up[0] = True
    call(lambda: sim.kernel(9_000))
    sim.wait()
    taken.turn()
    assert [span.length for span in taken.spans()] == pytest.approx([9_000], abs=300)


@pytest.mark.parametrize("when", ["at the call", "at the reading"])
def test_a_lost_device_turns_the_clock_off_and_the_calls_go_on(monkeypatch: Any, when: str) -> None:
    sim = Sim()
    taken = armed(monkeypatch, sim)
    call = taken.point(POINT)
    call(lambda: sim.kernel(1_000))
    sim.lost = True
    if when == "at the reading":
        taken.turn()
    assert call(lambda: 8) == 8
    taken.turn()
    assert taken.clock.describe()["reason"].startswith("SimError: CUDA error: unspecified launch failure")
    sim.lost = False
    assert call(lambda: 9) == 9
    taken.turn()
    assert not taken.spans()


def test_a_stream_destroyed_under_the_kept_object_turns_the_clock_off(monkeypatch: Any) -> None:
    sim = Sim()
    taken = armed(monkeypatch, sim)
    call = taken.point(POINT)
    stream = SimStream(sim)
    with sim.on(stream):
        call(lambda: sim.kernel(1_000))
        stream.destroyed = True
        assert call(lambda: 3) == 3
    assert "invalid resource handle" in taken.clock.describe()["reason"]


def test_what_a_signal_handler_raises_in_our_frames_goes_to_the_server(monkeypatch: Any) -> None:
    sim = Sim()
    taken = armed(monkeypatch, sim)
    call = taken.point(POINT)
    call(lambda: None)
    namespace: dict[str, Any] = {}
    exec(compile("def handler(*_):\n    raise TimeoutError('alarm')", "/server/own.py", "exec"), namespace)
    monkeypatch.setattr(taken.clock._backend, "capturing", namespace["handler"])
    with pytest.raises(TimeoutError, match="alarm"):
        call(lambda: None)
    assert taken.clock.describe()["reason"] == ""


def test_the_child_of_a_fork_leaves_its_parents_device_alone(monkeypatch: Any) -> None:
    sim = Sim()
    taken = armed(monkeypatch, sim)
    call = taken.point(POINT)
    call(lambda: sim.kernel(1_000))
    taken.clock.forked()
    before = sim._count
    assert call(lambda: 1) == 1
    taken.turn()
    assert sim._count == before and "forked" in taken.clock.describe()["reason"]


def test_records_follow_only_while_armed(monkeypatch: Any) -> None:
    sim = Sim()
    taken = armed(monkeypatch, sim)
    call = taken.point(POINT)
    taken.clock.set_taking(False)
    call(lambda: sim.kernel(1_000))
    sim.wait()
    taken.turn()
    assert not taken.records
    taken.arm()
    call(lambda: sim.kernel(2_000))
    sim.wait()
    taken.turn()
    assert [span.length for span in taken.spans()] == pytest.approx([2_000], abs=300)
