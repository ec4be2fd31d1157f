"""Device time in the text report and on the page: at every width, for a card and for a CPU, with names that try to
act."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specmeter.analysis.device_report import with_device
from specmeter.analysis.profile import Baseline, analyse
from specmeter.reporters.html.device_section import device_sections
from specmeter.reporters.terminal import render_analysis
from specmeter.trace.deep_synthetic import Call, Kernel, copy_kernel
from specmeter.trace.shape import check_document
from tests.support.deep_runs import BETWEEN, on, recorded

HOSTILE = "kernel\x1b[31m<script>alert(1)</script>"


def cycle(scale: int = 1) -> list[Call]:
    step = (
        Kernel("nvjet_a", 9000), Kernel("_fwd_kernel_stage1", 4000 * scale), Kernel("nvjet_b", 8000),
        Kernel("rms_norm", 2000), Kernel("nvjet_head", 40_000),
    )  # fmt: skip
    return [
        Call(on("draft.graph"), (*step, Kernel("gatherTopK", 3000)) * 3, host_ns=30_000, graph=True),
        Call(on("kv.meta"), (Kernel(HOSTILE, 1500),), host_ns=8000),
        Call(on("verify.forward"), step * 2, host_ns=20_000, graph=True),
        Call(on("accept.sample"), (Kernel("argmax", 2500),), host_ns=4000),
        Call(on("wait.copy"), (copy_kernel(64, 1200),), sync="cudaEventSynchronize"),
        Call(BETWEEN, host_ns=60_000),
    ]


def made(folder: Path, **change: Any) -> dict[str, Any]:
    trace, window = recorded(folder / "spec", [cycle(3)] * 12)
    other, plain = recorded(folder / "plain", [cycle()] * 9, numbers=[(1, 0, 0, 0)] * 9)
    document = analyse(trace, [], Baseline(None, "none", "not asked for"))
    windows = [replace(window, **change), replace(window, rank=1, notes=("a note",), **change)]
    return with_device(document, trace, windows, (other, [plain]))


@pytest.mark.parametrize("width", [40, 64, 80, 100, 160])
def test_the_report_shows_phases_verify_and_the_reason_of_idle_time(tmp_path: Path, width: int) -> None:
    text = render_analysis(made(tmp_path), width)
    assert max(len(line) for line in text.splitlines()) <= width and "\x1b" not in text
    words = " ".join(text.split())
    assert "Device time (deep window: 12 decode cycles, batch 1, 3 steps, verify as a graph)" in words
    assert "Why the device is idle" in words and "Verify against a plain step, on the device" in words
    assert "Draft steps inside the graph" in words and "Kernels of no known class" in words
    assert "verify.forward" in words and "attention: the context is read once" in words
    assert "rank 1 on host" in words


def test_the_document_is_plain_json_of_the_shape_that_runs_have(tmp_path: Path) -> None:
    document = made(tmp_path)
    again = json.loads(json.dumps(document, allow_nan=False))
    assert check_document(Path("analysis.json"), again) == again
    again["device"]["windows"][0]["verdict"] = "none"
    with pytest.raises(Exception, match="damaged"):
        check_document(Path("analysis.json"), again)


def test_a_cpu_window_says_so_and_calls_nothing_device_bound(tmp_path: Path) -> None:
    document = made(tmp_path, on_cpu=True, device="")
    words = " ".join(render_analysis(document, 100).split())
    assert "No device times: recorded on a CPU" in words and "operators on the host" in words
    assert "bound" not in words.split("Device time")[1].split("Acceptance")[0]
    html = "".join(section.as_html() for section in device_sections(document))
    assert "recorded on a CPU" in html and "device-bound" not in html


def test_the_page_has_both_sections_and_escapes_names(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    sections = device_sections(made(tmp_path), "x-")
    assert [section.anchor for section in sections] == ["x-device", "x-width"]
    html = "".join(section.as_html() for section in sections)
    assert "<script>" not in html and "\x1b" not in html and "kernel?[31m&lt;script&gt;" in html
    assert "<svg" in html and "verify.forward" in html


def test_without_a_window_nothing_is_shown(tmp_path: Path) -> None:
    trace, _ = recorded(tmp_path, [cycle()] * 5)
    document = analyse(trace, [], Baseline(None, "none", "not asked for"))
    assert with_device(document, trace, []) == document and device_sections(document) == []
    assert "Device time" not in render_analysis(document)
