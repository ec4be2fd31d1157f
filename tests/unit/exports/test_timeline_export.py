"""Timelines of saved runs: read back, they are the run."""

from __future__ import annotations

import argparse
import gzip
import json
import struct
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import specmeter
from specmeter.cli import main
from specmeter.commands import export as command
from specmeter.errors import SpecmeterError
from specmeter.exports.check import check_format, phase_table
from specmeter.exports.nesting import begin_end, rows
from specmeter.exports.timeline import build_timeline
from specmeter.exports.torch_trace import join_torch
from specmeter.runtime import layout
from specmeter.trace.device import device_offset_ns
from specmeter.trace.synthetic import make_records
from tests.support.saved_runs import EPOCH, MS, PLAN, START, recording, save_run

HOSTILE = "verify.<script>alert(1)</script>\x1b[31m\u202e"


def export(run: Path, *words: str) -> dict[str, Any]:
    out = run.parent / f"{run.name}.trace.json"
    assert main(["export", str(run), "--out", str(out), *words]) == 0
    document: dict[str, Any] = json.loads(out.read_text())
    return document


def set_epoch(run: Path) -> None:
    """Write the calendar's time of START into the headers of the saved rings (synthetic rings have none)."""
    for ring in (run / "rings").glob("*.ring"):
        raw = bytearray(ring.read_bytes())
        struct.pack_into("<q", raw, layout.HEADER.size - 8, EPOCH)
        ring.write_bytes(raw)


