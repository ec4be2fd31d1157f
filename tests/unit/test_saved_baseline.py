"""``--baseline DIR``: what a saved run measured of plain decoding, and runs that measured nothing of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

import specmeter
from specmeter.analysis.profile import Baseline, _divide, analyse
from specmeter.analysis.saved_baseline import baseline_step, named_step
from specmeter.analysis.stats import Interval
from specmeter.cli import main
from specmeter.errors import SpecmeterError
from specmeter.exports.figures import baseline_of
from specmeter.trace import load_rings
from specmeter.trace.rundir import RunWriter
from tests.support.saved_runs import PLAN, save_run

SWEEP = {
    "schema": "specmeter/analysis/1",
    "kind": "sweep",
    "baseline": "baseline",
    "arms": [],
    "verdict": {"word": "x"},
}


def sweep_run(folder: Path, document: dict[str, Any] | None = None) -> Path:
    """A finished run whose analysis is a sweep's: its baseline is the name of a setting."""
    writer = RunWriter.create(folder, ["specmeter", "sweep"])
    writer.write_analysis(SWEEP if document is None else document)
    writer.finish()
    return folder


@pytest.mark.parametrize(
    "command",
    [
        ["profile", "--threads", "1", "--out", "OUT", "--baseline"],
        ["top", "--once", "--seconds", "1", "--baseline"],
        ["metrics", "--once", "--every", "1", "--baseline"],
    ],
)
def test_a_sweep_is_refused_with_where_the_step_is(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*command, str(sweep_run(tmp_path / "sweep"))]) == 2
    said = capsys.readouterr().err
    assert "holds no baseline step" in said and "'sweep'" in said and "Name a run of `specmeter profile`" in said
    # A demo's directory is a sweep with the profile below it.
    inner = save_run(sweep_run(tmp_path / "demo") / "children" / "profile")
    assert main([*command, str(tmp_path / "demo")]) == 2
    assert f"Name {inner}" in capsys.readouterr().err and not (tmp_path / "OUT").exists()


def test_a_baseline_of_one_unit_has_infinite_ends(tmp_path: Path) -> None:
    run = specmeter.load(save_run(tmp_path / "run", prompts=1))
    saved = run.analysis["baseline"]["step_ms"]
    assert saved["low"] is None and saved["high"] is None and saved["n"] == 1
    step = named_step(run)
    assert (step.low, step.point, step.high) == (-math.inf, saved["point"], math.inf)
    assert baseline_of(run)[0] == saved["point"] / 1e3
    # A whole analysis with it: the gain has its estimate, and no interval.
    requests = specmeter.load(save_run(tmp_path / "again")).path
    rings = sorted((requests / "rings").glob("*.ring"))
    document = analyse(load_rings(rings, PLAN, ()), (), Baseline(step, "saved"))
    assert document["break_even_tokens"]["low"] is None and document["break_even_tokens"]["point"] > 0
    json.dumps(document, allow_nan=False)


def test_one_end_alone_gives_no_interval() -> None:
    one = Interval(9.0, 10.0, 11.0, 0.95, "t", 5, "request")
    half = baseline_step({"baseline": {"step_ms": {**one.as_json(), "low": None}}})
    assert half is not None and half.low == -math.inf and half.high == 11.0
    assert _divide(one, half).low == -math.inf


@pytest.mark.parametrize(
    "base", [None, "baseline", [], {}, {"step_ms": None}, {"step_ms": 3}, {"step_ms": {"point": 1}}]
)
def test_what_holds_no_step(base: object, tmp_path: Path) -> None:
    assert baseline_step({"baseline": base}) is None
    document = {**SWEEP, "kind": "compare", "baseline": base}
    with pytest.raises(SpecmeterError, match="holds no baseline step"):
        named_step(specmeter.load(sweep_run(tmp_path / "run", document)))
