"""The Python API on saved runs: tables, frames, plots, what a notebook shows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import specmeter
from specmeter.errors import SpecmeterError
from specmeter.trace.rundir import write_json
from tests.support.saved_runs import save_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("api") / "run", command=["x", "<script>alert(1)</script>\x1b"])


def test_tables_are_the_runs_and_the_analysis(folder: Path) -> None:
    run = specmeter.load(folder)
    assert run.table("cycles")["dur_ns"].to_pylist() == run.cycles["dur_ns"].tolist()
    phases = run.table("phases").to_pydict()
    assert dict(zip(phases["name"], phases["ms"], strict=True)) == {p["name"]: p["ms"] for p in run.analysis["phases"]}
    assert run.table("positions")["position"].to_pylist() == [1, 2]
    assert run.table("spans").schema.metadata[b"specmeter.schema"] == b"specmeter/table/1"
    for name in ("nothing", "arms", "path"):
        with pytest.raises(SpecmeterError):
            run.table(name)


def test_frames_where_pandas_is_and_an_error_where_it_is_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = specmeter.load(folder)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(SpecmeterError, match="pandas"):
        run.frame("cycles")
    monkeypatch.undo()
    pytest.importorskip("pandas")
    frame = run.frame("cycles")
    assert list(frame.columns) == list(run.cycles) and frame["dur_ns"].sum() == run.cycles["dur_ns"].sum()
    assert run.frame("phases").set_index("name").loc["verify", "ms"] == pytest.approx(9.6, abs=1e-3)


def test_a_notebook_sees_verdict_and_phases_inert(folder: Path) -> None:
    run = specmeter.load(folder)
    shown = run._repr_html_()
    assert "Speculation wins" in shown and "<td>verify</td>" in shown and "59.3 %" in shown
    document = {**run.analysis, "verdict": {"sentence": "<img src=x onerror=1>\x1b[31m"}}
    write_json(folder / "analysis.json", document)
    hostile = specmeter.load(folder)._repr_html_()
    write_json(folder / "analysis.json", run.analysis)
    assert "<img" not in hostile and "&lt;img" in hostile and "\x1b" not in hostile


def test_diff_shows_both_runs(folder: Path, tmp_path: Path) -> None:
    other = specmeter.load(save_run(tmp_path / "b", stretch=1.2))
    found = specmeter.load(folder).diff(other)
    assert "verify" in str(found) and "<script" not in found._repr_html_() and "&lt;script" in found._repr_html_()


def test_plots_are_the_reports_charts(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    run = specmeter.load(folder)
    plot = run.plot("cycle")
    assert plot.svg.startswith("<svg") and "verify: 9.600 ms" in plot.svg and "--p-verify: #" in plot._repr_html_()
    assert "<svg" in plot.save(tmp_path / "p.html").read_text()
    assert "<svg" in run.plot("positions").svg
    for name in ("speed", "nothing"):
        with pytest.raises(SpecmeterError):
            run.plot(name)


def test_timeline_and_children(folder: Path) -> None:
    run = specmeter.load(folder)
    assert run.timeline(0, 5).cycles == 5 and run.children == {}
