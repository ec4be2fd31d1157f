"""The draft step of a deep window as the price of a step, and cycles under the profiler, which are nobody's cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specmeter.analysis.costmodel_curve import Row, curve
from specmeter.analysis.costmodel_device import DeviceStep
from specmeter.analysis.costmodel_evidence import Assumed
from specmeter.analysis.costmodel_explain import evidence_of, explain
from specmeter.analysis.whatif import Answer, ask
from specmeter.commands.explain_commands import ServerCommands
from specmeter.trace.deep import FOLDER
from specmeter.trace.rundir import load
from specmeter.trace.tables import read_table, write_table
from tests.support.cost_runs import Law, write_run

# On the host a step costs nothing and what the device's steps take is waited for: 0.5 ms of 2 steps at k=3.
STEP = 0.25
TRUTH = Law(step=STEP, per_width=0.0, noise=0.002)
SEEN = Law(step=0.0, per_width=0.0, noise=0.002, output=TRUTH.output + 2 * STEP)
SPLIT = [{"point": "draft.graph", "step": s, "ms": ms, "kernels": 26, "replays": 9}
         for s, ms in ((0, 0.002), (1, 0.24), (2, 0.26), (None, 0.001))]  # fmt: skip


def window(**changes: Any) -> dict[str, Any]:
    cycles = {"kind": "decode", "batch": 1, "steps": 3, "graph": True, "cycles": 98, "stalled": 0, "others": []}
    shares = {"word": "device-bound", "host": 0.0, "waiting": 0.0, "communication": 0.0, "device": 1.0, "ms": 6.0}
    words = {"reason": "", "notes": []}
    return {**words, "cycles": cycles, "bound": shares, "draft_steps": SPLIT, "phases": [], **changes}


def recorded(tmp_path: Path, steps: list[int], found: dict[str, Any]) -> Path:
    return write_run(tmp_path / "run", SEEN, steps, changes={"device": {"windows": [found]}})


def rows(path: Path, assumed: Assumed | None = None) -> dict[int, Row]:
    return {row.steps: row for row in curve(evidence_of([load(path)], now=3), range(1, 6), assumed)}


def test_a_step_costs_what_the_device_took_for_it(tmp_path: Path) -> None:
    path = recorded(tmp_path, [3], window())
    found = rows(path)
    for k in range(1, 6):
        assert found[k].cycle_ms.point == pytest.approx(TRUTH.cycle_ms(k), rel=0.01), k
        assert sum(found[k].phases_ms.values()) == pytest.approx(found[k].cycle_ms.point)
        assert min(found[k].phases_ms.values()) >= 0
    said = explain(evidence_of([load(path)]), range(1, 4), [], ServerCommands("sglang"), {})["assumptions"]
    assert [line for line in said if "a draft step costs 0.250 ms, what the device took" in line]
    # Twice as fast a draft saves half of both steps at 3, and half of each one more.
    faster = rows(path, Assumed({"draft": 0.5}))
    assert found[3].cycle_ms.point - faster[3].cycle_ms.point == pytest.approx(STEP, rel=0.02)
    assert faster[5].cycle_ms.point - faster[3].cycle_ms.point == pytest.approx(STEP, rel=0.1)


@pytest.mark.parametrize(
    ("steps", "changes"),
    [
        ([3], {"bound": {"word": "host-bound"}}),  # a step may hide in the device's idle time
        ([3], {"cycles": {"steps": 5, "batch": 1}}),  # of another setting
        ([3], {"cycles": {"steps": 3, "batch": 8}}),
        ([3], {"draft_steps": []}),  # not told apart, and no graph
        ([3, 5], {}),  # the cycles themselves show what a step costs
    ],
)
def test_windows_that_say_nothing_of_a_step(tmp_path: Path, steps: list[int], changes: dict[str, Any]) -> None:
    path = recorded(tmp_path, steps, window(**changes))
    assert evidence_of([load(path)], now=3).device_step is None
    assert rows(path)[2].cycle_ms.point > TRUTH.cycle_ms(2) + STEP / 2


def test_a_graph_of_one_step_is_that_step(tmp_path: Path) -> None:
    cycles = {"steps": 2, "batch": 1}
    graph = {"phase": "draft", "graph_launches": 1.0, "busy_ms": 0.243, "graph": "graph"}
    path = recorded(tmp_path, [2], window(cycles=cycles, draft_steps=[], phases=[graph]))
    assert evidence_of([load(path)]).device_step == DeviceStep(0.243, 2, 1)


def test_waits_pay_first_and_no_phase_is_negative() -> None:
    step = DeviceStep(0.5, 3, 1)
    assert step.into({"wait": 2.0, "verify": 5.0}, 1) == {"wait": 1.0, "verify": 5.0}
    assert step.into({"wait": 0.25, "verify": 5.0, "draft": 0.1}, 1) == {"wait": 0.0, "verify": 4.25, "draft": 0.1}
    assert step.into({"verify": 5.0}, 5) == {"verify": 5.0, "wait": 1.0}
    assert [step.slack_ms(k) for k in (3, 5)] == pytest.approx([0.0, 0.1])


def test_cycles_under_the_profiler_and_after_it_are_left_out(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", SEEN, [3], prompts=6)
    cycles = read_table(path, "cycles")
    begin = int(cycles["t0_ns"][150])
    cycles["dur_ns"] = np.where(cycles["t0_ns"] >= begin, cycles["dur_ns"] * 3 // 2, cycles["dur_ns"])
    write_table(path, "cycles", cycles)
    slowed = rows(path)[3].cycle_ms.point
    meta = {
        **dict.fromkeys(("pid", "start", "id", "end_ns", "first_cycle"), 1), "rank": 0, "cycles": 9, "format": 1,
        "begin_ns": begin + 5, "prepare_ns": [begin, begin + 1], "host": "h", "boot_id": "b", "activity": "cuda",
    }  # fmt: skip
    (path / FOLDER).mkdir()
    (path / FOLDER / "1-1-1.meta.json").write_text(json.dumps(meta))
    truth = SEEN.cycle_ms(3)
    assert slowed > 1.1 * truth and rows(path)[3].cycle_ms.point == pytest.approx(truth, rel=0.01)
    # Where nothing else was recorded they are what there is.
    (path / FOLDER / "1-1-1.meta.json").write_text(json.dumps({**meta, "prepare_ns": [0, 1]}))
    assert rows(path)[3].cycle_ms.point == pytest.approx(slowed)


IDLE = {
    "total_ms": 2.0, "gaps": 9.0, "points_ms": {}, "rows": [], "rest_ms": 0.0,
    "causes_ms": {
        "host at work": 0.7, "host waiting": 0.3, "launched, not begun": 0.2, "queued on the device": 0.5,
        "launch not seen": 0.3,
    },
}  # fmt: skip


def seams_at_zero(path: Path) -> Answer:
    return ask(evidence_of([load(path)], now=3), "seams at zero", range(1, 6), {})


def test_seams_at_zero_takes_what_the_device_waited_for_the_host(tmp_path: Path) -> None:
    """Of a window the causes that are the host's: 1.2 of 2 ms; a queued kernel's gap is the device's own."""
    answer = seams_at_zero(recorded(tmp_path, [0, 3], window(idle=IDLE, busy_ms={"point": 5.0})))
    assert answer.here is not None and "1.200 ms" in answer.assumptions[0]
    plain = rows(tmp_path / "run")
    for k, row in {3: answer.here, answer.best.steps if answer.best else 3: answer.best}.items():
        assert row is not None and row.cycle_ms.point == pytest.approx(plain[k].cycle_ms.point - 1.2, abs=0.001)
    assert answer.here.gain.point == pytest.approx(plain[3].cycle_ms.point / (plain[3].cycle_ms.point - 1.2), rel=0.001)


