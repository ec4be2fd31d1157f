"""Profiler traces that are damaged, or made to harm: one clear error, no waiting, nothing written."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

import specmeter
from specmeter.cli import main
from specmeter.exports import torch_trace
from specmeter.exports.timeline import build_timeline
from tests.support.saved_runs import save_run
from tests.unit.exports.test_timeline_export import set_epoch

EVENT = {"ph": "X", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.0, "dur": 2.0}
DEEP = 90_000


def text(document: Any, **raw: str) -> bytes:
    """The document as JSON, each string ``@NAME`` in it replaced by ``raw[NAME]`` as it is."""
    made = json.dumps(document)
    for name, value in raw.items():
        made = made.replace(f'"@{name}"', value)
    return made.encode()


def with_event(**change: Any) -> dict[str, Any]:
    return {"baseTimeNanoseconds": 0, "traceEvents": [EVENT | change]}


NAMED = {"ph": "M", "name": "process_name"}
BAD: dict[str, tuple[bytes, str]] = {
    "process_name's args are a list": (text(with_event(**NAMED, args=[1])), "(args) are no object but list"),
    "process_name's args are text": (text(with_event(**NAMED, args="x")), "(args) are no object but str"),
    "an event's args are a number": (text(with_event(args=7)), "(args) are no object but int"),
    "ts of 400 digits": (text(with_event(ts="@N"), N="9" * 400), "of 400 characters is beyond 64 bits"),
    "ts of 10,000 digits": (text(with_event(ts="@N"), N="9" * 10_000), "of 10000 characters is beyond 64 bits"),
    "ts beyond this century": (text(with_event(ts=1e300)), "time (ts) is 1e+300"),
    "ts that is a flag": (text(with_event(ts=True)), "time (ts) is True"),
    "ts that is null": (text(with_event(ts=None)), "time (ts) is None"),
    "dur NaN": (text(with_event(dur=float("nan"))), "NaN is no number of JSON"),
    "dur infinite": (text(with_event(dur="@N"), N="1e999"), "1e999 is beyond what a float holds"),
    "dur below 0": (text(with_event(dur=-1)), "duration (dur) is -1"),
    "dur that is text": (text(with_event(dur="\x1b[31m")), "duration (dur) is ?[31m"),
    "NaN in args": (text(with_event(args={"a": {"b": [float("nan")]}})), "NaN is no number of JSON"),
    "1e999 in args": (text(with_event(args={"a": ["@N"]}), N="-1e999"), "-1e999 is beyond what a float holds"),
    "base that is a float": (text({"baseTimeNanoseconds": 1.5, "traceEvents": []}), "baseTimeNanoseconds is 1.5"),
    "base below 0": (text({"baseTimeNanoseconds": -1, "traceEvents": []}), "baseTimeNanoseconds is -1"),
    "base of 64 bits": (text({"baseTimeNanoseconds": 1 << 63, "traceEvents": []}), "which is no time"),
    "nested to the reader's end": (b"[" * DEEP, "nested more than 100 deep"),
    "nested in args": (text(with_event(args={"a": "@N"}), N="[" * 300 + "]" * 300), "nested more than 100 deep"),
    "cut off": (text(with_event())[:-5], "Expecting"),
    "no text": (b"\xff\xfe\xff", "codec can't decode"),
    "empty": (b"", "Expecting value"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save_run(tmp_path_factory.mktemp("torch") / "run")
    set_epoch(path)
    return path


def refused(run: Path, path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What is said of the trace; its export must fail as a user's mistake does, and leave nothing."""
    folder = path.parent / "out"
    folder.mkdir()
    code = main(["export", str(run), "--torch", str(path), "--out", str(folder / "t.json")])
    shown = capsys.readouterr()
    assert code == 2 and not list(folder.iterdir()) and "\x1b" not in shown.err
    assert str(path) in shown.err and "why:" in shown.err and "next:" in shown.err
    return " ".join(shown.err.split())


def test_the_event_that_is_changed_below_is_sound(run: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.json").write_bytes(text(with_event(args=None)))
    found = torch_trace.join_torch(tmp_path / "torch.json", build_timeline(specmeter.load(run)))
    assert [(e["name"], e["dur"]) for e in found.events] == [("aten::mm", 2.0)]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("name", BAD)
def test_what_is_damaged_is_a_clear_error(
    run: Path, tmp_path: Path, name: str, packed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, said = BAD[name]
    path = tmp_path / ("torch.json.gz" if packed else "torch.json")
    path.write_bytes(gzip.compress(raw) if packed else raw)
    assert said in refused(run, path, capsys)


def test_a_pipe_is_not_waited_for(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("torch.json", "torch.json.gz"):
        (tmp_path / name).mkdir()
        os.mkfifo(tmp_path / name / name)
        assert "a pipe or a device" in refused(run, tmp_path / name / name, capsys)


def test_the_limit_is_on_what_is_unpacked(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = text(with_event(args={"a": " " * (3 << 20)}))
    path = tmp_path / "torch.json.gz"
    path.write_bytes(gzip.compress(raw))
    assert path.stat().st_size < 1 << 16
    monkeypatch.setattr(torch_trace, "MOST_BYTES", 1 << 20)
    assert "it is larger than 1 MiB" in refused(run, path, capsys)


@pytest.mark.parametrize("end", [-20, 12, 1])
def test_a_packed_file_that_is_cut_off(run: Path, tmp_path: Path, end: int, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "torch.json.gz"
    path.write_bytes(gzip.compress(text(with_event(args={"a": list(range(200))})))[:end])
    assert "cannot be read" in refused(run, path, capsys)
