"""One rule for stalls: every analysis leaves the same cycles out of its times, and says how many."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specmeter.analysis.diff import side
from specmeter.analysis.profile import analyse, baseline_from_trace
from specmeter.analysis.saved import analysed, timed
from specmeter.analysis.stalls import STALL, stall_facts, stalled
from specmeter.analysis.sweep import Arm, analyse_sweep
from specmeter.exports.figures import run_figures
from specmeter.reporters.terminal import render_analysis
from specmeter.trace import Request, Trace, load_rings
from specmeter.trace.rundir import RunWriter, load
from specmeter.trace.synthetic import make_records, write_ring
from tests.support.saved_runs import MS, PLAN, START, Rows, cycle

LONG, USUAL = 160, 16


def traced(folder: Path) -> tuple[Trace, list[Request]]:
    """A baseline of 10 ms steps and k=2 of 16 ms cycles, two prompts of 30 each; two cycles of k=2 took 160 ms."""
    rows: Rows = []
    requests: list[Request] = []
    at = START
    for prompt in range(2):
        for setting, length, drafted in (("baseline", 10, 0), ("k=2", USUAL, 2)):
            send = at
            at += MS
            first = at
            for i in range(30):
                long = LONG if drafted and i == 10 else length
                rows += [(*r[:2], len(rows), *r[3:]) for r in cycle(at, long * MS, drafted, 1 if drafted else 0)]
                at += long * MS
            tokens = 31 + (30 if drafted else 0)
            requests.append(Request(f"r{len(requests)}", f"p{prompt}", setting, prompt, send, first, at - 1, 5, tokens))
            at += 50 * MS
    folder.mkdir()
    ring = write_ring(folder / "7-1.ring", make_records(rows), pid=7, rank=0)  # type: ignore[arg-type]
    return load_rings([ring], PLAN, requests), requests


def test_the_rule() -> None:
    dur = np.array([10, 10, 50, 51, 10, 900], np.int64)
    chosen = np.array([True, True, True, True, True, False])
    assert STALL == 5.0 and stalled(dur, chosen).tolist() == [False, False, False, True, False, False]
    assert stall_facts(dur * MS, chosen) == pytest.approx(
        {"cycles": 1, "percent_of_time": 100 * 51 / 131, "limit_ms": 50.0}
    )
    nothing = stall_facts(dur, np.zeros(6, bool))
    assert nothing == {"cycles": 0, "percent_of_time": 0.0, "limit_ms": None} and not stalled(dur, ~chosen)[:5].any()


def test_profile_sweep_diff_and_exports_leave_out_the_same_cycles_and_say_so(tmp_path: Path) -> None:
    trace, requests = traced(tmp_path / "rings")
    document = analyse(trace, requests, baseline_from_trace(trace))
    assert document["cycle"]["mean_ms"]["point"] == pytest.approx(USUAL)
    assert document["cycle"]["stalled"]["cycles"] == 2 and document["cycle"]["count"] == 2 * 28 - 2
    assert document["acceptance"]["sequences"] == 2 * 28, "their tokens count"
    assert {row["name"]: row["ms"] for row in document["phases"]}["verify"] == pytest.approx(0.6 * USUAL, rel=1e-3)
    said = " ".join(render_analysis(document).split())
    assert "2 cycles longer than 5 times the median (80.0 ms) left out of the times as stalls" in said
    arms = [
        Arm(s, {"steps": n}, [r for r in requests if r.setting == s], trace) for s, n in (("baseline", 0), ("k=2", 2))
    ]
    swept = analyse_sweep(arms)
    assert swept["arms"][1]["cycle_ms"]["point"] == pytest.approx(USUAL) and swept["arms"][1]["stalled"]["cycles"] == 2
    assert "k=2: 2 cycles longer than 5 times the median" in render_analysis(swept)
    writer = RunWriter.create(tmp_path / "run", ("x",))
    writer.write_plan(PLAN)
    writer.write_trace(trace)
    writer.write_requests(requests)
    writer.write_analysis(document)
    writer.finish()
    run = load(writer.path)
    cycles = run.cycles
    assert int((analysed(run, cycles) & ~timed(run, cycles)).sum()) == 2
    assert float(np.average(side(run).cycle_ms, weights=side(run).weights)) == pytest.approx(USUAL)
    (figures,) = run_figures(run)
    assert figures.cycle_s == pytest.approx(USUAL / 1e3) and figures.cycle.count == 54


def test_only_cycles_with_probes_in_count_in_a_saved_run(tmp_path: Path) -> None:
    trace, requests = traced(tmp_path / "rings")
    writer = RunWriter.create(tmp_path / "run", ("x",))
    writer.write_trace(trace)
    writer.write_requests(requests)
    writer.finish()
    run = load(writer.path)
    cycles = run.cycles
    every = analysed(run, cycles)
    for code in (0, 2):  # the original code, and a mixture of both
        cycles["probed"] = np.where(cycles["cycle"] % 3 == 0, code, 1).astype(cycles["probed"].dtype)
        some = analysed(run, cycles)
        assert some.tolist() == (every & (cycles["cycle"] % 3 != 0)).tolist() and 0 < some.sum() < every.sum()
