"""Deep windows of a process with CUDA: kernels of a graph captured before, of eager calls, copies and waits."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specmeter.control import arm, disarm
from specmeter.control.deep import deep_window
from specmeter.control.link import Link
from specmeter.trace.deep import KERNEL, MEMCPY, DeepWindow, load_deep
from specmeter.trace.deep_repeats import split_repeats
from tests.support.deep_server import ON_GPU, STEPS, deep_server, point_ids, run_line

CYCLES = 30


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Link, subprocess.Popen[str]]]:
    with deep_server(tmp_path_factory.mktemp("deep"), ON_GPU) as (link, child):
        arm(link)
        yield link, child
        disarm(link)


@pytest.fixture(scope="module")
def window(server: tuple[Link, subprocess.Popen[str]]) -> DeepWindow:
    link, _child = server
    asked = deep_window(link, CYCLES)
    assert asked.activity == "cuda" and len(asked.done) == 1, asked
    return load_deep(link.path)[-1]


def named(window: DeepWindow) -> Any:
    return np.array(window.names)[window.kernels["name"]]


def test_whole_cycles_and_a_card(window: DeepWindow) -> None:
    print(window.cost, window.clock_error_ns, window.notes)
    assert window.device and not window.on_cpu
    assert window.cycle_count == CYCLES, window.notes
    assert window.notes == ()
    assert window.clock_error_ns < 100_000


def test_kernels_of_each_call_belong_to_its_point_in_every_cycle(
    server: tuple[Link, subprocess.Popen[str]], window: DeepWindow
) -> None:
    ids, kernels = point_ids(server[0]), window.kernels
    inside = window.inside()
    replayed = kernels["graph_launch"]
    assert set(kernels["point"][inside & replayed]) == {ids["draft.graph"]}
    counts = []
    for cycle in range(window.cycles[0], window.cycles[1] + 1):
        here = kernels["cycle"] == cycle
        assert len(np.unique(kernels["graph"][here & replayed])) == 1
        counts.append((int((here & replayed).sum()), int((here & ~replayed).sum())))
        points = kernels["point"][here & ~replayed & (kernels["kind"] == KERNEL)]
        assert set(points.tolist()) == {ids["verify.forward"]}
        copies = here & (kernels["kind"] == MEMCPY) & (kernels["point"] == ids["accept.sample"])
        assert kernels["bytes"][copies].tolist() == [4]
    assert len(set(counts)) == 1 and counts[0][0] >= 3 * STEPS, counts


def test_nothing_runs_before_its_launch_nor_after_its_wait(
    server: tuple[Link, subprocess.Popen[str]], window: DeepWindow
) -> None:
    ids, kernels, syncs = point_ids(server[0]), window.kernels, window.syncs
    inside = window.inside()
    assert (kernels["launch_ns"][inside] > 0).all()
    assert (kernels["t0_ns"][inside] >= kernels["launch_ns"][inside]).all()
    waits = syncs["point"] == ids["accept.sample"]
    assert set(range(window.cycles[0], window.cycles[1] + 1)) <= set(syncs["cycle"][waits].tolist())
    for cycle in range(window.cycles[0], window.cycles[1] + 1):
        end = (syncs["t0_ns"] + syncs["dur_ns"])[waits & (syncs["cycle"] == cycle)].max()
        last = (kernels["t0_ns"] + kernels["dur_ns"])[kernels["cycle"] == cycle].max()
        assert last <= end + window.clock_error_ns + 20_000  # the driver's own mapping of the device's clock


def test_steps_inside_the_graph_are_found(window: DeepWindow) -> None:
    kernels = window.kernels
    replay = np.unique(kernels["graph"][window.inside() & kernels["graph_launch"]])[0]
    names = kernels["name"][kernels["graph"] == replay]
    blocks = split_repeats(names, STEPS)
    assert len(blocks) == STEPS, [window.names[at] for at in names]
    assert len({tuple(names[block].tolist()) for block in blocks}) == 1


def test_cost_is_told_and_a_second_window_is_ready_sooner(
    server: tuple[Link, subprocess.Popen[str]], window: DeepWindow
) -> None:
    link, child = server
    deep_window(link, 5)
    again = load_deep(link.path)[-1]
    print(window.cost, again.cost)
    assert window.cost["ratio"] and again.cost["prepare_s"] < max(1.0, window.cost["prepare_s"])
    assert run_line(child, "toymod.torch.autograd._profiler_enabled()") == "False"


def test_a_host_that_runs_ahead_keeps_its_kernels_in_their_cycles(
    server: tuple[Link, subprocess.Popen[str]], tmp_path: Path
) -> None:
    link, child = server
    run_line(child, "toymod.core.waits = False")
    deep_window(link, CYCLES)
    window = load_deep(link.path)[-1]
    run_line(child, "toymod.core.waits = True")
    kernels = window.kernels
    assert window.cycle_count > 3, window.notes
    counts = [int((kernels["cycle"] == c).sum()) for c in range(window.cycles[0], window.cycles[1] + 1)]
    assert len(set(counts)) == 1, counts
