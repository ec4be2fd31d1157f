"""What a command that failed or was interrupted leaves of its run."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specmeter.cli import main
from specmeter.errors import Exit, SpecmeterError
from specmeter.trace.rundir import RunWriter


def test_a_command_that_failed_before_it_kept_anything_leaves_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_args: Any) -> int:
        RunWriter.create(None, ["specmeter", "bench"])
        raise SpecmeterError("no server", exit=Exit.SERVER_FAILED)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("specmeter.commands.Entry.load", lambda _entry: SimpleNamespace(prepare_parser=id, run=run))
    assert main(["bench"]) == 4
    assert list(tmp_path.iterdir()) == []


def _interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: str) -> None:
    def run(_args: Any) -> int:
        writer = RunWriter.create(tmp_path / "a run", ["specmeter", "bench"])
        writer.child("baseline")
        if log:
            (writer.logs / "server.log").write_text(log)
        signal.raise_signal(signal.SIGINT)
        return 0

    monkeypatch.setattr("specmeter.commands.Entry.load", lambda _entry: SimpleNamespace(prepare_parser=id, run=run))
    assert main(["bench"]) == 130


def test_an_interrupt_names_the_run_and_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _interrupted(tmp_path, monkeypatch, "ready")
    said = capsys.readouterr().err
    assert said.startswith(f"interrupted; kept in {tmp_path}/a run: `specmeter report '{tmp_path}/a run'`")
    assert sorted(path.name for path in (tmp_path / "a run").iterdir()) == ["logs", "run.json"]


def test_an_interrupt_before_anything_was_kept_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "other").touch()
    _interrupted(tmp_path, monkeypatch, "")
    assert capsys.readouterr().err == "interrupted\n"
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
