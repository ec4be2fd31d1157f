"""What reports say of deep windows: cost beside the cycles around, and what took the time in each phase."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specmeter.analysis.deep_facts import OUTSIDE, deep_facts
from specmeter.errors import SpecmeterError
from specmeter.reporters.deep_view import deep_parts
from specmeter.reporters.device_rows import cost_line
from specmeter.reporters.html.deep_section import deep_sections
from specmeter.trace.deep_synthetic import Call, Kernel, build_window, copy_kernel
from specmeter.trace.deep_window import DeepWindow, kernel_columns, select, sync_columns
from specmeter.trace.plan import index_plan
from specmeter.trace.shape import check_document
from specmeter.trace.synthetic import make_plan

INDEX = index_plan(
    make_plan([("cycle", "cycle", "none"), ("verify.forward", "leaf", "none"), ("draft.graph", "leaf", "none")])
)
INTERVAL = {"low": 1.9e6, "point": 2e6, "high": 2.1e6, "level": 0.95, "method": "bootstrap", "n": 9, "unit": "cycle"}
COST: dict[str, object] = {
    "inside_ns": INTERVAL, "outside_ns": {**INTERVAL, "point": 1.6e6}, "before_ns": None, "after_ns": None,
    "ratio": {**INTERVAL, "low": 1.2, "point": 1.25, "high": 1.3}, "reason": "", "prepare_s": 1.5, "start_s": 0.001,
    "stop_s": 0.2, "export_s": None, "lost_ns": {"start": 2e6, "stop": 2e8},
}  # fmt: skip


def window(cost: dict[str, object] | None = None) -> DeepWindow:
    cycle = [
        Call(3, tuple(Kernel(name, 1_000) for name in ("a", "b", "a")), graph=True),
        Call(2, (Kernel("gemm", 50_000), Kernel("gemm", 30_000), copy_kernel(4, 2_000)), sync="cudaStreamSynchronize"),
        Call(-1, (Kernel("stray", 500),)),
    ]
    return build_window([cycle] * 5, rank=1, cost=cost)


def test_times_are_per_cycle_and_by_phase() -> None:
    [facts] = deep_facts([window(COST)], INDEX)
    rows = {(row["phase"], row["name"]): row for row in facts["top"]}
    assert rows["verify", "gemm"]["ms"] == pytest.approx(0.08) and rows["verify", "gemm"]["calls"] == 2
    assert rows["draft", "a"]["ms"] == pytest.approx(0.002) and rows["draft", "a"]["calls"] == 2
    assert rows[OUTSIDE, "stray"]["ms"] == pytest.approx(0.0005)
    assert sum(row["percent"] for row in facts["top"]) == pytest.approx(100)
    assert facts["cycle_inside_ms"]["point"] == 2.0 and facts["lost_ms"] == {"start": 2.0, "stop": 200.0}
    check_document(Path("analysis.json"), {"schema": "specmeter/analysis/1", "kind": "profile", "deep": [facts]})


def test_the_page_shows_cost_kernels_by_class_and_verify_beside_a_plain_step() -> None:
    [facts] = deep_facts([window(COST)], INDEX)
    hostile = "gemm\x1b[31m<script>alert(1)</script>"
    facts["top"] = [{**row, "name": hostile if row["name"] == "gemm" else row["name"]} for row in facts["top"]]
    spec = {**facts, "setting": "k=3<b>", "notes": ["a <i>note</i>"]}
    plain = {**facts, "setting": "baseline", "rank": 0, "top": [{**row, "ms": row["ms"] / 2} for row in facts["top"]]}
    [section] = deep_sections({"deep": [spec, plain, {**spec, "rank": 2}]}, "x-")
    html = section.as_html()
    assert section.anchor == "x-deep" and html.count("<caption>Longest kernels of ") == 2
    assert "2.000 ms a cycle [1.900, 2.100] against 1.600 ms" in html and "rank 2, 5 cycles" in html
    assert "<script>" not in html and "<b>" not in html and "<i>" not in html and "\x1b" not in html
    assert "gemm?[31m&lt;script&gt;" in html and "a &lt;i&gt;note" in html
    words = " ".join(re.sub(r"<[^>]+>", " ", html).split())
    assert "dense GEMM 0.080 0.040" in words and "all of these 0.082 0.041" in words
    assert "without speculation" not in deep_sections({"deep": [spec]})[0].as_html()
    assert deep_sections({"deep": []}) == [] and deep_sections({}) == []


def test_text_says_that_it_was_on_for_these_cycles_only_and_what_it_cost() -> None:
    text = "\n".join(str(part) for part in deep_parts({"deep": deep_facts([window(COST)], INDEX)}, 100))
    assert "5 cycles ran under torch's profiler (CUPTI), and only those, on Synthetic device" in text
    assert "2.000 ms a cycle [1.900, 2.100] against 1.600 ms" in text and "x 1.250 [1.200, 1.300]" in text
    assert "cycles lost 202 ms" in text and "export" not in text
    assert "Cycles after it" not in text
    left: dict[str, object] = {**COST, "left_ratio": {**INTERVAL, "low": 1.1, "point": 1.2, "high": 1.3}}
    text = "\n".join(str(part) for part in deep_parts({"deep": deep_facts([window(left)], INDEX)}, 100))
    assert "Cycles after it took x 1.200 [1.100, 1.300] those before" in text
    assert "+20.0 % [+10.0, +30.0] against those before" in cost_line({"cost": left})
    assert "Cycles after it" not in cost_line({"cost": COST})
    unknown = "\n".join(str(part) for part in deep_parts({"deep": deep_facts([window()], INDEX)}, 40))
    assert "its cost is not known" in unknown
    assert list(deep_parts({"deep": None}, 80)) == list(deep_parts({}, 80)) == []


def test_only_cycles_that_lie_inside_count() -> None:
    cut = replace(window(COST), cycles=(2, 3))
    [facts] = deep_facts([cut], INDEX)
    assert facts["cycles"] == 2
    assert {row["name"]: row["ms"] for row in facts["top"]}["gemm"] == pytest.approx(0.08)
    assert deep_facts([replace(cut, cycles=(0, -1))], INDEX)[0]["top"] == []


def test_host_runs_ahead_of_its_streams_in_a_played_window() -> None:
    calls = [Call(2, (Kernel("long", 100_000, stream=1), Kernel("short", 1_000, stream=2)))]
    kernels = build_window([calls] * 4).kernels
    long = kernels["stream"] == 1
    assert np.diff(kernels["t0_ns"][long]).tolist() == [100_000] * 3
    assert (kernels["t0_ns"] >= kernels["launch_ns"]).all()
    assert (np.diff(kernels["launch_ns"][long]) == 8_000).all()


@pytest.mark.parametrize("fault", ["name", "order", "length", "negative"])
def test_a_window_that_contradicts_itself_is_refused(fault: str) -> None:
    good = window()
    kernels = {name: column.copy() for name, column in good.kernels.items()}
    if fault == "name":
        kernels["name"][0] = 99
    elif fault == "order":
        kernels = select(kernels, slice(None, None, -1))
    elif fault == "length":
        kernels["dur_ns"] = kernels["dur_ns"][1:]
    else:
        kernels["dur_ns"][3] = -1
    with pytest.raises(SpecmeterError, match="malformed"):
        replace(good, kernels=kernels)
    assert len(kernel_columns(t0_ns=[3, 1], name=[0, 0])["t0_ns"]) == 2 and len(sync_columns()["t0_ns"]) == 0