def test_no_more_seams_than_a_cycle_without_the_profiler_has_left(tmp_path: Path) -> None:
    cycle = rows(recorded(tmp_path, [0, 3], window()))[3].cycle_ms.point
    answer = seams_at_zero(recorded(tmp_path / "busy", [0, 3], window(idle=IDLE, busy_ms={"point": cycle - 0.4})))
    assert answer.here is not None and "fit into a cycle without the profiler" in answer.assumptions[0]
    assert answer.here.cycle_ms.point == pytest.approx(cycle - 0.4, abs=0.02)


def test_seams_of_timed_points_are_said_to_be_the_most(tmp_path: Path) -> None:
    idle = {"low": 0.8, "point": 0.9, "high": 1.0, "level": 0.95, "method": "t", "n": 9, "unit": "request"}
    path = write_run(tmp_path / "run", SEEN, [0, 3], changes={"device": {"idle_ms": idle}, "steps": 3})
    answer = seams_at_zero(path)
    assert answer.here is not None and "0.900 ms" in answer.assumptions[0] and "the most" in answer.assumptions[0]
    other = write_run(tmp_path / "other", SEEN, [0, 3], changes={"device": {"idle_ms": None, "reason": "host"}})
    assert seams_at_zero(other).here is None and "host clock only" in seams_at_zero(other).reason
