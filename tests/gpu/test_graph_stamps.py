"""Stamps inside captured graphs on a real GPU, against torch.profiler's kernels and events around the replay."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from specmeter.runtime.device_ptx import load  # noqa: E402
from tests.support.taken import Taken  # noqa: E402

STEP, REPLAY = 3, 4
STEPS, MATMULS = 3, 4


@pytest.fixture
def taken() -> Iterator[Taken]:
    found = Taken(outside="events", inside=True)
    found.clock.follow_graphs()
    yield found
    found.clock.leave()


@pytest.fixture(scope="module")
def matrices() -> Any:
    return [torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(3)]


def capture(taken: Taken, matrices: Any, steps: int = STEPS, matmuls: int = MATMULS) -> Any:
    """A graph of ``steps`` calls of a stamped point, each some matrix products."""
    a, b, out = matrices
    call = taken.point(STEP, stamp=True)

    def step() -> None:
        for _ in range(matmuls):
            torch.mm(a, b, out=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.mul(a, 1.0, out=out)
        for _ in range(steps):
            call(step)
        torch.mul(a, 1.0, out=out)
    return graph


def settle(taken: Taken, seconds: float = 0.25) -> None:
    torch.cuda.synchronize()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        taken.turn()
        time.sleep(0.004)


def begin(taken: Taken, graph: Any) -> Any:
    """Armed, warm, and with empty records; gives the probed replay."""
    replay = taken.point(REPLAY)
    taken.arm()
    for _ in range(3):
        replay(graph.replay)
        taken.turn()
    settle(taken)
    taken.records.clear()
    return replay


def test_a_replay_gives_each_step_and_the_whole_graph_in_its_cycle(taken: Taken, matrices: Any) -> None:
    graph = capture(taken, matrices)
    replay = begin(taken, graph)
    cycles = []
    for _ in range(40):  # all launched before the device has come round to them
        cycles.append(taken.cycle)
        replay(graph.replay)
        taken.turn()
    settle(taken)
    report = taken.clock.describe()["stamps"]
    print(report)
    assert report["reason"] == "" and report["compiler"] == "driver"
    assert report["rows_lapped"] == report["spans_lost"] == 0
    assert [span.own_cycle for span in taken.spans(STEP)] == [cycle for cycle in cycles for _ in range(STEPS)]
    assert [span.own_cycle for span in taken.graphs()] == cycles
    assert {span.point for span in taken.graphs()} == {REPLAY}
    for whole, steps in zip(taken.graphs(), _by(taken.spans(STEP), STEPS), strict=True):
        inside = [whole.t0, *[t for step in steps for t in (step.t0, step.t1)], whole.t1]
        assert inside == sorted(inside)
    assert 1 <= report["tick_ns"] <= 2000


def test_steps_are_the_profilers_kernels_within_2_percent(taken: Taken, matrices: Any, tmp_path: Path) -> None:
    graph = capture(taken, matrices)
    replay = begin(taken, graph)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(20):
            replay(graph.replay)
            taken.turn()
        torch.cuda.synchronize()
    settle(taken)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    kernels = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"])
        for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if event.get("cat") == "kernel" and event["name"] not in ("specmeter_now", "specmeter_ticks")
    )
    steps, wholes = _between_stamps(kernels)
    ours = taken.spans(STEP)
    assert len(ours) == len(steps) == 20 * STEPS, (len(ours), len(steps), taken.clock.describe())
    ratios = [span.length / (1e3 * length) for span, length in zip(ours, steps, strict=True)]
    graphs = [span.length / (1e3 * length) for span, length in zip(taken.graphs(), wholes, strict=True)]
    print("stamp / profiler: steps", statistics.median(ratios), "graphs", statistics.median(graphs))
    assert statistics.median(ratios) == pytest.approx(1, abs=0.02)
    assert statistics.median(graphs) == pytest.approx(1, abs=0.02)


def _between_stamps(kernels: list[tuple[float, float, str]]) -> tuple[list[float], list[float]]:
    """Lengths of the profiler's steps and graphs, us: the stamps in its own trace say where they begin and end."""
    steps: list[float] = []
    wholes: list[float] = []
    per_graph = 2 * STEPS + 2
    stamps = [i for i, kernel in enumerate(kernels) if "specmeter_stamp" in kernel[2]]
    for place in range(0, len(stamps) - per_graph + 1, per_graph):
        own = stamps[place : place + per_graph]
        wholes.append(kernels[own[-1] - 1][1] - kernels[own[0] + 1][0])
        for first, last in zip(own[1:-1:2], own[2:-1:2], strict=True):
            steps.append(kernels[last - 1][1] - kernels[first + 1][0])
    return steps, wholes


def test_events_around_a_replay_agree_with_its_stamps(taken: Taken, matrices: Any) -> None:
    graph = capture(taken, matrices)
    replay = begin(taken, graph)
    for _ in range(30):
        replay(graph.replay)
        taken.turn()
    settle(taken)
    events, stamps = taken.spans(REPLAY), taken.graphs()
    assert [span.own_cycle for span in events] == [span.own_cycle for span in stamps]
    lengths = [span.length for span in events[1:]], [span.length for span in stamps[1:]]
    assert statistics.median(lengths[0]) == pytest.approx(statistics.median(lengths[1]), rel=0.02)
    # Both clocks are one: a graph lies inside the events around it.
    apart = [(stamp.t0 - event.t0, event.t1 - stamp.t1) for event, stamp in zip(events, stamps, strict=True)]
    print("stamp after event, event after stamp, us:", [statistics.median(x) / 1e3 for x in zip(*apart, strict=True)])
    print("events against stamps, bound:", taken.clock.stamps.beside_ns, "ns")  # type: ignore[union-attr]
    # A launch lies between the two at either end; 34 us apart when the tying event was launched behind its stamp.
    assert all(-2_000 < statistics.median(x) < 12_000 for x in zip(*apart, strict=True))
    assert 0 < taken.clock.stamps.beside_ns < 10_000  # type: ignore[union-attr]


