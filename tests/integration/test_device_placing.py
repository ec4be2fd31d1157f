"""Stamps of a link in a real process: placed before arming, read while armed, gone after detaching (made-up device)."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specmeter.control import Link, arm, detach, disarm, launch_env, processes, wait_for_processes
from specmeter.runtime import layout
from tests.support.toy import SRC, Mark, Toy, make_toy, records

ENGINE = """
def forward(length):
    sim.kernel(length)

def step(length):
    forward(length)

def capture():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(100_000)
        step(300_000)
    return graph

def execute(graph):
    graph.replay()

def cycle(graph):
    execute(graph)
"""
SERVER = """
import importlib, sys
sys.path[:0] = [{tests!r}, {src!r}, {place!r}]
from tests.support.sim_device import Sim
sim = Sim()
sys.modules["torch"] = sim.torch
probe = importlib.import_module("_specmeter_runtime.probe")
real = probe.DeviceClock
probe.DeviceClock = lambda *given: real(*given, clock=sim.clock, make_driver=sim.driver)
import engine
engine.sim, engine.torch = sim, sim.torch
graph = engine.capture()
print(len(graph.nodes), flush=True)
for line in sys.stdin:
    word, count = line.split()
    if word == "cycles":
        for _ in range(int(count)):
            engine.cycle(graph)
            sim.wait(5_000_000)
    print(len(engine.capture().nodes) if word == "capture" else "done", flush=True)
"""


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    marks = [
        Mark("cycle", role="cycle", kind="body"),
        Mark("forward", name="draft.forward"),
        Mark("execute", name="draft.graph"),
    ]
    made = make_toy(tmp_path, "engine", ENGINE, marks)
    for point in made.plan["points"]:
        if point["name"] != "cycle":
            point["clock"] = "device"
        point["stamp"] = point["name"] == "draft.forward"
    return made


class Server:
    """The process; ``first`` is how many nodes its first graph has."""

    def __init__(self, place: Path, link: Link) -> None:
        program = SERVER.format(tests=str(Path(__file__).resolve().parents[2]), src=str(SRC), place=str(place))
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            env=launch_env(link),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.first = int(self.process.stdout.readline())
        wait_for_processes(link)

    def do(self, word: str, count: int = 0) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{word} {count}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    started: list[Server] = []

    def make(link: Link) -> Server:
        started.append(Server(tmp_path, link))
        return started[-1]

    yield make
    for server in started:
        server.process.kill()
        server.process.communicate()


def spans(ring: Path | None, kind: int, point: int | None = None) -> Any:
    found = records(ring)
    return found[(found["kind"] == kind) & ((found["point"] == point) if point is not None else True)]


def test_stamps_are_placed_before_arming_and_read_while_armed(toy: Toy, tmp_path: Path, start: Any) -> None:
    link = toy.link(tmp_path / "links", device_events=True, device_stamps=True)
    server = start(link)
    assert server.first == 2 + 2 * 2 + 2  # kernels, stamps around each, stamps at the graph's ends
    server.do("cycles", 3)
    (process,) = processes(link)
    assert not process.armed and process.ring is None
    arm(link)
    server.do("cycles", 60)
    disarm(link)
    (process,) = processes(link)
    report = process.report["device_events"]["stamps"]
    assert report["reason"] == "" and report["graphs"] == 1 and report["pairs"] >= 1, report
    steps = spans(process.ring, layout.KIND_DEVICE_SPAN, toy.id("draft.forward"))
    own = steps["cycle"].astype(int) - steps["value"]
    steps = steps[own > 1]  # reading begins somewhere in the first cycle after arming
    per_cycle = Counter(own[own > 1].tolist())
    assert len(per_cycle) >= 40 and set(per_cycle.values()) == {2}
    lengths = (steps["t1"] - steps["t0"]).tolist()
    assert lengths == pytest.approx([100_000, 300_000] * len(per_cycle), abs=64)
    graphs = spans(process.ring, layout.KIND_GRAPH_SPAN)
    assert set(graphs["point"].tolist()) == {toy.id("draft.graph")}
    assert set((graphs["cycle"].astype(int) - (graphs["value"] & 0xFFF)).tolist()) - {1} == set(per_cycle)
    assert len(spans(process.ring, layout.KIND_DEVICE_SPAN, toy.id("draft.graph")))
    assert server.do("capture") == "4"  # the points are out, the graph's ends are still watched
    detach(link)
    assert server.do("capture") == "2"


def test_a_server_that_starts_armed_under_a_budget_has_them_too(toy: Toy, tmp_path: Path, start: Any) -> None:
    link = toy.link(
        tmp_path / "links", device_events=True, device_stamps=True, armed=True, mix={"seed": 5, "permille": 300}
    )
    server = start(link)
    assert server.first == 2 + 2 * 2 + 2
    server.do("cycles", 100)
    (process,) = processes(link)
    graphs = spans(process.ring, layout.KIND_GRAPH_SPAN)
    assert 5 < len(graphs) < 60  # replays of cycles whose probes are out are not followed
    disarm(link, take_over=True)


def test_without_stamps_graphs_are_what_they_were(toy: Toy, tmp_path: Path, start: Any) -> None:
    link = toy.link(tmp_path / "links", device_events=True)
    server = start(link)
    assert server.first == 2
    arm(link)
    server.do("cycles", 20)
    disarm(link)
    (process,) = processes(link)
    assert process.report["device_events"]["reason"] == ""
    assert process.report["device_events"]["stamps"] is None
    found = spans(process.ring, layout.KIND_DEVICE_SPAN)
    assert set(found["point"].tolist()) == {toy.id("draft.graph")} and len(found) >= 15
    assert not len(spans(process.ring, layout.KIND_GRAPH_SPAN))
    assert len(spans(process.ring, layout.KIND_CLOCK_PAIR)) >= 1
