"""top, metrics and export on real parts: the runtime in a real process, torch.profiler, the embedded server."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

import specmeter
from specmeter.cli import main
from specmeter.control import arm, disarm, processes
from specmeter.exports.timeline import build_timeline
from specmeter.live.app import Top
from specmeter.live.server import LiveServer
from specmeter.live.view import Shown
from specmeter.live.watch import LinksHere
from specmeter.trace import load_link
from specmeter.trace.rundir import RunWriter
from tests.support.children import ask, environment, running, until
from tests.support.toy import Mark, make_toy

pytestmark = pytest.mark.timeout(420)
SOURCE = """
import time

def forward(n):
    end = time.perf_counter() + n / 1000
    while time.perf_counter() < end:
        pass
    return n

def sample(n):
    return n % 2

def cycle(n):
    forward(n)
    return sample(n)

def loop(count, n):
    for i in range(count):
        cycle(n)
    return count
"""
MARKS = [
    Mark("cycle", role="cycle", kind="body"), Mark("forward", "verify.forward"), Mark("sample", "accept.sample"),
]  # fmt: skip
SHELL = """
import sys, toymod
print("ready", flush=True)
for line in sys.stdin:
    print(repr(eval(line)), flush=True)
"""
PROFILED = """
import sys, time, torch, toymod
from torch.profiler import profile, record_function, ProfilerActivity
torch.set_num_threads(1)
plain = toymod.forward
a = torch.randn(300, 300)

def work(n):
    with record_function("inside the probe"):
        return (a @ a).sum().item()

toymod.work = work
print("ready", flush=True)
for line in sys.stdin:
    toymod.loop(3, 1)
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        for _ in range(20):
            toymod.torch_cycle()
    toymod.loop(3, 1)
    profiled.export_chrome_trace(line.strip())
    print("done", flush=True)
"""
TORCH_SOURCE = (
    SOURCE
    + """
def work(n):
    raise NotImplementedError

def torch_cycle():
    return outer(1)

def outer(n):
    return cycle_torch(n)

def cycle_torch(n):
    return work(n)
