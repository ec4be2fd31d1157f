"""NVTX ranges through the real torch: skipped where there is no CUDA."""

from __future__ import annotations

import time
from typing import Any

import pytest

from specmeter.runtime.nvtx import Ranges

torch = pytest.importorskip("torch")


def test_real_ranges_are_pushed_and_popped_also_where_the_call_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without a profiler NVTX itself counts nothing (every depth is -2), so the calls to it are counted on their way.
    nvtx, log = torch.cuda.nvtx, list[str]()
    push, pop = nvtx.range_push, nvtx.range_pop

    def counted_push(name: str) -> Any:
        log.append(name)
        return push(name)

    def counted_pop() -> Any:
        log.append("pop")
        return pop()

    monkeypatch.setattr(nvtx, "range_push", counted_push)
    monkeypatch.setattr(nvtx, "range_pop", counted_pop)
    ranges = Ranges()
    begin, end = ranges.pair("verify.forward", time.perf_counter_ns, lambda t0, result, id, *roots: result)
    x = torch.ones(64, 64, device="cuda")
    assert float(end(begin(), x @ x, 1)[0, 0]) == 64.0
    with pytest.raises(RuntimeError):
        end(begin(), torch.ones(2, 3, device="cuda") @ torch.ones(2, 3, device="cuda"), 1)
    assert log == ["verify.forward", "pop"] * 2
    assert ranges.describe() == {"reason": "", "pushed": 2}


def test_ranges_inside_graph_capture_do_no_harm() -> None:
    ranges = Ranges()
    begin, end = ranges.pair("captured", time.perf_counter_ns, lambda t0, result, id, *roots: result)
    x = torch.ones(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = end(begin(), x * 2, 1)
    graph.replay()
    torch.cuda.synchronize()
    assert y.tolist() == [2.0] * 8 and ranges.reason == ""
