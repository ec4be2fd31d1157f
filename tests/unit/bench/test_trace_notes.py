"""What a trace warns of reaches the user of sweep and of explain, as inert text."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

import specmeter.commands.sweep
from specmeter.bench.progress import Progress
from specmeter.bench.sweeping import Gathered, _keep_start
from specmeter.cli import main
from specmeter.commands.explain import prepare_parser, show
from specmeter.control.link import Link
from specmeter.trace import Request
from specmeter.trace.rundir import RunWriter, load
from specmeter.trace.synthetic import repeat_cycle, write_ring
from tests.support.cost_runs import Law, write_run
from tests.unit.test_trace_build import PLAN, one_cycle


@pytest.fixture
def link(tmp_path: Path) -> Link:
    """A link whose two processes say that they are one rank, as SGLang's with data parallelism do."""
    folder = tmp_path / "link"
    folder.mkdir()
    for pid in (5, 6):
        write_ring(folder / f"{pid}-1.ring", repeat_cycle(one_cycle(), 5, 100), pid=pid, rank=0)
    (folder / "plan.json").write_text(json.dumps(PLAN))
    return Link("x", folder)


def test_a_start_keeps_what_its_trace_warns_of(link: Link, tmp_path: Path) -> None:
    gathered = Gathered([Request("r", "p", "k=2", 0, 900, 1000, 10_000, 5, 9, "", 1)], [])
    child = RunWriter.create(tmp_path / "run", ["specmeter", "sweep"])
    _keep_start(link, "k=2", 1, child, gathered, Progress())
    (note,) = gathered.notes
    assert note.startswith("start 2, k=2: ") and "say that they are rank 0" in note and "\n" not in note


def test_sweep_prints_the_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = load(write_run(tmp_path / "old", Law(), [0, 2], kind="sweep")).analysis

    def swept(*_given: object, **_named: object) -> dict[str, Any]:
        return {**document, "notes": ["start 2, k=2: process 5 and 6 say that they are rank 0"]}

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(specmeter.commands.sweep, "sweep_in_fewest_starts", swept)
    assert main(["sweep", "--out", str(tmp_path / "run"), "--json", "--", "vllm", "serve", "M", "--port", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["warnings"] == ["start 2, k=2: process 5 and 6 say that they are rank 0"]


def test_explain_prints_what_the_live_run_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    prepare_parser(parser)
    run = load(write_run(tmp_path / "run", Law(), [0, 2]))
    show(parser.parse_args([str(run.path)]), [run], ["records of process 5 were lost"])
    assert "note: records of process 5 were lost" in capsys.readouterr().out
    show(parser.parse_args([str(run.path), "--json"]), [run], ["records of process 5 were lost"])
    assert "records of process 5 were lost" in json.loads(capsys.readouterr().out)["warnings"]
