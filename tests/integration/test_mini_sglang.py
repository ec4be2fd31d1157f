"""SGLang's structure in miniature under ``specmeter run``: a spawned scheduler in an endless loop, armed live."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specmeter.control import Link, arm, disarm, find_link, knob_states, launch_env, processes, turn
from specmeter.control.prepare import prepare_link
from specmeter.trace import load_link
from tests.support.children import until

HERE = Path(__file__).resolve().parents[1] / "support" / "mini_sglang"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package, installed as far as its metadata go, and a runtime directory of its own."""
    shutil.copytree(HERE / "minisgl", tmp_path / "minisgl", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "minisgl-1.2.dist-info").mkdir()
    (tmp_path / "minisgl-1.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: minisgl\nVersion: 1.2\n")
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def serve(*before: str, after: Sequence[str] = (), env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    command = [*before, sys.executable, "-m", "minisgl.launch_server", *after]
    server = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env
    )
    assert server.stdout is not None
    line = server.stdout.readline()
    assert line == "up\n", server.stderr and server.stderr.read()
    return server


def request(server: subprocess.Popen[str], cycles: int, batch: int) -> str:
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(f"{cycles} {batch}\n")
    server.stdin.flush()
    return server.stdout.readline()


def scheduler_of(link: Link, module: str) -> bool:
    return any(module in process.report["modules"] for process in processes(link))


def recipe_of_v1(place: Path) -> Path:
    """The recipe for the older worker."""
    text = (HERE / "minisgl.toml").read_text().replace("minisgl.workers", "minisgl.eagle_worker")
    text = text.replace("EagleWorker.draft_extend", "EAGLEWorker.forward_draft_extend_after_decode")
    (place / "v1.toml").write_text(text.replace("EagleWorker", "EAGLEWorker"))
    return place / "v1.toml"


@pytest.mark.parametrize("worker", ["v1", "v2"])
def test_phases_of_a_spawned_scheduler_armed_between_requests(worker: str, place: Path) -> None:
    v1 = worker == "v1"
    recipe, module = (recipe_of_v1(place), "minisgl.eagle_worker") if v1 else (HERE / "minisgl.toml", "minisgl.workers")
    after = ["--v1"] if v1 else []
    plain = serve(after=after)
    expected = [request(plain, 40, 2) for _ in range(3)]
    plain.communicate(timeout=60)
    server = serve(sys.executable, "-m", "specmeter", "run", "--recipe", str(recipe), "--", after=after)
    try:
        answers = [request(server, 40, 2)]
        link = find_link()
        until(lambda: scheduler_of(link, module), "the scheduler's report")
        assert arm(link).silent == ()
        answers.append(request(server, 40, 2))
        (scheduler,) = [found for found in processes(link) if found.ring is not None]
        assert scheduler.report["refused"] == [] and scheduler.report["faults"] == []
        assert disarm(link).silent == ()
        answers.append(request(server, 40, 2))
        assert answers == expected, "the tokens are those of a server without specmeter"
        trace = load_link(link.path)
        calls = {name: trace.main.calls[:, i] for i, name in enumerate(trace.index.names)}
        inner = slice(1, -1)
        assert {name: int(np.median(found[inner])) for name, found in calls.items()} == {
            "cycle": 1, "spec": 1, "schedule.step": 1, "schedule.output": 1, "draft.forward": 2, "verify.forward": 1,
            "accept.sample": 1, "extend.forward": 1,
        }  # fmt: skip
        assert len(trace.main.cycles.dur_ns) >= 38
    finally:
        out, err = server.communicate(timeout=60)
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
    assert (server.returncode, out) == (0, ""), err


def switchable(place: Path, *after: str) -> tuple[Link, subprocess.Popen[str]]:
    """A server with the knob open."""
    command = [sys.executable, "-m", "minisgl.launch_server"]
    link = prepare_link(command, recipe=HERE / "minisgl.toml", base=place / "run", knobs=("draft_steps",))
    return link, serve(after=after, env=launch_env(link))


def knob(link: Link) -> dict[str, Any]:
    """The knob as the scheduler last told it."""
    found = [state for state in knob_states(link, "draft_steps") if state["met"] or state["reason"]]
    return found[0] if found else {"met": False, "reason": "", "pending": True, "value": None}


def stopped(server: subprocess.Popen[str]) -> None:
    out, err = server.communicate(timeout=60)
    assert (server.returncode, out) == (0, ""), err


def test_step_counts_are_switched_inside_one_start_of_the_adaptive_runtime(place: Path) -> None:
    link, server = switchable(place, "--adaptive")
    request(server, 4, 1)
    until(lambda: scheduler_of(link, "minisgl.workers"), "the scheduler's report")
    arm(link)
    request(server, 4, 1)
    until(lambda: knob(link)["met"], "the knob's place")
    windows: dict[int, tuple[int, int]] = {}
    for steps in (5, 0, 1, 3):
        assert turn(link, {"draft_steps": steps}).silent == ()
        begin = time.perf_counter_ns()
        request(server, 30, 2)
        windows[steps] = (begin, time.perf_counter_ns())
        until(lambda: not knob(link)["pending"], "the turn")
        assert knob(link)["value"] == steps
    turn(link, {"draft_steps": 2})
    request(server, 30, 2)
    until(lambda: knob(link)["reason"], "the refusal of what no graph was built for")
    assert knob(link)["reason"] == "2 is none of 0, 1, 3, 5" and knob(link)["value"] == 3
    disarm(link)
    stopped(server)
    trace = load_link(link.path)
    cycles, drafts = trace.main.cycles, trace.main.calls[:, trace.index.names.index("draft.forward")]
    for steps, (begin, end) in windows.items():
        inside = (cycles.t0_ns > begin) & (cycles.t0_ns + cycles.dur_ns < end)
        assert inside.sum() >= 25
        assert set(drafts[inside]) == {max(steps - 1, 0)}, "from the first cycle on"


@pytest.mark.parametrize(
    ("after", "reason"),
    [
        ((), "is None: the server was started without --adaptive"),
        (("--adaptive", "--tp2"), "self.server_args.tp_size is 2: each of these processes keeps a number of its own"),
    ],
)
def test_a_start_without_the_runtime_or_with_ranks_is_not_switched(
    place: Path, after: Sequence[str], reason: str
) -> None:
    link, server = switchable(place, *after)
    expected = request(server, 39, 2)  # in threes, as its accepted drafts repeat
    until(lambda: scheduler_of(link, "minisgl.workers"), "the scheduler's report")
    arm(link)
    request(server, 3, 1)
    until(lambda: reason in knob(link)["reason"], "the refusal")
    turn(link, {"draft_steps": 1})
    assert request(server, 39, 2) == expected
    disarm(link)
    stopped(server)
