"""What ends a command before its server starts leaves no link behind."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from specmeter.bench import machine
from specmeter.bench.budget import Budget
from specmeter.bench.progress import Progress
from specmeter.bench.schedule import Sending
from specmeter.bench.session import Probing, planned_link, session
from specmeter.cli import main
from specmeter.commands.profile import _second_start
from specmeter.engines import ServerSpec
from specmeter.errors import SpecmeterError
from specmeter.trace.rundir import RunWriter


def links(folder: Path) -> list[Path]:
    return [path for path in folder.glob("specmeter/*") if path.is_dir()]


@pytest.mark.parametrize("command", [["profile"], ["sweep"], ["explain", "--live"]])
def test_a_refused_out_leaves_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    existing = tmp_path / "run"
    existing.mkdir()
    (existing / "run.json").write_text("{}")
    assert main([*command, "--model", str(tmp_path), "--out", str(existing)]) == 2
    assert "already exists" in capsys.readouterr().err
    assert links(tmp_path) == []


def test_an_interrupt_while_the_machine_is_looked_at_leaves_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def interrupted() -> str | None:
        raise KeyboardInterrupt

    monkeypatch.setattr(machine, "busy_warning", interrupted)
    spec, how = ServerSpec("embedded", (sys.executable, "-m", "specmeter", "serve")), Probing()
    link = planned_link(spec, how)
    assert link is not None and len(links(tmp_path)) == 1
    writer = RunWriter.create(tmp_path / "run", ["specmeter", "sweep"])
    with pytest.raises(KeyboardInterrupt), session(spec, link, writer, how, Progress(), "server"):
        raise AssertionError("no server is started")
    assert links(tmp_path) == []


def test_a_second_start_whose_run_cannot_be_made_leaves_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    spec = ServerSpec("embedded", (sys.executable, "-m", "specmeter", "serve"))
    writer = RunWriter.create(tmp_path / "run", ["specmeter", "profile"])
    taken = tmp_path / "run" / "children" / "baseline"
    taken.mkdir(parents=True)
    (taken / "run.json").write_text("{}")
    with pytest.raises(SpecmeterError, match="already exists"):
        _second_start(spec, Probing(), writer, Progress(), [], Sending(8), Budget(None), 0)
    assert links(tmp_path) == []
