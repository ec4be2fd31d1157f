"""The probes' cost found again in cycles that were made with it, under drift and prefill."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specmeter.analysis.overhead import comparable, drawn_overhead
from specmeter.runtime import layout
from specmeter.trace import RankTrace, Request, load_rings
from specmeter.trace.synthetic import make_plan, make_records, write_ring

CYCLE_NS = 10_000_000


def mixed_run(folder: Path, cost: float, count: int = 2400) -> RankTrace:
    """Cycles of 10 ms that get 20 % slower over the run, 1 % noise, armed first, then ``cost`` of a cycle at random."""
    rng = np.random.default_rng(5)
    rows: list[tuple[int, int, int, int, int, int, int]] = []
    now = 1_000_000
    for i in range(count):
        state = 1 if i < count // 4 else int(rng.random() < 0.5)
        if i >= count // 4:
            rows.append((now, now, i, layout.POINT_SAMPLING, layout.KIND_MARK, 0, state))
        took = CYCLE_NS * (1 + 0.2 * i / count) * (1 + 0.01 * rng.standard_normal()) * (1 + cost * state)
        rows.append((now, now + int(0.9 * took), i, 1, layout.KIND_HOST_SPAN, 0, 0))
        now += int(took)
    plan = make_plan([("cycle", "cycle", "none")])
    return load_rings([write_ring(folder / "1-1.ring", make_records(rows))], plan).main


def test_a_known_cost_is_found_under_drift(tmp_path: Path) -> None:
    found = drawn_overhead(mixed_run(tmp_path, 0.01))
    assert found is not None
    assert found.percent.low < 1.0 < found.percent.high
    assert found.percent.low > 0.8
    assert 0.09 < found.ms.point < 0.13


def test_no_cost_gives_an_interval_around_zero(tmp_path: Path) -> None:
    found = drawn_overhead(mixed_run(tmp_path, 0.0))
    assert found is not None
    assert found.percent.low < 0 < found.percent.high < 0.2


def test_cycles_before_the_draw_and_near_prefill_are_left_out(tmp_path: Path) -> None:
    rank = mixed_run(tmp_path, 0.0)
    start = rank.cycles.t0_ns
    requests = [
        Request("a", "p", "s", 0, int(start[700]) + 5, int(start[701]) + 5, int(start[900]), 3, 9),
        Request("b", "p", "s", 0, int(start[800]) + 5, int(start[801]) + 5, int(start[1000]), 3, 9),
    ]
    usable = comparable(rank, requests)
    assert not usable[:600].any()
    assert usable[650]
    assert usable[[699, 700, 701, 702, 703, 800, 802, 803]].tolist() == [1, 0, 0, 0, 1, 0, 0, 1]
