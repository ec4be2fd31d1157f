"""Device idle time of a recorded run, against spans whose sums are known; synthetic records, for no GPU is here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specmeter.analysis.profile import analyse, baseline_from_trace
from specmeter.reporters import numbers
from specmeter.reporters.terminal import render_analysis
from specmeter.runtime import layout
from specmeter.trace import load_rings
from specmeter.trace.device import device_rings
from specmeter.trace.ring import read_ring
from specmeter.trace.rundir import RunWriter
from specmeter.trace.synthetic import make_records, write_ring
from tests.support.saved_runs import MS, PLAN, Rows, recording

DEVICE = layout.KIND_DEVICE_SPAN


def recorded(folder: Path, device: Rows, rows: Rows, requests: Any) -> dict[str, Any]:
    """The document of a run with these device spans; the device's clock is the host's less 5 s."""
    folder.mkdir()
    write_ring(folder / "7-1.ring", make_records([*rows, *device]), pid=7, rank=0)  # type: ignore[arg-type]
    trace = load_rings([folder / "7-1.ring"], PLAN, requests)
    writer = RunWriter.create(folder / "run", ("x",))
    writer.save_rings(folder)
    (writer.path / "rings" / "8-1.ring").write_bytes(b"no ring")
    return analyse(trace, requests, baseline_from_trace(trace), rings=device_rings(writer.path))


def test_idle_is_what_the_device_spans_leave_of_a_cycle(tmp_path: Path) -> None:
    rows, requests = recording(prompts=3, cycles=20)
    device: Rows = []
    for row in (row for row in rows if row[3] == 2):
        # 6 ms from each call of verify on, and beside it, on another stream, 2 ms that reach 1 ms further.
        t0 = row[0] - 5000 * MS
        device += [(t0, t0 + 6 * MS, row[2], 2, DEVICE, 0, 0), (t0 + 5 * MS, t0 + 7 * MS, row[2], 3, DEVICE, 0, 0)]
    document = recorded(tmp_path / "a", device, rows, requests)
    found, mean = document["device"], document["cycle"]["mean_ms"]["point"]
    assert found["busy_ms"] == pytest.approx(7, abs=1e-3) and found["cycles"] == document["cycle"]["count"]
    assert found["idle_ms"]["point"] == pytest.approx(mean - 7, abs=1e-3) and found["idle_ms"]["n"] == 3
    assert found["idle_percent"] == pytest.approx(100 * (mean - 7) / mean, abs=0.01)
    words = f"; no timed point runs on the device for {found['idle_percent']:.0f} % of it."
    assert document["verdict"]["sentence"].endswith(words)
    text = " ".join(render_analysis(document).split())
    assert "Device: 7.000 ms a cycle in its timed points" in text


def test_only_cycles_with_device_spans_count(tmp_path: Path) -> None:
    rows, requests = recording(prompts=3, cycles=20)
    verify = [row for row in rows if row[3] == 2]
    device = [(r[0] - MS, r[0] + 3 * MS, r[2], 2, DEVICE, 0, 0) for i, r in enumerate(verify) if i % 4 == 0]
    document = recorded(tmp_path / "a", device, rows, requests)
    assert 0 < document["device"]["cycles"] < document["cycle"]["count"] / 2
    assert document["device"]["busy_ms"] == pytest.approx(4, abs=0.01)


def test_without_device_spans_the_reason_is_said(tmp_path: Path) -> None:
    rows, requests = recording(prompts=2, cycles=10)
    document = recorded(tmp_path / "a", [], rows, requests)
    found = document["device"]
    assert found["idle_ms"] is None and found["busy_ms"] is None and "no device spans were recorded" in found["reason"]
    assert "device" not in document["verdict"]["sentence"]
    text = " ".join(render_analysis(document).split())
    assert "Seams (the device waiting): not measured, host times only" in text
    # Spans on the baseline's cycles alone: there is a device, and nothing of it counts.
    plain = [(r[0] - MS, r[0] + 3 * MS, r[2], 2, DEVICE, 0, 0) for r in rows if r[3] == 2][:10]
    assert "no cycle that counts" in recorded(tmp_path / "b", plain, rows, requests)["device"]["reason"]
    # A deep window tells more, and a run of an older version holds no reason.
    for device in ({**found, "windows": []}, {"windows": [{}]}, None):
        again = numbers.device_line(device)
        assert bool(again) is (device is not None and device.get("windows") == [])


def test_another_process_that_says_the_same_rank_gives_no_device_time(tmp_path: Path) -> None:
    rows, requests = recording(prompts=2, cycles=20)
    verify = [row for row in rows if row[3] == 2]
    for pid, length, kept in ((5, 2, len(rows) // 2), (7, 6, len(rows))):
        device = [(r[0], r[0] + length * MS, r[2], 2, DEVICE, 0, 0) for r in verify]
        write_ring(tmp_path / f"{pid}-1.ring", make_records([*rows[:kept], *device]), pid=pid, rank=0)
    paths = sorted(tmp_path.glob("*.ring"))
    trace = load_rings(paths, PLAN, requests)
    assert trace.main.pid == 7, "the one with most cycles leads"
    document = analyse(trace, requests, baseline_from_trace(trace), rings=[read_ring(path) for path in paths])
    assert document["device"]["busy_ms"] == pytest.approx(6, abs=0.01)
    assert trace.warnings[0] in " ".join(render_analysis(document, 4000).split())
