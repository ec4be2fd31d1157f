"""The tables of device time on a real card: a captured graph, eager kernels, and a wait for the device in every
cycle."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from specmeter.analysis.device_document import window_facts
from specmeter.analysis.device_report import with_device
from specmeter.analysis.profile import Baseline, analyse
from specmeter.control import arm, disarm
from specmeter.control.deep import deep_window
from specmeter.control.link import Link
from specmeter.trace import load_link
from specmeter.trace.deep import load_deep
from tests.support.deep_server import ON_GPU, STEPS, deep_server, run_line

CYCLES = 40


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Link, subprocess.Popen[str]]]:
    with deep_server(tmp_path_factory.mktemp("tables"), ON_GPU) as (link, child):
        arm(link)
        yield link, child
        disarm(link)


def tables(link: Link) -> dict[str, Any]:
    deep_window(link, CYCLES)
    trace = load_link(link.path)
    return window_facts(trace, load_deep(link.path, trace)[-1])


def test_every_kernel_lies_in_a_leaf_and_the_parts_sum(server: tuple[Link, subprocess.Popen[str]]) -> None:
    found = tables(server[0])
    print(found)
    assert found["verdict"] and not found["reason"], found["reason"]
    assert found["cycles"]["cycles"] >= CYCLES - 3
    assert found["coverage"]["leaf_percent"] >= 98
    rows = {row["name"]: row for row in found["phases"]}
    assert rows["draft.graph"]["graph"] == "graph" and rows["draft.graph"]["graph_launches"] == 1
    assert rows["verify.forward"]["graph"] == "eager" and rows["verify.forward"]["kernels"] >= 2
    # The copy of one number waits for everything before it.
    assert rows["accept.sample"]["host_wait_ms"] > 0
    busy, idle = found["busy_ms"]["point"], found["idle_ms"]["point"]
    assert found["period_ms"]["point"] == pytest.approx(busy + idle)
    assert sum(row["ms"] for row in found["classes"]) == pytest.approx(busy)
    # The server pauses for a millisecond between cycles, outside of all points: the device waits for that.
    assert found["bound"]["word"] == "host-bound" and found["idle"]["points_ms"]["outside of all points"] > 0.5
    steps = [row for row in found["draft_steps"] if row["step"]]
    assert len(steps) == STEPS or not steps, found["draft_steps"]  # a step of this graph holds three kernels or four


def test_the_report_is_printed(server: tuple[Link, subprocess.Popen[str]]) -> None:
    pytest.importorskip("rich")
    from specmeter.reporters.terminal import render_analysis

    link, _ = server
    deep_window(link, CYCLES)
    trace = load_link(link.path)
    document = analyse(trace, [], Baseline(None, "none", "not asked for"))
    text = render_analysis(with_device(document, trace, load_deep(link.path, trace)), 120)
    print(text)
    assert "Device time (deep window" in text and "Why the device is idle" in text


def test_a_host_that_does_not_wait_runs_ahead(server: tuple[Link, subprocess.Popen[str]]) -> None:
    link, child = server
    run_line(child, "toymod.core.waits = False")
    found = tables(link)
    run_line(child, "toymod.core.waits = True")
    rows = {row["name"]: row for row in found["phases"]}
    assert rows["draft.graph"]["kernels"] == pytest.approx(round(rows["draft.graph"]["kernels"]))
    assert found["coverage"]["leaf_percent"] >= 98