def test_chrome_trace_read_back_adds_up_to_the_phase_table(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run", ranks=(0, 1))
    document = export(run)
    assert check_format(document) == []
    table = {row["name"]: row["ms"] for row in specmeter.load(run).analysis["phases"]}
    assert set(table) == {"draft", "verify", "accept"}
    for nested in (True, False):
        assert phase_table(document, None, nested) == pytest.approx(table, abs=1e-6)
    base = phase_table(document, "baseline")
    assert base["verify"] == pytest.approx(6.0, abs=1e-3) and "draft" not in base


def test_a_trace_without_the_reports_cycles_is_whole_and_said_not_to_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = save_run(tmp_path / "run")
    document = json.loads((run / "analysis.json").read_text())
    (run / "analysis.json").write_text(json.dumps({**document, "setting": "k=9"}))
    assert export(run)["traceEvents"]
    assert "not compared with the report: it holds no decode cycle of the report's setting" in capsys.readouterr().out


def test_a_file_that_cannot_be_read_back_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = save_run(tmp_path / "run")
    monkeypatch.setattr(command, "write_chrome", lambda _timeline, file, _joined: file.write("{"))
    with pytest.raises(ValueError):
        parser = argparse.ArgumentParser()
        command.prepare_parser(parser)
        command.run(parser.parse_args([str(run), "--out", str(tmp_path / "t.json")]))
    assert not (tmp_path / "t.json").exists()


def test_processes_are_ranks_with_lanes_for_cycles_and_host(tmp_path: Path) -> None:
    document = export(save_run(tmp_path / "run", ranks=(0, 1)))
    names = {(e["pid"], e["args"]["name"]) for e in document["traceEvents"] if e["name"] == "process_name"}
    assert [name.split(" on ")[0] for _pid, name in sorted(names)] == ["rank 0", "rank 1"]
    lanes = [e["args"]["name"].split(":")[0] for e in document["traceEvents"] if e["name"] == "thread_name"]
    assert lanes == ["cycles", "host", "cycles", "host"]
    counters = [e for e in document["traceEvents"] if e["ph"] == "C" and e["name"] == "tokens a cycle"]
    assert {e["args"]["sampled"] for e in counters} == {1, 2, 3}


def test_check_notices_a_span_that_was_changed(tmp_path: Path) -> None:
    document = export(save_run(tmp_path / "run"))
    table = phase_table(document, None)
    longest = max((e for e in document["traceEvents"] if e["name"] == "verify.forward"), key=lambda e: e["ts"])
    longest["dur"] += 1000
    assert phase_table(document, None)["verify"] > table["verify"] + 0.005
    longest["dur"] = -1
    assert check_format(document)


def test_a_window_holds_its_cycles_and_their_spans_only(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run")
    timeline = build_timeline(specmeter.load(run), 10, 13)
    cycles, host = timeline.lanes
    assert cycles.args["cycle"].tolist() == [10, 11, 12] and set(host.args["cycle"].tolist()) == {10, 11, 12}
    for bad in ("300:", "5:5", "x", "-4:2"):
        assert main(["export", str(run), "--out", str(tmp_path / "w"), f"--cycles={bad}"]) == 2
    assert not (tmp_path / "w").exists()


def test_perfetto_protobuf_read_back_has_the_same_slices(tmp_path: Path) -> None:
    messages = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
    run = save_run(tmp_path / "run", ranks=(0, 1))
    assert main(["export", str(run), "--format", "perfetto", "--out", str(tmp_path / "t.pftrace")]) == 0
    trace = messages.Trace.FromString((tmp_path / "t.pftrace").read_bytes())
    processes = [p.track_descriptor.process for p in trace.packet if p.track_descriptor.HasField("process")]
    assert [p.process_name.split(" on ")[0] for p in processes] == ["rank 0", "rank 1"]
    open_: dict[int, list[tuple[str, int]]] = {}
    spent: dict[str, int] = {}
    clock: dict[int, int] = {}
    last = 0
    for packet in trace.packet:
        if not packet.HasField("track_event"):
            continue
        event, stack = packet.track_event, open_.setdefault(packet.track_event.track_uuid, [])
        assert packet.timestamp >= clock.get(event.track_uuid, 0), "a track's events are in order of time"
        clock[event.track_uuid] = packet.timestamp
        if event.type == messages.TrackEvent.TYPE_SLICE_BEGIN:
            assert not stack or packet.timestamp >= stack[-1][1]
            stack.append((event.name, packet.timestamp))
            last = packet.timestamp
        else:
            name, begun = stack.pop()
            spent[name] = spent.get(name, 0) + packet.timestamp - begun
    assert not any(open_.values()) and last > START
    spans = specmeter.load(run).spans
    keep = spans["t0_ns"] + spans["dur_ns"] <= build_timeline(specmeter.load(run)).end_ns
    for name in ("verify.forward", "draft.forward", "accept.sample", "schedule.step"):
        assert spent[name] == int(spans["dur_ns"][keep & (spans["point"] == name)].sum())


def test_interleaved_calls_get_lanes_of_their_own() -> None:
    t0, dur = np.array([0, 5, 6, 30]), np.array([10, 20, 3, 5])
    parts = rows(t0, dur)
    assert [p.tolist() for p in parts] == [[0, 2, 3], [1]]
    assert list(begin_end(t0, dur, parts[0])) == [(0, 0), (6, 2), (9, -1), (10, -1), (30, 3), (35, -1)]


def test_device_spans_and_collectives_have_lanes_on_the_hosts_clock(tmp_path: Path) -> None:
    latency, began = [40, 15, 25], START + 999  # us after the call; the device's clock begins at ``began``
    extra: list[tuple[int, ...]] = [(began, 0, 1, 2, layout.KIND_CLOCK_PAIR, 0, 0)]
    host = [row for row in recording()[0] if row[3] == 2][:3]
    for (call, *_), late, number in zip(host, latency, (1, 2, 3), strict=True):
        device = call + late * 1000 - began
        extra.append((device, device + 3 * MS, number, 2, layout.KIND_DEVICE_SPAN, 0, 0))
        extra.append((call + 4 * MS, call + 5 * MS, number, 2, layout.KIND_COLLECTIVE, 0, 4096))
    offset = device_offset_ns(make_records([*host, *extra]))  # type: ignore[arg-type]
    assert offset == began - 15_000, "the fastest launch bounds the offset"
    run = save_run(tmp_path / "run", extra=extra)
    document = export(run)
    lanes = {e["args"]["name"].split(":")[0]: e["tid"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert set(lanes) == {"cycles", "host", "device", "collectives"}
    moved = [e for e in document["traceEvents"] if e["ph"] == "X" and e["tid"] == lanes["collectives"]]
    assert [e["args"]["bytes"] for e in moved] == [4096] * 3 and moved[0]["name"] == "verify.forward"


def torch_document(base: int) -> dict[str, Any]:
    return {
        "schemaVersion": 1,
        "baseTimeNanoseconds": base,
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "args": {"name": "python <b>"}, "ts": 1.0},
            {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 77, "tid": 77, "ts": 21_000.5, "dur": 300.0},
            {"ph": "s", "cat": "ac2g", "name": "ac2g", "id": 9, "pid": 77, "tid": 77, "ts": 21_000.5},
        ],
    }


@pytest.mark.parametrize("packed", [False, True])
def test_torch_profiler_trace_joins_on_the_runs_clock(tmp_path: Path, packed: bool) -> None:
    run = save_run(tmp_path / "run")
    set_epoch(run)
    text = json.dumps(torch_document(EPOCH - 3 * MS))
    path = tmp_path / ("torch.json.gz" if packed else "torch.json")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    document = export(run, "--torch", str(path))
    mm = next(e for e in document["traceEvents"] if e["name"] == "aten::mm")
    origin = int(document["otherData"]["origin_perf_counter_ns"])
    # 21,000.5 us after a base 3 ms before START.
    assert mm["ts"] * 1000 == pytest.approx(START + 18 * MS + 500 - origin, abs=1) and mm["dur"] == 300
    assert mm["pid"] != 77 and next(e for e in document["traceEvents"] if e["ph"] == "s")["id"] == "0.9"


def test_torch_trace_of_another_time_is_said_and_broken_ones_refused(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run")
    path = tmp_path / "torch.json"
    path.write_text(json.dumps(torch_document(EPOCH + 3600_000 * MS)))
    with pytest.raises(SpecmeterError, match="clock"):
        join_torch(path, build_timeline(specmeter.load(run)))
    set_epoch(run)
    timeline = build_timeline(specmeter.load(run))
    found = join_torch(path, timeline)
    assert found.inside == 0 and "away from the exported window" in found.warnings[0]
    for bad in ("{", "[]", '{"traceEvents": 3}', '{"traceEvents": [3]}', '{"traceEvents": [{"ph": "X", "ts": "x"}]}'):
        path.write_text(bad)
        with pytest.raises(SpecmeterError):
            join_torch(path, timeline)


def test_hostile_names_are_inert(tmp_path: Path) -> None:
    plan = {**PLAN, "points": [dict(p) for p in PLAN["points"]]}
    plan["points"][1]["name"] = HOSTILE
    run = save_run(tmp_path / "run", plan=plan)
    document = export(run)
    raw = (tmp_path / "run.trace.json").read_text()
    assert "<" not in raw and "\x1b" not in raw
    names = {e["name"] for e in document["traceEvents"] if e["ph"] == "X"}
    assert "verify.<script>alert(1)</script>?[31m?" in names
    if pytest.importorskip("perfetto"):
        assert main(["export", str(run), "--format", "perfetto", "--out", str(tmp_path / "h")]) == 0
        assert b"\x1b" not in (tmp_path / "h").read_bytes().split(b"verify.<script>")[1][:60]


def test_one_cycle_missing_rank_and_nothing_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = save_run(tmp_path / "gap", ranks=(0, 2))
    assert build_timeline(specmeter.load(run)).warnings == ("no cycles of rank 1: its ring was not recorded",)
    one = build_timeline(specmeter.load(run), 3, 4)
    assert one.cycles == 1 and len(one.lanes[0]) == 1
    for ring in (run / "rings").glob("*.ring"):
        ring.write_bytes(ring.read_bytes()[:5000])
    damaged = build_timeline(specmeter.load(run))
    assert any("left out" in w for w in damaged.warnings) and damaged.slices
    (run / "spans.parquet").write_bytes(b"PAR1 no")
    assert main(["export", str(run), "--out", str(tmp_path / "o")]) == 2
    assert "cannot be read" in capsys.readouterr().err and not (tmp_path / "o").exists()
    (run / "cycles.parquet").unlink()
    (run / "spans.parquet").unlink()
    (run / "requests.parquet").unlink()
    for form in ("chrome", "perfetto", "json", "parquet", "openmetrics"):
        assert main(["export", str(run), "--format", form, "--out", str(tmp_path / form)]) == 2
        assert not (tmp_path / form).exists()
    assert main(["export", str(tmp_path)]) == 2


def test_nothing_is_written_over(tmp_path: Path) -> None:
    run = save_run(tmp_path / "run")
    (tmp_path / "there").write_text("mine")
    for form in ("chrome", "json", "parquet"):
        assert main(["export", str(run), "--format", form, "--out", str(tmp_path / "there")]) == 2
    assert (tmp_path / "there").read_text() == "mine"
    assert main(["export", str(run), "--out", str(tmp_path / "no" / "such")]) == 5


def test_a_library_that_is_missing_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = save_run(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "perfetto.protos.perfetto.trace", None)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    for form, extra in (("perfetto", "perfetto"), ("openmetrics", "metrics")):
        with pytest.raises(SpecmeterError) as error:
            parser = argparse.ArgumentParser()
            command.prepare_parser(parser)
            command.run(parser.parse_args([str(run), "--format", form, "--out", str(tmp_path / form)]))
        assert f"'.[{extra}]'" in error.value.next_step and error.value.exit == 5


def test_metrics_names_a_missing_library_before_it_looks_or_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    for words in (["--once"], ["--listen", "127.0.0.1:0"], ["--textfile", "/nowhere/f", "--once"]):
        assert main(["metrics", *words]) == 5
    assert waited == []
