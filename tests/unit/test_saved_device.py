"""``specmeter report`` of a run whose directory keeps deep windows: tables are made from the profiler's files again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specmeter.analysis.profile import Baseline, analyse
from specmeter.cli import main
from specmeter.trace import load_link
from specmeter.trace.deep import save_deep
from specmeter.trace.deep_synthetic import Call, Kernel
from specmeter.trace.rundir import RunWriter
from tests.support.deep_files import USUAL, VERIFY, played


def saved(folder: Path) -> Path:
    """A finished profile of 20 cycles under the profiler, whose analysis knows nothing of the window."""
    calls = (USUAL[0], Call(VERIFY, (Kernel("gemm", 40_000), Kernel("odd_one", 9_000)), host_ns=2_000), USUAL[2])
    link = played(folder / "link", count=20, calls=calls).write()
    trace = load_link(link)
    writer = RunWriter.create(folder / "run", ("specmeter", "profile"))
    writer.write_plan(trace.plan)
    writer.save_rings(link)
    writer.write_trace(trace)
    writer.write_analysis(analyse(trace, [], Baseline(None, "none", "not asked for")))
    assert save_deep(link, writer.path) == 1
    writer.finish()
    return writer.path


def test_the_report_has_the_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = saved(tmp_path)
    assert main(["report", str(run)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Device time (deep window: k=3, " in text and "Why the device is idle" in text
    assert "100.0 % of the busy time lies in kernels of named leaf phases" in text
    assert "Not compared: no window of plain decoding was recorded." in text


def test_json_has_them_too_and_a_users_patterns_go_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, mine = saved(tmp_path), tmp_path / "mine.toml"
    mine.write_text('schema = 1\n[[class]]\nname = "attention"\npatterns = ["odd_"]\n')
    classes = []
    for more in ([], ["--kernel-classes", str(mine)]):
        assert main(["report", str(run), "--json", *more]) == 0
        [window] = json.loads(capsys.readouterr().out)["result"]["device"]["windows"]
        classes.append({row["class"]: row["ms"] for row in window["classes"] if row["phase"] == "verify"})
        assert window["cycles"]["cycles"] >= 16 and window["graphs"][0]["graph_cycles"] == window["cycles"]["cycles"]
    assert classes[0]["other"] == classes[1]["attention"] == pytest.approx(0.009) and "other" not in classes[1]


def test_a_broken_file_of_patterns_is_one_plain_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, mine = saved(tmp_path), tmp_path / "mine.toml"
    mine.write_text("[[class]]")
    assert main(["report", str(run), "--kernel-classes", str(mine)]) == 2
    assert "holds no kernel classes" in capsys.readouterr().err


def test_a_damaged_window_is_one_plain_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = saved(tmp_path)
    [packed] = (run / "deep").glob("*.json.gz")
    packed.write_bytes(packed.read_bytes()[:200])
    assert main(["report", str(run)]) == 2
    assert "Traceback" not in capsys.readouterr().err
