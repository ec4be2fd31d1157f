"""The share that a budget allows, and what a run from sampled cycles says, on cycles made with a known cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specmeter.analysis.profile import Baseline, analyse
from specmeter.analysis.sampling import Share, sample_cost, sampling_facts
from specmeter.bench.budget import assumed_share, share_for
from specmeter.control.sampling import LEAST, MOST, checked_budget, permille_for
from specmeter.errors import SpecmeterError
from specmeter.reporters.sampling_words import sampling_lines
from specmeter.reporters.terminal import render_analysis
from specmeter.runtime import layout
from specmeter.runtime.mix import drawn
from specmeter.trace import Request, Trace, load_rings
from specmeter.trace.synthetic import make_plan, make_records, write_ring

CYCLE_NS = 3_500_000
CHANGE_NS = 20_000
PLAN = make_plan([("cycle", "cycle", "none"), ("verify.forward", "leaf", "none")], ["cycle.accepted", "cycle.drafted"])


def sampled_run(
    folder: Path, cost: float, permille: int, count: int = 3_000, mixtures: bool = False, noise: float = 0.02
) -> Trace:
    """Cycles of 3.5 ms with ``noise``, ``cost`` of a cycle more where the probes are in, and what a change takes."""
    rng = np.random.default_rng(11)
    rows: list[tuple[int, int, int, int, int, int, int]] = []
    now, before, settling = 1_000_000, -1, False
    for i in range(count):
        state = before if settling else int(drawn(i, 3, permille))
        mark = state
        if state != before:
            rows.append((now, now + CHANGE_NS, i, layout.POINT_SAMPLING, layout.KIND_MARK, 0, 2 if mixtures else state))
            now += CHANGE_NS
            mark, settling = (2, True) if mixtures else (state, False)
        elif settling:
            rows.append((now, now + 300, i, layout.POINT_SAMPLING, layout.KIND_MARK, 0, state))
            settling = False
        before = state
        inside = 1.0 if mark == 1 else 0.5 if mark == 2 else 0.0
        took = int(CYCLE_NS * (1 + noise * rng.standard_normal()) * (1 + cost * inside))
        if mark == 1:
            rows.append((now + 1_000, now + took // 2, i, 2, layout.KIND_HOST_SPAN, 0, 0))
        rows.append((now, now + int(0.97 * took), i, 1, layout.KIND_HOST_SPAN, 0, 0))
        rows += [(n, now + took // 3, i, 2 + n, layout.KIND_VALUE, 0, 0) for n in (1, 2)]  # accepted 1 of 2 drafted
        now += took
    return load_rings([write_ring(folder / "1-1.ring", make_records(rows))], PLAN)


@pytest.mark.parametrize(("cost", "low", "high"), [(0.18, 17.5, 19.6), (0.02, 1.6, 3.6)])
def test_the_cost_of_a_sampled_cycle_holds_the_changes(tmp_path: Path, cost: float, low: float, high: float) -> None:
    trace = sampled_run(tmp_path, cost, 500)
    found = sample_cost(trace.main)
    change = 100 * CHANGE_NS / CYCLE_NS  # 0.57 %
    assert trace.main.change_us == pytest.approx(CHANGE_NS / 1e3)
    assert found is not None and low < found.low < 100 * cost + change < found.high < high


@pytest.mark.parametrize(("cost", "mixtures"), [(0.18, False), (0.05, False), (0.9, False), (0.18, True)])
@pytest.mark.parametrize("budget", [0.3, 1.0, 2.5])
def test_the_share_keeps_the_cost_within_the_budget(tmp_path: Path, cost: float, mixtures: bool, budget: float) -> None:
    """The window measures, the run after it is made at that share: its own time must be within the budget."""
    share = share_for(budget, sampled_run(tmp_path, cost, 500, mixtures=mixtures, noise=0.01).main)
    assert share.cost is not None
    clean = sampled_run(tmp_path, 0.0, 0, 20_000, noise=0.0).main.cycles.t0_ns
    run = sampled_run(tmp_path, cost, share.permille, 20_000, mixtures=mixtures, noise=0.0).main.cycles.t0_ns
    percent = 100 * (int(np.ptp(run)) / int(np.ptp(clean)) - 1)
    assert budget / 3 < percent < 1.15 * budget, (share, percent)  # 1.15: the draw's own chance


def test_a_cost_below_the_budget_still_leaves_clean_cycles(tmp_path: Path) -> None:
    assert share_for(5.0, sampled_run(tmp_path, 0.0, 500).main).permille == MOST


@pytest.mark.parametrize(
    ("budget", "cost", "permille"), [(1.0, 18.0, 55), (1.0, 25.0, 40), (0.01, 90.0, LEAST), (1.0, -0.2, MOST)]
)
def test_share_of_a_cost(budget: float, cost: float, permille: int) -> None:
    assert permille_for(budget, cost) == permille


@pytest.mark.parametrize("percent", [0.0, -1.0, 101.0, float("nan"), float("inf")])
def test_a_budget_that_is_no_share_is_refused(percent: float) -> None:
    with pytest.raises(SpecmeterError, match="out of range"):
        checked_budget(percent)


def test_too_few_cycles_leave_the_assumed_share_with_the_reason(tmp_path: Path) -> None:
    share = share_for(1.0, sampled_run(tmp_path, 0.18, 500, count=12).main)
    assert (share.permille, share.cost) == (40, None) and "too few cycles" in share.why


def facts(trace: Trace, share: Share, reports: list[dict[str, Any]]) -> dict[str, Any]:
    return sampling_facts(trace.main, np.ones(len(trace.main.cycles), bool), (), share, reports)


def test_facts_compare_sampled_and_clean_cycles(tmp_path: Path) -> None:
    trace = sampled_run(tmp_path, 0.18, 55, count=20_000)
    said = {"sampling": {"counter": "iteration", "endless": []}}
    found = facts(trace, assumed_share(1.0, "a test"), [said, said])
    assert found["share_percent"] == pytest.approx(5.5, abs=0.8)
    assert found["sampled"] + found["clean"] > 19_900 and found["mixtures"] == 0
    assert found["sampled_ms"]["point"] == pytest.approx(1.18 * 3.5, rel=0.01)
    assert found["clean_ms"]["low"] < 3.5 + 0.055 * CHANGE_NS / 1e6 < found["clean_ms"]["high"]
    assert found["overall_percent"]["low"] < 0.055 * 18.6 < found["overall_percent"]["high"] + 0.1
    assert found["counter"] == "iteration" and found["stamps"]["percent"] is None
    text = " ".join(sampling_lines(found))
    assert "the same cycles on every rank" in text and "not measured" in text and "budget 1 %" in text


def test_processes_that_draw_by_different_numbers_are_said(tmp_path: Path) -> None:
    trace = sampled_run(tmp_path, 0.1, 300)
    reports = [{"sampling": {"counter": kind, "endless": ["loop"]}} for kind in ("iteration", "cycle")]
    stamped = {**stamps_of(1_260.0, 1_300.0, 10.0), "sampling": None}
    found = facts(trace, assumed_share(1.0, "a test"), [*reports, stamped])
    assert found["counter"] == "differs between processes"
    text = " ".join(sampling_lines(found))
    assert "never returned: loop" in text and "10.0 a cycle, each 1.26 us" in text and "0.36 % of a cycle" in text


def test_a_profile_has_phases_of_sampled_cycles_and_the_time_of_all(tmp_path: Path) -> None:
    trace = sampled_run(tmp_path, 0.18, 200)
    share = share_for(1.0, trace.main)
    document = analyse(trace, (), Baseline(None, "none", "a test"), share=share)
    full = analyse(trace, (), Baseline(None, "none", "a test"))
    assert document["cycle"]["count"] > 2_900 > full["cycle"]["count"]
    assert document["cycle"]["mean_ms"]["point"] == pytest.approx(3.5 * (1 + 0.2 * 0.18), rel=0.01)
    assert full["cycle"]["mean_ms"]["point"] == pytest.approx(3.5 * 1.18, rel=0.01)
    assert document["phases"] == full["phases"], "phases are only seen where the probes are"
    assert "sampling" not in full and document["sampling"]["budget_percent"] == 1.0
    text = render_analysis(document)
    assert "Sampling: " in text and "Probe overhead" not in text and "Probe overhead" in render_analysis(full)


def test_after_arming_fully_again_cycles_are_no_longer_drawn(tmp_path: Path) -> None:
    rows = [(1_000, 1_000, 0, layout.POINT_SAMPLING, layout.KIND_MARK, 0, 0)]
    for i in range(1, 40):
        if i == 20:
            rows.append((i * 10_000, i * 10_000, i, layout.POINT_SAMPLING, layout.KIND_MARK, 0, layout.SAMPLING_ALL))
        rows.append((i * 10_000, i * 10_000 + 9_000, i, 1, layout.KIND_HOST_SPAN, 0, 0))
    cycles = load_rings([write_ring(tmp_path / "1-1.ring", make_records(rows))], PLAN).main.cycles
    assert cycles.drawn.tolist() == [True] * 19 + [False] * 20
    assert cycles.probed.tolist() == [0] * 19 + [1] * 20


def test_share_keeps_its_words() -> None:
    share = assumed_share(1.0, "no cycle ran for 0.5 s")
    assert replace(share, permille=1).as_json()["cost"] is None
    assert share.why.startswith("4 % of the cycles are sampled") and "no cycle ran" in share.why


def said(mean: float, clean: float | None, cycles: int = 200, sampled: int = 10, quiet: int = 120) -> dict[str, Any]:
    points = {"cycles": cycles, "sampled": sampled, "mean_ns": mean, "clean": quiet, "clean_ns": clean}
    return {"sampling": {"counter": "cycle", "endless": [], "points": points}}


def test_the_cycle_points_own_cost_is_paid_first(tmp_path: Path) -> None:
    """7 us in every clean cycle of 3.5 ms are 0.2 %; 100 us more are spent elsewhere for each sampled one."""
    trace = sampled_run(tmp_path, 0.18, 500)
    without, with_ = (
        share_for(1.0, trace.main),
        share_for(1.0, trace.main, (), [said(12_000, 7_000), {"sampling": None}]),
    )
    assert with_.point_percent == pytest.approx(0.2, rel=0.02)
    assert without.cost is not None and with_.cost is not None
    assert with_.cost.point - without.cost.point == pytest.approx(100 * (100 - CHANGE_NS / 1e3) / 3500, rel=0.02)
    assert with_.permille == int(1000 * (1.0 - with_.point_percent) / with_.cost.high) < without.permille
    found = facts(trace, with_, [said(12_000, 7_000)])
    assert found["overall_percent"]["point"] == pytest.approx(0.2 + 0.5 * with_.cost.point, rel=0.03)


def test_a_budget_below_the_cycle_points_cost_leaves_the_least_and_is_said(tmp_path: Path) -> None:
    share = share_for(0.1, sampled_run(tmp_path, 0.18, 500).main, (), [said(12_000, 7_000)])
    assert share.permille == LEAST and "cannot be kept" in share.why


def test_stamps_in_graphs_are_inside_the_budget(tmp_path: Path) -> None:
    """8 and 14 stamps a cycle of 1.25 us at most: 17.5 us of 3.5 ms are 0.5 %; the rank with more of them counts."""
    trace = sampled_run(tmp_path, 0.18, 500)
    reports = [said(12_000, 7_000), stamps_of(1_200.0, 1_250.0, 8.0), stamps_of(1_200.0, 1_250.0, 14.0)]
    share = share_for(1.0, trace.main, (), reports)
    assert share.cost is not None and share.point_percent is not None and "stamps in graphs 0.5 %" in share.why
    assert share.permille == pytest.approx(1000 * (0.5 - share.point_percent) / share.cost.high, abs=2)
    found = facts(trace, share, reports)
    assert found["stamps"]["percent"] == pytest.approx(0.48, rel=0.01) and found["stamps"]["a_cycle"] == 14
    without = facts(trace, share, reports[:1])
    assert found["overall_percent"]["point"] - without["overall_percent"]["point"] == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize(
    ("cost", "words"),
    [
        (None, "not measured in this run"),
        ({"stamp_ns": None, "upper_ns": None, "stamps_a_cycle": 3.0, "reason": "libcuda is old"}, "libcuda is old"),
        ({"stamp_ns": 1e3, "upper_ns": 1e3, "stamps_a_cycle": None, "reason": ""}, "not measured in this run"),
        ({"stamp_ns": float("nan"), "upper_ns": 1e3, "stamps_a_cycle": 1.0, "reason": ""}, "not measured in this run"),
    ],
)
def test_stamps_that_were_not_measured_are_said_and_cost_the_share_nothing(
    tmp_path: Path, cost: Any, words: str
) -> None:
    trace = sampled_run(tmp_path, 0.18, 500)
    reports = [said(12_000, 7_000), {"device_events": {"stamps_cost": cost}}, {"device_events": None}]
    share = share_for(1.0, trace.main, (), reports)
    assert share.permille == share_for(1.0, trace.main, (), reports[:1]).permille and "stamps" not in share.why
    assert words in " ".join(sampling_lines(facts(trace, share, reports)))


def stamps_of(stamp_ns: float, upper_ns: float, number: float) -> dict[str, Any]:
    cost = {"stamp_ns": stamp_ns, "upper_ns": upper_ns, "stamps_a_cycle": number, "reason": ""}
    return {"device_events": {"stamps_cost": cost}}


def test_without_quiet_cycles_all_of_the_points_time_counts_as_every_cycles(tmp_path: Path) -> None:
    share = share_for(1.0, sampled_run(tmp_path, 0.18, 500).main, (), [said(12_000, None, quiet=3)])
    assert share.point_percent == pytest.approx(100 * 12 / 3500, rel=0.02)


def test_facts_leave_out_the_cycles_of_other_requests(tmp_path: Path) -> None:
    """A baseline's requests, sampled too, in between: shares and mixtures are those of the profiled ones."""
    trace = sampled_run(tmp_path, 0.18, 200, mixtures=True)
    start = trace.main.cycles.t0_ns
    halves = [("k=3", 0, 1_000), ("baseline", 1_001, 2_998)]
    requests = [
        Request(setting, "p", setting, 0, int(start[a]) - 9, int(start[a]) + 1, int(start[b]) + 1, 3, 9)
        for setting, a, b in halves
    ]
    trace = load_rings([tmp_path / "1-1.ring"], PLAN, requests)
    chosen = (trace.main.cycles.request == 0) & (trace.main.cycles.drop == 0)
    found = sampling_facts(trace.main, chosen, requests, assumed_share(1.0, "a test"))
    assert found["sampled"] + found["clean"] + found["mixtures"] == pytest.approx(1_000, abs=10)
    assert found["share_percent"] == pytest.approx(found["sampled"] / 10, rel=0.05)
