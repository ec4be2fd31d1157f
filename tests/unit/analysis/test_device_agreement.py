"""Two clocks on the same cycles agree where they should, and where one is off by 5 % that is what is found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specmeter.analysis.device_agreement import (
    idle_agreement,
    median_interval,
    overhead_rows,
    span_agreement,
    timer_agreement,
)
from specmeter.analysis.device_join import Joined, Mask, chosen_cycles, join
from specmeter.runtime import layout
from specmeter.trace import load_rings
from specmeter.trace.deep_synthetic import Call, Kernel, build_window
from specmeter.trace.ring import Ring, read_ring
from specmeter.trace.synthetic import make_records, write_ring
from tests.support.deep_runs import BEGIN, PLAN, host_rows, on

CYCLE = [
    Call(on("verify.forward"), (Kernel("nvjet", 100_000), Kernel("rms_norm", 20_000)), host_ns=30_000, graph=True),
    Call(on("accept.sample"), (Kernel("argmax", 7000),), host_ns=4000),
    Call(on("wait.copy"), sync="cudaEventSynchronize"),
]
# The device's own clock: another zero than the host's.
ZERO = 123_456_789


def made(folder: Path, stretch: float = 1.0, late: int = 2) -> tuple[Joined, Ring, Mask]:
    """12 cycles, whose ring has device spans around the kernels of each call, ``stretch`` times as long as they are."""
    cycles = [CYCLE] * 14
    window = build_window(cycles, begin_ns=BEGIN)
    rows = host_rows(cycles, window, [(1, 3, 3, 1)] * 14)
    kernels = window.kernels
    end = kernels["t0_ns"] + kernels["dur_ns"]
    for number in range(1, 15):
        for point in (on("verify.forward"), on("accept.sample")):
            mine = (kernels["cycle"] == number) & (kernels["point"] == point)
            begin, length = int(kernels["t0_ns"][mine].min()), int(end[mine].max() - kernels["t0_ns"][mine].min())
            t0 = begin - ZERO
            rows.append((t0, t0 + round(length * stretch), number + late, point, layout.KIND_DEVICE_SPAN, 0, late))
            if point == on("verify.forward"):
                value = 5 << layout.GRAPH_KEY_SHIFT | late
                rows.append((t0, t0 + 2 * length, number + late, point, layout.KIND_GRAPH_SPAN, 0, value))
    ring = write_ring(folder / "1-1.ring", make_records(rows), rank=0)  # type: ignore[arg-type]
    joined = join(load_rings([ring], PLAN), window)
    assert joined is not None
    return joined, read_ring(ring), chosen_cycles(joined)


def test_equal_spans_agree(tmp_path: Path) -> None:
    joined, ring, cycles = made(tmp_path)
    rows = {row["point"]: row for row in span_agreement(ring, joined, cycles)}
    verify = rows["verify.forward"]
    assert verify["cycles"] == 12 and verify["within"] and verify["percent"]["point"] == pytest.approx(0)
    assert verify["profiler_ms"] == pytest.approx(0.120) and set(rows) == {
        "verify.forward", "accept.sample", "verify.forward (graph)"
    }  # fmt: skip
    # The graph's own stamps were made twice as long.
    assert rows["verify.forward (graph)"]["percent"]["point"] == pytest.approx(100)
    assert rows["verify.forward (graph)"]["more_us"] == pytest.approx(120) and not verify["note"]


def test_what_a_stamp_takes_is_taken_off_graphs_and_said(tmp_path: Path) -> None:
    joined, ring, cycles = made(tmp_path, 1.5)
    rows = {row["point"]: row for row in span_agreement(ring, joined, cycles, 60_000)}
    graph, call = rows["verify.forward (graph)"], rows["verify.forward"]
    assert graph["percent_less_stamp"] == pytest.approx(50) and graph["percent"]["point"] == pytest.approx(100)
    assert "percent_less_stamp" not in call and "its launch is in it" in call["note"] and not graph["note"]


@pytest.mark.parametrize(("stretch", "within"), [(1.05, False), (1.015, True), (0.9, False)])
def test_what_they_differ_by_is_what_is_found(tmp_path: Path, stretch: float, within: bool) -> None:
    joined, ring, cycles = made(tmp_path, stretch)
    rows = {row["point"]: row for row in span_agreement(ring, joined, cycles)}
    assert rows["verify.forward"]["percent"]["point"] == pytest.approx(100 * (stretch - 1), abs=0.01)
    assert rows["verify.forward"]["within"] is within


def test_an_engines_own_timer(tmp_path: Path) -> None:
    joined, _, cycles = made(tmp_path)
    found = timer_agreement(joined, cycles, "verify.forward", 0.1212)
    assert found["percent"] == pytest.approx(1) and found["within"] and found["cycles"] == 12
    assert "no kernel" in timer_agreement(joined, cycles, "extend.forward", 1.0)["reason"]


def test_idle_time_of_both(tmp_path: Path) -> None:
    joined, ring, cycles = made(tmp_path)
    found = idle_agreement([ring], joined, cycles)
    assert found["cycles"] == 12 and found["within"]
    assert found["percent"] == pytest.approx(0, abs=3) and found["reason"] == ""
    assert found["in_spans_ms"] == pytest.approx(0, abs=0.003)
    assert idle_agreement([], joined, cycles)["cycles"] == 0


def test_idle_time_inside_spans_is_no_idle_time_from_events(tmp_path: Path) -> None:
    joined, ring, cycles = made(tmp_path, 1.3)
    found = idle_agreement([ring], joined, cycles)
    assert not found["within"] and found["percent"] < -5 and "deep window" in found["reason"]
    # 36 us more than verify's kernels, in which accept's kernel of 7 us runs.
    assert found["in_spans_ms"] == pytest.approx(0.029, abs=0.001)


def test_the_medians_interval_holds_it_about_as_often_as_it_says() -> None:
    draw = np.random.default_rng(3)
    held = [
        abs(f.low) >= 0 and f.low <= 0 <= f.high
        for f in (median_interval(draw.normal(size=41), "x") for _ in range(600))
    ]
    assert 0.92 <= np.mean(held) <= 0.99
    assert median_interval([1.0, 2.0], "x").as_json()["low"] is None


def test_overhead_of_each_way_of_looking() -> None:
    interval = {"low": 0.2, "point": 0.5, "high": 0.9}
    cost = {"ratio": {"low": 1.5, "point": 1.6, "high": 1.7, "n": 30}, "reason": ""}
    document = {"overhead": {"percent": interval}, "device": {"windows": [{"rank": 0, "cost": cost}]}}
    rows = overhead_rows(document, {"stamps in graphs": None})
    assert [row["what"] for row in rows] == ["probes and always-on spans", "deep window, rank 0", "stamps in graphs"]
    assert rows[1]["percent"]["point"] == pytest.approx(60) and rows[2]["reason"] == "not measured"
