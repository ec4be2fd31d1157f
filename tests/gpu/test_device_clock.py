"""Events and stamps outside graphs on a real GPU, against torch's own events and the host's clock."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from tests.support.taken import Taken  # noqa: E402

POINT = 7


def settle(taken: Taken, seconds: float = 0.2) -> None:
    """Let everything be read."""
    torch.cuda.synchronize()
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        taken.turn()
        time.sleep(0.004)


@pytest.fixture
def matrices() -> Any:
    torch.manual_seed(1)
    return [torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(3)]


def work(matrices: Any, times: int = 4) -> None:
    a, b, out = matrices
    for _ in range(times):
        torch.mm(a, b, out=out)


@pytest.fixture(params=["events", "stamps"])
def taken(request: pytest.FixtureRequest) -> Taken:
    found = Taken(outside=request.param)
    found.arm()
    return found


def warm(taken: Taken, call: Any, matrices: Any) -> None:
    for _ in range(3):
        call(lambda: work(matrices))
        taken.turn()
    settle(taken)
    taken.records.clear()
    taken.host.clear()


def test_spans_are_those_of_torchs_own_events(taken: Taken, matrices: Any) -> None:
    call = taken.point(POINT)
    warm(taken, call, matrices)
    ours = []
    for _ in range(20):
        first, second = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def timed(first: Any = first, second: Any = second) -> None:
            first.record()
            work(matrices)
            second.record()

        call(timed)
        ours.append((first, second))
        taken.turn()
    settle(taken)
    torchs = [1e6 * first.elapsed_time(second) for first, second in ours]
    spans = taken.spans(POINT)
    assert len(spans) == 20, taken.clock.describe()
    assert [span.own_cycle for span in spans] == sorted({span.own_cycle for span in spans})
    assert statistics.median(s.length for s in spans) == pytest.approx(statistics.median(torchs), rel=0.02)


def test_a_span_lies_between_the_hosts_looks_around_its_call(taken: Taken, matrices: Any) -> None:
    call = taken.point(POINT)
    warm(taken, call, matrices)
    looks = []
    for _ in range(20):

        def waited() -> None:
            work(matrices)
            torch.cuda.synchronize()

        before = time.perf_counter_ns()
        call(waited)
        torch.cuda.synchronize()  # the mark after the call is launched only when the call has waited
        looks.append((before, time.perf_counter_ns()))
        taken.turn()
    settle(taken)
    taken.clock.set_taking(False)
    taken.arm()  # a second pair, for one after the spans
    settle(taken)
    pairs = taken.pairs()
    report = taken.clock.describe()
    assert pairs, report
    error = max(pair.value for pair in pairs)
    assert 0 < error < 100_000, report
    offset = pairs[0].t0 - pairs[0].t1
    drift = max(abs(pair.t0 - pair.t1 - offset) for pair in pairs)
    assert drift < 100_000, pairs
    spans = taken.spans(POINT)
    assert len(spans) == 20
    gaps = [(s.t0 + offset - before, after - s.t1 - offset) for s, (before, after) in zip(spans, looks, strict=True)]
    middle = [statistics.median(ends) / 1e3 for ends in zip(*gaps, strict=True)]
    print(f"{report['outside_graphs']}: error {error} ns, drift {drift} ns, gaps at begin and end {middle} us")
    assert min(min(pair) for pair in gaps) >= -error - drift, gaps


def test_the_streams_own_order_counts_and_not_the_default_stream(taken: Taken, matrices: Any) -> None:
    call = taken.point(POINT)
    warm(taken, call, matrices)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    torch.cuda._sleep(200_000_000)  # 0.1 s on the default stream, in one block: the device has room for others
    with torch.cuda.stream(side):
        call(lambda: torch.cuda._sleep(1000))
    side.synchronize()
    assert not torch.cuda.default_stream().query()  # still busy
    taken.turn()
    settle(taken)
    (span,) = taken.spans(POINT)
    assert span.length < 5_000_000


def test_arming_during_a_capture_leaves_the_capture_whole(taken: Taken, matrices: Any) -> None:
    call = taken.point(POINT)
    work(matrices)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        taken.turn()
        call(lambda: work(matrices))
        taken.turn()
    graph.replay()
    torch.cuda.synchronize()
    assert not taken.spans()
    assert not taken.clock.describe()["reason"]
    warm(taken, call, matrices)
    call(lambda: work(matrices))
    settle(taken)
    assert len(taken.spans(POINT)) == 1


def test_nothing_is_recorded_before_arming(matrices: Any) -> None:
    taken = Taken()
    call = taken.point(POINT)
    call(lambda: work(matrices))
    taken.turn()
    settle(taken, 0.05)
    assert not taken.records