def test_a_stamps_cost_is_that_of_a_stamped_graph_against_a_clean_one_of_torchs(matrices: Any) -> None:
    """The process's own small pair of graphs, measured before its first capture, against a pair that torch captured."""
    work = torch.zeros(1 << 16, device="cuda")
    work.mul_(1.0)

    def made(taken: Taken, stamped: bool) -> Any:
        call = taken.point(STEP, stamp=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(100):
                if stamped:
                    call(lambda: work.mul_(1.0))
                else:
                    work.mul_(1.0)
        return graph

    taken = Taken(inside=True)
    clean = made(taken, False)
    taken.clock.follow_graphs()
    before = time.perf_counter()
    stamped = made(taken, True)
    took = time.perf_counter() - before
    taken.clock.leave()
    cost = taken.clock.describe()["stamps_cost"]
    times: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(60):
        for which in (False, True) if turn % 2 else (True, False):
            first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            (stamped if which else clean).replay()
            second.record()
            torch.cuda.synchronize()
            times[which].append(1e6 * first.elapsed_time(second))
    ours = (statistics.median(times[True]) - statistics.median(times[False])) / 202
    print("a stamp, ns: the process's own", cost, "torch's graphs", ours, "; the capture with it took", took, "s")
    assert cost["reason"] == "" and cost["stamp_ns"] <= cost["upper_ns"] < 1.5 * cost["stamp_ns"]
    assert cost["stamp_ns"] == pytest.approx(ours, rel=0.5)
    assert taken.clock.describe()["stamps"]["reason"] == "" and took < 2


def test_idle_before_a_graph_is_no_part_of_it(taken: Taken, matrices: Any) -> None:
    graph = capture(taken, matrices)
    replay = begin(taken, graph)

    def late() -> None:
        time.sleep(0.01)
        graph.replay()
        torch.cuda.synchronize()

    for _ in range(10):
        replay(late)
        taken.turn()
    settle(taken)
    assert statistics.median(span.length for span in taken.spans(REPLAY)) > 10_000_000
    longest = max(span.length for span in taken.graphs())
    assert longest < statistics.median(span.length for span in taken.spans(REPLAY)) - 5_000_000


def test_batch_sizes_and_recaptures_are_graphs_of_their_own(taken: Taken, matrices: Any) -> None:
    small, large = capture(taken, matrices, 2, 2), capture(taken, matrices, 3, 6)
    replay = begin(taken, small)
    wanted = []
    for turn in range(10):
        chosen = small if turn % 3 else large
        wanted.append((taken.cycle, 1 if chosen is small else 2))
        replay(chosen.replay)
        taken.turn()
    again = capture(taken, matrices, 1, 3)
    wanted.append((taken.cycle, 3))
    replay(again.replay)
    settle(taken)
    assert [(span.own_cycle, span.value >> 12) for span in taken.graphs()] == wanted
    assert len(taken.spans(STEP)) == sum({1: 2, 2: 3, 3: 1}[key] for _, key in wanted)


def test_a_lapped_ring_is_counted_and_what_is_left_is_right(taken: Taken, matrices: Any) -> None:
    small = [matrix[:128, :128].contiguous() for matrix in matrices]
    graph = capture(taken, small)
    replay = begin(taken, graph)
    before = taken.clock.describe()["stamps"]["rows_lapped"]
    first, count = taken.cycle, 2000
    for _ in range(count):
        replay(graph.replay)
        taken.cycle += 1  # and nothing is read
    settle(taken, 0.5)
    report = taken.clock.describe()["stamps"]
    rows = count * (2 * STEPS + 2)
    # A copy that was under way when the replays began may have brought the first rows.
    assert rows - 8192 - 64 <= report["rows_lapped"] - before <= rows - 8192, report
    kept = [span for span in taken.graphs() if span.own_cycle >= first + 64]
    assert len(kept) == 8192 // (2 * STEPS + 2)
    assert [span.own_cycle for span in kept] == list(range(first + count - len(kept), first + count))
    assert all(0 < span.length < 10_000_000 for span in taken.spans(STEP) + kept)


def test_the_assembler_of_triton_stands_in_for_the_driver(taken: Taken, matrices: Any) -> None:
    pytest.importorskip("triton")
    from specmeter.runtime.device_driver import Driver

    torch.cuda.current_stream()
    torch.zeros(1, device="cuda")

    class NoPtx(Driver):
        def module(self, image: bytes) -> Any:
            if image.startswith(b".version"):
                raise RuntimeError("no PTX here")
            return super().module(image)

    module, compiler = load(NoPtx())
    assert compiler == "ptxas of triton"
    assert module


def test_leaving_gives_torch_its_own_graph_class_back(matrices: Any) -> None:
    own = [vars(torch.cuda.CUDAGraph).get(name) for name in ("capture_begin", "capture_end", "replay")]
    taken = Taken(inside=True)
    taken.clock.follow_graphs()
    assert torch.cuda.CUDAGraph.replay is not own[2]
    graph = capture(taken, matrices)
    taken.clock.leave()
    assert [vars(torch.cuda.CUDAGraph).get(name) for name in ("capture_begin", "capture_end", "replay")] == own
    graph.replay()
    torch.cuda.synchronize()


def _by(spans: list[Any], size: int) -> list[list[Any]]:
    return [spans[at : at + size] for at in range(0, len(spans), size)]
