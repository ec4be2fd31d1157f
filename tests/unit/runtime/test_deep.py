"""Deep windows of a real process with real torch, on the CPU: whole cycles, never left on, refused with the reason."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from specmeter.control import arm, disarm, processes
from specmeter.control.deep import deep_window
from specmeter.control.link import Link
from specmeter.errors import Exit, SpecmeterError
from specmeter.trace import load_link
from specmeter.trace.deep import load_deep, save_deep
from tests.support.children import until
from tests.support.deep_server import ON_CPU, WITHOUT_TORCH, deep_server, point_ids, run_line

pytest.importorskip("torch")
Server = tuple[Link, subprocess.Popen[str]]
ENABLED = "toymod.torch.autograd._profiler_enabled()"


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for an idle moment for long before a window is written."""
    monkeypatch.setattr("specmeter.control.deep.QUIET_S", 0.1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One process for all tests: what one leaves behind, the next would meet."""
    with deep_server(tmp_path_factory.mktemp("deep"), ON_CPU) as found:
        yield found


@pytest.fixture
def armed(server: Server) -> Iterator[Server]:
    link, child = server
    arm(link)
    run_line(child, "going = True")
    yield link, child
    disarm(link)
    assert run_line(child, ENABLED) == "False"


def state(link: Link) -> dict[str, object]:
    """What the only process that runs last said of its window."""
    [process] = processes(link, alive_only=True)
    return dict(process.report["deep"])


def test_window_holds_whole_cycles_with_their_operators(armed: Server, tmp_path: Path) -> None:
    link, _child = armed
    asked = deep_window(link, 12, label="k=2")
    assert asked.activity == "cpu" and len(asked.done) == 1 and not asked.failed
    trace = load_link(link.path)
    window = load_deep(link.path, trace)[-1]
    assert window.on_cpu and "no device: operators on the CPU instead" in window.notes
    assert window.cycle_count == 12 and window.setting == "k=2"
    ids = point_ids(link)
    ops = window.kernels
    name = np.array(window.names)[ops["name"]]
    for cycle in range(window.cycles[0], window.cycles[1] + 1):
        here = ops["cycle"] == cycle
        assert set(ops["point"][here & (name == "aten::mm")]) == {ids["verify.forward"]}
        assert set(ops["point"][here & (name == "aten::argmax")]) == {ids["accept.sample"]}
        assert (here & (name == "aten::relu")).any()
    assert window.begin_ns <= ops["t0_ns"][window.inside()].min() and window.clock_error_ns < 20_000_000
    assert window.cost["ratio"]["point"] > 0 and window.cost["outside_ns"]["n"] >= 5
    run = tmp_path / "run"
    run.mkdir()
    (run / "plan.json").write_bytes((link.path / "plan.json").read_bytes())
    assert save_deep(link.path, run) >= 1
    assert all(
        path.stat().st_mode & 0o077 == 0 for path in [*(run / "deep").iterdir(), *(link.path / "deep").iterdir()]
    )
    bare = load_deep(run)[-1]
    assert "ring is not there" in " ".join(bare.notes) and np.array_equal(bare.kernels["t0_ns"], ops["t0_ns"])


def test_operators_of_a_thread_never_overlap(armed: Server) -> None:
    link, _child = armed
    deep_window(link, 5)
    ops = load_deep(link.path)[-1].kernels
    for stream in np.unique(ops["stream"]):
        own = ops["stream"] == stream
        ends = (ops["t0_ns"] + ops["dur_ns"])[own]
        assert (ops["t0_ns"][own][1:] >= ends[:-1]).all()


def test_deadline_ends_a_window_whose_cycles_do_not_come(armed: Server) -> None:
    link, child = armed
    caught: list[object] = []
    asking = threading.Thread(target=lambda: caught.append(deep_window(link, 2000, deadline_s=4.0)), daemon=True)
    before = len(load_deep(link.path))
    asking.start()
    until(lambda: state(link)["state"] == "on", "it is on")
    time.sleep(0.2)
    run_line(child, "going = False")
    asking.join(60)
    assert len(caught) == 1 and state(link)["state"] == "done"
    windows = load_deep(link.path)
    assert len(windows) == before + 1 and "ended at its deadline" in " ".join(windows[-1].notes)
    assert 0 < windows[-1].cycle_count < 2000


def test_disarming_ends_it_at_once_and_keeps_nothing(armed: Server) -> None:
    link, _child = armed
    before = len(load_deep(link.path))
    caught: list[BaseException] = []

    def asked() -> None:
        try:
            deep_window(link, 2000)
        except SpecmeterError as error:
            caught.append(error)

    asking = threading.Thread(target=asked, daemon=True)
    asking.start()
    until(lambda: state(link)["state"] in ("ready", "on"), "the profiler is ready")
    disarm(link)
    asking.join(60)
    assert caught and "taken out" in str(caught[0].why)
    assert len(load_deep(link.path)) == before


def test_a_profiler_that_runs_already_is_left_alone(armed: Server) -> None:
    link, child = armed
    run_line(child, "p = toymod.torch.profiler.profile(activities=[toymod.torch.profiler.ProfilerActivity.CPU])")
    assert run_line(child, "p.start()") == "None"
    with pytest.raises(SpecmeterError, match="deep window") as caught:
        deep_window(link, 5)
    assert "another torch profiler is running" in str(caught.value.why) and caught.value.exit == Exit.REFUSED
    assert run_line(child, "p.stop()") == "None"
    assert int(run_line(child, "len(p.events())")) > 0


def test_failure_to_write_is_told_and_leaves_the_server_going(armed: Server) -> None:
    link, child = armed
    kept = link.path / "kept"
    if (link.path / "deep").exists():
        (link.path / "deep").rename(kept)
    (link.path / "deep").write_text("in the way")
    try:
        with pytest.raises(SpecmeterError) as caught:
            deep_window(link, 3)
        assert "FileExistsError" in str(caught.value.why)
    finally:  # the tests after this one have the same server
        (link.path / "deep").unlink()
        if kept.exists():
            kept.rename(link.path / "deep")
    assert run_line(child, "going") == "True"
    assert deep_window(link, 3).done


def test_a_window_is_begun_while_the_one_before_it_is_still_being_turned_off(armed: Server) -> None:
    link, child = armed
    run_line(child, "Tool = sys.modules['_specmeter_runtime.deep_tool'].Tool; leave = Tool.leave")
    run_line(child, "Tool.leave = lambda self: (time.sleep(0.5), leave(self))")
    first: list[BaseException] = []

    def asked() -> None:
        try:
            deep_window(link, 2000)
        except SpecmeterError as error:
            first.append(error)

    asking = threading.Thread(target=asked, daemon=True)
    asking.start()
    until(lambda: state(link)["state"] == "on", "it is on")
    before = len(load_deep(link.path))
    assert deep_window(link, 3).done
    run_line(child, "Tool.leave = leave")
    asking.join(60)
    assert len(load_deep(link.path)) == before + 1 and not asking.is_alive()


STARTED = "toymod.torch.autograd._disable_profiler().trace_start_ns()"  # 0: none was on


def test_a_forked_child_is_under_no_profiler(armed: Server) -> None:
    link, child = armed
    asking = threading.Thread(target=lambda: deep_window(link, 2000, deadline_s=4.0), daemon=True)
    asking.start()
    until(lambda: state(link)["state"] == "on", "it is on")
    run_line(child, "os = __import__('os')")
    run_line(child, f"forked = os.fork() or os._exit(4 if {STARTED} else 3)")
    assert run_line(child, "os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])") == "3"
    asking.join(60)
    assert state(link)["state"] == "done"


def test_not_armed_and_silly_numbers_are_refused(server: Server) -> None:
    link, _child = server
    with pytest.raises(SpecmeterError, match="not armed"):
        deep_window(link, 5)
    with pytest.raises(SpecmeterError, match="0 cycles"):
        deep_window(link, 0)


def test_no_cycles_is_told(armed: Server) -> None:
    link, child = armed
    run_line(child, "going = False")
    with pytest.raises(SpecmeterError, match="No process of the server runs decode cycles"):
        deep_window(link, 5, deadline_s=0.3)


def test_a_process_without_torch_is_told_apart(tmp_path: Path) -> None:
    with deep_server(tmp_path, WITHOUT_TORCH) as (link, child):
        arm(link)
        with pytest.raises(SpecmeterError) as caught:
            deep_window(link, 5)
        assert "torch is not imported there" in str(caught.value.why) and caught.value.exit == Exit.REFUSED
        assert run_line(child, "going") == "True"
        disarm(link)


def test_the_end_of_the_process_ends_it(tmp_path: Path) -> None:
    with deep_server(tmp_path, ON_CPU) as (link, child):
        arm(link)
        failures: list[str] = []

        def asked() -> None:
            try:
                deep_window(link, 2000)
            except SpecmeterError as error:
                failures.append(str(error.why))

        asking = threading.Thread(target=asked, daemon=True)
        asking.start()
        until(lambda: state(link)["state"] == "on", "it is on")
        assert child.stdin is not None
        child.stdin.write("sys.exit(7)\n")
        child.stdin.flush()
        assert child.wait(60) == 7
        asking.join(60)
        assert failures and ("ended" in failures[0] or "ends" in failures[0])


def test_meta_says_what_each_part_took(armed: Server) -> None:
    link, _child = armed
    deep_window(link, 4)
    metas = sorted((link.path / "deep").glob("*.meta.json"), key=os.path.getmtime)
    meta = json.loads(metas[-1].read_text())
    for part in ("prepare", "start", "stop", "export"):
        began, ended = meta[f"{part}_ns"]
        assert began < ended
    assert meta["prepare_ns"][0] < meta["start_ns"][0] < meta["begin_ns"] < meta["end_ns"] < meta["export_ns"][0]
    assert meta["complete"] is True and len(meta["start_marks"]) == len(meta["stop_marks"]) > 3