"""
)


def test_keys_arm_and_disarm_a_real_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    link = make_toy(tmp_path, "toymod", SOURCE, MARKS).link(tmp_path / "specmeter", link_id="toy")
    app = Top(LinksHere(), 20, Shown(seconds=2))

    async def steps() -> None:
        async with app.run_test(size=(100, 20)) as pilot:
            for key, armed in (("a", True), ("d", False)):
                await pilot.press(key)
                for _ in range(600):
                    await pilot.pause(0.05)
                    if app.note.startswith("toy: 1"):
                        break
                assert app.note == f"toy: 1 {'armed' if armed else 'disarmed'}"
                assert [p.armed for p in processes(link)] == [armed]
                if armed:
                    assert child.stdin is not None
                    child.stdin.write("toymod.loop(400, 5)\n")
                    child.stdin.flush()
                    for _ in range(600):
                        await pilot.pause(0.05)
                        live = app.servers["toy"].ranks
                        recent = [r.stats.recent(time.perf_counter_ns() // 10**9, 2).cycle_ms for r in live.values()]
                        if recent and recent[0]:
                            break
                    assert 5 <= recent[0] < 500  # milliseconds, of which the toy spins 5

    with running(SHELL, environment(link, tmp_path)) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        until(lambda: processes(link, alive_only=True), "the process")
        asyncio.run(steps())


def test_looking_changes_nothing_in_the_link(tmp_path: Path) -> None:
    link = make_toy(tmp_path, "toymod", SOURCE, MARKS).link(tmp_path / "links", link_id="toy")
    with running(SHELL, environment(link, tmp_path)) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        arm(link)
        ask(child, "toymod.loop(2, 1)")
        until(lambda: processes(link)[0].report["ring"], "the process's word that its ring is there")
        time.sleep(0.5)  # nothing of its own may be on the way when the looking begins
        live = LiveServer(link, histograms=True)
        live.poll()
        files = {p: (p.stat().st_mtime_ns, p.stat().st_mode) for p in link.path.rglob("*") if p.suffix != ".ring"}
        ask(child, "toymod.loop(60, 3)")
        for _ in range(8):
            live.poll()
            time.sleep(0.1)
        now = {p: (p.stat().st_mtime_ns, p.stat().st_mode) for p in files}
        assert now == files, "no file of the link was written by looking, nor anything asked of the process"
        (figures,) = live.figures()
        assert figures.cycle.count >= 50 and figures.phases["verify"].sum_s / figures.cycle.count >= 0.003
        disarm(link)


def test_a_torch_profiler_trace_lies_inside_the_probes_on_one_clock(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    marks = [
        Mark("cycle_torch", role="cycle", kind="body"), Mark("cycle", role="cycle", kind="body"),
        Mark("work", "verify.forward"),
    ]  # fmt: skip
    toy = make_toy(tmp_path, "toymod", TORCH_SOURCE, marks)
    link = toy.link(tmp_path / "links", armed=True)
    traced = tmp_path / "torch.json"
    with running(PROFILED, environment(link, tmp_path)) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n", child.stderr and child.stderr.read()
        assert child.stdin is not None
        child.stdin.write(f"{traced}\n")
        child.stdin.flush()
        assert child.stdout.readline() == "done\n", child.stderr and child.stderr.read()
        trace = load_link(link.path)
        writer = RunWriter.create(tmp_path / "run", ["test"])
        writer.write_plan(toy.plan)
        writer.save_rings(link.path)
        writer.write_trace(trace)
        writer.finish()
    assert main(["export", str(tmp_path / "run"), "--torch", str(traced), "--out", str(tmp_path / "t.json")]) == 0
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    ours = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == "verify.forward" and e["ph"] == "X")
    theirs = sorted(
        (e["ts"], e["ts"] + e["dur"])
        for e in events
        if e["name"] == "inside the probe" and e["ph"] == "X" and e.get("cat") == "user_annotation"
    )
    assert len(theirs) == 20 and len(ours) >= 19
    ours = ours[-len(theirs) :]
    pairs = [
        (begin, end, mine)
        for begin, end in theirs
        if (mine := next((o for o in ours if o[0] - 200 <= begin and end <= o[1] + 200), None))
    ]
    # The probe's clock and the profiler's (TSC, mapped to the calendar) agree within 0.2 ms.
    assert len(pairs) >= 19, (ours[:3], theirs[:3])


@pytest.mark.engine
def test_endpoint_of_a_real_server_on_loopback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """specmeter run, arm, load, /metrics; then the textfile and top --once of the same server."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    base = [sys.executable, "-m", "specmeter"]
    serve = [*base, "run", "--link", "real", "--armed", "--full", "--", *base, "serve", "--threads", "1", "--port", "0"]
    with (tmp_path / "serve.log").open("w") as log:
        server = subprocess.Popen(serve, stderr=log, stdout=log, start_new_session=True)
    watcher = subprocess.Popen(
        [*base, "metrics", "--listen", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert watcher.stderr is not None
        address = watcher.stderr.readline().split()[-1]
        assert address.startswith("http://127.0.0.1:")
        said = tmp_path / "serve.log"
        lines = until(lambda: [x for x in said.read_text().split() if x.startswith("http:")], "the server", 90)

        def figures() -> dict[str, float]:
            accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
            text = urllib.request.urlopen(urllib.request.Request(address, headers=accept), timeout=30).read().decode()
            return {
                s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples if "le" not in s.labels
            }

        until(lambda: figures().get("specmeter_armed") == 1, "the watcher's first look at the server", 60)
        for steps in (0, 3):
            body = {"prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True, "speculative_num_steps": steps}
            request = urllib.request.Request(
                f"{lines[0]}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            assert json.load(urllib.request.urlopen(request, timeout=90))["usage"]["completion_tokens"] == 40
        until(lambda: figures().get("specmeter_tokens_total", 0) >= 25, "the watcher's look at the cycles")
        time.sleep(1.0)  # and at the last ones
        found = figures()
        assert found["specmeter_cycle_duration_seconds_count"] >= 8
        assert 1 <= found["specmeter_accept_length_tokens"] <= 4 and found["specmeter_break_even_tokens"] > 0.5
        assert found["specmeter_armed"] == 1
        # What the probes saw is what was served, but for prefill's token, and the first and the open cycle.
        assert 25 <= found["specmeter_tokens_total"] <= 40
    finally:
        watcher.send_signal(signal.SIGINT)
        server.send_signal(signal.SIGINT)
        assert watcher.wait(60) == 130
        server.wait(60)


def test_a_window_of_the_toys_run_opens(tmp_path: Path) -> None:
    link = make_toy(tmp_path, "toymod", SOURCE, MARKS).link(tmp_path / "links", armed=True)
    with running(SHELL, environment(link, tmp_path)) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        ask(child, "toymod.loop(5, 1)")
        trace = load_link(link.path)
    writer = RunWriter.create(tmp_path / "run", ["test"])
    writer.write_plan(json.loads((link.path / "plan.json").read_text()))
    writer.save_rings(link.path)
    writer.write_trace(trace)
    timeline = build_timeline(specmeter.load(tmp_path / "run"))
    assert timeline.cycles == 5 and timeline.unix_offset_ns is not None
    assert abs(timeline.begin_ns + timeline.unix_offset_ns - time.time_ns()) < 60e9
