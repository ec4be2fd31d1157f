"""``draft at TP 1`` and NCCL's variables, from what a deep window saw of collectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specmeter.analysis.costmodel_curve import curve
from specmeter.analysis.costmodel_evidence import Assumed
from specmeter.analysis.costmodel_explain import evidence_of
from specmeter.analysis.whatif import ask
from specmeter.analysis.whatif_actions import actions
from specmeter.commands.explain_commands import ServerCommands
from specmeter.trace.rundir import load
from specmeter.tune.predict import nccl_verdict
from tests.support.cost_runs import Law, write_run


def seen(draft_ms: float = 0.5, extend_ms: float = 0.25, by_nccl: float = 0.0) -> dict[str, Any]:
    """The ``collectives`` of a document: verify's and the draft's."""
    whole = {"low": None, "high": None, "level": 0.95, "method": "t", "n": 9, "unit": "cycle"}
    rows = [
        {
            "phase": phase, "count": 61.0, "by_nccl": by_nccl, "bytes": None, "ms": {**whole, "point": ms},
            "transfer_ms": ms, "waiting_ms": {**whole, "point": 0.0}, "exposed_ms": ms, "busy_ms": 9.0, "percent": 5.0,
            "waiting_percent": 0.0, "skew_us": None, "straggler": None,
        }
        for phase, ms in (("verify", 3.0), ("draft", draft_ms), ("extend", extend_ms))
    ]  # fmt: skip
    kind = {
        "phase": "verify", "operation": "all-reduce", "backend": "FlashInfer", "count": 61.0, "bytes": None, "us": 9.0,
        "transfer_us": 8.0, "waiting_us": 1.0, "gb_s": None,
    }  # fmt: skip
    return {
        "collectives": {
            "cycles": 99, "left_out": 0, "phases": rows, "kinds": [kind], "ranks": [], "sentences": [], "notes": [],
            "setting": "k=3", "others": [],
        }
    }  # fmt: skip


def test_the_drafts_collectives_go_as_the_window_measured_them(tmp_path: Path) -> None:
    run = load(write_run(tmp_path / "run", Law(noise=0.001), [0, 3], changes=seen()))
    evidence = evidence_of([run])
    assert evidence.communication is not None
    assert evidence.communication.draft_ms == {"draft": 0.5, "extend": 0.25}
    plain = ask(evidence, "k=3", [3], {}).here
    answer = ask(evidence, "draft at TP 1", [1, 3, 5], {"draft": 1.0})
    assert answer.here is not None and plain is not None
    assert plain.cycle_ms.point - answer.here.cycle_ms.point == pytest.approx(0.75, abs=1e-6)
    assert answer.here.gain.point == pytest.approx(plain.cycle_ms.point / answer.here.cycle_ms.point, rel=1e-6)
    assert "0.500" in answer.assumptions[0] and "deep window" in answer.assumptions[0]
    # At 5 steps the loop runs 4 times in place of 2, the extend phase once as before; at 1 step there is no loop.
    assumed = Assumed(saved_ms={"draft": 0.5, "extend": 0.25})
    before = {row.steps: row.cycle_ms.point for row in curve(evidence, [1, 3, 5])}
    after = {row.steps: row.cycle_ms.point for row in curve(evidence, [1, 3, 5], assumed)}
    saved = {steps: before[steps] - after[steps] for steps in before}
    assert saved == pytest.approx({1: 0.25, 3: 0.75, 5: 1.25}, abs=1e-6)


def test_a_window_at_another_step_count_is_not_used(tmp_path: Path) -> None:
    run = load(write_run(tmp_path / "run", Law(), [0, 2], changes=seen()))
    assert evidence_of([run], now=4).communication is None
    assert "deep" in ask(evidence_of([run], now=4), "draft at TP 1", [4], {"draft": 1.0}).reason


def test_tune_is_told_only_where_every_profile_says_so(tmp_path: Path) -> None:
    none = write_run(tmp_path / "none", Law(), [0, 3], changes=seen())
    some = write_run(tmp_path / "some", Law(), [0, 3], changes=seen(by_nccl=2.0))
    blind = write_run(tmp_path / "blind", Law(), [0, 3])
    told = "NCCL serves 0 of 61 collectives in verify: no variable can help while FlashInfer does"
    assert nccl_verdict([none, blind]) == told
    assert nccl_verdict([none, some]) is None and nccl_verdict([blind]) is None and nccl_verdict([]) is None


def test_explain_offers_cheaper_collectives_without_what_is_waiting(tmp_path: Path) -> None:
    document = seen()
    document["collectives"]["phases"][0]["waiting_ms"]["point"] = 1.0
    document["collectives"]["phases"][0]["transfer_ms"] = 2.0
    evidence = evidence_of([load(write_run(tmp_path / "run", Law(), [0, 3], changes=document))])
    commands = ServerCommands("sglang", ("python", "-m", "sglang.launch_server", "--tp-size", "2"))
    found = actions(evidence, curve(evidence, [2, 3, 4]), commands)
    action = next(a for a in found if a.title == "cheaper collectives")
    cycle = Law().cycle_ms(3)
    assert action.gain.high == pytest.approx(cycle / (cycle - 2.75), rel=0.01)
    assert "2.75 ms a cycle" in action.why and "wait another 1.00 for the last rank" in action.why
    assert "NCCL serves 0 of 61 collectives in verify: no variable can help" in action.why
    # A variable of NCCL's would change nothing, so that is not what is to be tried.
    assert "NCCL_ALGO" not in action.command and "--disable-custom-all-reduce" in action.command
