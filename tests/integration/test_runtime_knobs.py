"""A number of a live process changed by its own thread at a cycle's begin, read back, and put back."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specmeter.control import arm, detach, disarm, knob_states, turn
from specmeter.control.link import Link
from specmeter.runtime import layout
from tests.support.children import ask, environment, only_process, running, until
from tests.support.toy import Mark, Toy, make_toy, records

SOURCE = """
class Scheduler:
    def __init__(self):
        self.table = [0, 3, 3]
        self.none = None
        self.most = 4
        self.one = 1
        self.all = [0, 3, 4]
    def schedule(self):
        return self.table[1]

class Frozen:
    @property
    def table(self):
        return [1, 2]

class Core:
    def __init__(self):
        self.scheduler = Scheduler()
        self.frozen = Frozen()
    def step(self):
        return self.scheduler.schedule()

core = Core()
own = core.scheduler.table

def step():
    return core.step()
"""
KNOB = {"name": "steps", "about": "", "point": "schedule", "shape": "each", "low": 0, "most": "self.scheduler.most"}
SHELL = """
import sys, toymod
print("ready", flush=True)
for line in sys.stdin:
    print(repr(eval(line)), flush=True)
"""


def toy_with(folder: Path, path: str = "self.scheduler.table", **changed: Any) -> Toy:
    """The toy with one open knob on the scheduler's call."""
    leads = [path, str(KNOB["most"])]
    marks = [Mark("core.step", "cycle", role="cycle"), Mark("self.scheduler.schedule", "schedule", knob_paths=leads)]
    toy = make_toy(folder, "toymod", SOURCE, marks)
    toy.plan["knobs"] = [
        {**KNOB, "path": path, "hint": "start it otherwise", "open": True, "points": [toy.id("schedule")], **changed}
    ]
    return toy


@pytest.fixture
def child(tmp_path: Path) -> Iterator[tuple[Link, subprocess.Popen[str]]]:
    link = toy_with(tmp_path).link(tmp_path / "links")
    with running(SHELL, environment(link, tmp_path)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield link, process


def state(link: Link) -> dict[str, Any]:
    """The knob as its only process last told it."""
    [found] = knob_states(link, "steps")
    return found


def met(link: Link) -> None:
    """Wait until the process has told that it found the number."""
    until(lambda: state(link)["met"], "the knob's place")


def test_each_number_is_set_by_the_next_cycle_and_read_back(child: tuple[Link, subprocess.Popen[str]]) -> None:
    link, process = child
    arm(link)
    assert ask(process, "toymod.step()") == "3", "an untouched knob changes nothing"
    assert ask(process, "toymod.core.scheduler.table is toymod.own") == "True"
    met(link)
    assert (state(link)["value"], state(link)["original"], state(link)["range"]) == ([0, 3], [0, 3], [0, 4])
    for number in (1, 0, 4):
        assert not turn(link, {"steps": number}).silent
        assert ask(process, "toymod.step()") == str(number), "set before the call that reads it"
        until(lambda: not state(link)["pending"], "the turn")
        assert state(link)["value"] == number
    assert ask(process, "toymod.core.scheduler.table") == "[4, 4, 4]"


def test_the_very_list_is_back_after_disarming_and_after_no_wish(child: tuple[Link, subprocess.Popen[str]]) -> None:
    link, process = child
    for _ in range(2):
        arm(link)
        ask(process, "toymod.step()")
        met(link)
        turn(link, {"steps": 1})
        assert ask(process, "toymod.step()") == "1"
        turn(link, {})
        assert ask(process, "toymod.core.scheduler.table is toymod.own") == "True"
        turn(link, {"steps": 2})
        assert ask(process, "toymod.step()") == "2"
        disarm(link)
        assert ask(process, "toymod.core.scheduler.table is toymod.own") == "True"
        assert ask(process, "toymod.step()") == "3"
        arm(link)
        assert ask(process, "toymod.step()") == "3", "a new arming begins with the engine's own"
    turn(link, {"steps": 1})
    assert ask(process, "toymod.step()") == "1"
    detach(link)
    assert ask(process, "toymod.core.scheduler.table is toymod.own") == "True"


def test_a_missing_beat_puts_the_number_back(child: tuple[Link, subprocess.Popen[str]]) -> None:
    link, process = child
    arm(link, watchdog_s=0.5)
    ask(process, "toymod.step()")
    met(link)
    turn(link, {"steps": 1})
    assert ask(process, "toymod.step()") == "1"
    until(lambda: not only_process(link).armed, "the watchdog")
    assert ask(process, "toymod.core.scheduler.table is toymod.own") == "True"


def test_out_of_range_is_refused_and_the_number_put_back(child: tuple[Link, subprocess.Popen[str]]) -> None:
    link, process = child
    arm(link)
    ask(process, "toymod.step()")
    met(link)
    turn(link, {"steps": 2})
    assert ask(process, "toymod.step()") == "2"
    turn(link, {"steps": 5})
    assert ask(process, "toymod.step()") == "3"
    until(lambda: "outside 0..4" in state(link)["reason"], "the refusal")
    assert ask(process, "toymod.core.scheduler.table is toymod.own") == "True"
    assert only_process(link).report["faults"] == []


@pytest.fixture
def choice(tmp_path: Path) -> Iterator[tuple[Link, subprocess.Popen[str]]]:
    """A knob with numbers to choose from, in a process that is the only one."""
    link = chosen_among(tmp_path, "self.scheduler.all", "self.scheduler.one").link(tmp_path / "links")
    with running(SHELL, environment(link, tmp_path)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield link, process


def chosen_among(folder: Path, among: str, alone: str) -> Toy:
    leads = ["self.scheduler.table", among, alone]
    marks = [Mark("core.step", "cycle", role="cycle"), Mark("self.scheduler.schedule", "schedule", knob_paths=leads)]
    toy = make_toy(folder, "toymod", SOURCE, marks)
    knob = {key: value for key, value in KNOB.items() if key not in ("low", "most")}
    limits = {"among": among, "alone": [alone], "path": leads[0], "points": [toy.id("schedule")]}
    toy.plan["knobs"] = [{**knob, **limits, "low": None, "most": None, "hint": "start it otherwise", "open": True}]
    return toy


def test_only_a_number_of_the_list_is_set(choice: tuple[Link, subprocess.Popen[str]]) -> None:
    link, process = choice
    arm(link)
    ask(process, "toymod.step()")
    met(link)
    assert state(link)["range"] == [0, 4]
    turn(link, {"steps": 4})
    assert ask(process, "toymod.step()") == "4"
    turn(link, {"steps": 2})
    assert ask(process, "toymod.step()") == "3", "the engine's own is back"
    until(lambda: state(link)["reason"] == "2 is none of 0, 3, 4", "the refusal")


@pytest.mark.parametrize(
    ("among", "alone", "reason"),
    [
        (
            "self.scheduler.all",
            "self.scheduler.most",
            "self.scheduler.most is 4: each of these processes keeps a number",
        ),
        ("self.scheduler.most", "self.scheduler.one", "self.scheduler.most, are no list of ints"),
        ("self.scheduler.none.all", "self.scheduler.one", "should have the attribute all is None: start it otherwise"),
    ],
)
def test_several_ranks_and_no_list_are_refused(tmp_path: Path, among: str, alone: str, reason: str) -> None:
    link = chosen_among(tmp_path, among, alone).link(tmp_path / "links", armed=True)
    with running(SHELL, environment(link, tmp_path)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert ask(process, "toymod.step()") == "3"
        until(lambda: reason in state(link)["reason"], "the refusal")
        turn(link, {"steps": 4})
        assert ask(process, "toymod.step()") == "3"


def test_a_replaced_object_is_noticed(child: tuple[Link, subprocess.Popen[str]]) -> None:
    link, process = child
    arm(link)
    ask(process, "toymod.step()")
    met(link)
    ask(process, "setattr(toymod.core, 'scheduler', toymod.Scheduler())")
    turn(link, {"steps": 2})
    assert ask(process, "toymod.step()") == "3"
    until(lambda: state(link)["reason"], "the refusal")
    assert "put another one in its place" in state(link)["reason"]


def test_a_turn_leaves_a_mark_at_its_moment(child: tuple[Link, subprocess.Popen[str]]) -> None:
    link, process = child
    arm(link)
    ask(process, "toymod.step()")
    met(link)
    before = time.perf_counter_ns()
    turn(link, {"steps": 2})
    ask(process, "toymod.step()")
    ring = only_process(link).ring
    assert ring is not None
    found = records(ring)
    marks = found[(found["kind"] == layout.KIND_MARK) & (found["point"] == layout.POINT_KNOB)]
    assert marks["value"].tolist() == [2]
    assert before < marks["t0"][0] < time.perf_counter_ns()


@pytest.mark.parametrize(
    ("path", "shape", "reason"),
    [
        ("self.scheduler.none", "each", "Scheduler.none is None: start it otherwise"),
        ("self.scheduler.gone", "each", "Scheduler has no attribute gone of its own"),
        ("self.scheduler.table", "int", "Scheduler.table is no int"),
        ("self.scheduler.most", "each", "Scheduler.most is no list of ints"),
        ("self.scheduler.schedule", "int", "Scheduler has no attribute schedule of its own"),
        ("self.nowhere.table", "each", "Core has no attribute nowhere of its own"),
        ("self.frozen.table", "each", "Frozen has no attribute table of its own"),
        ("self.scheduler.table[0].real", "int", "int has no attribute real of its own"),
    ],
)
def test_what_is_no_number_there_is_refused_with_the_reason(tmp_path: Path, path: str, shape: str, reason: str) -> None:
    link = toy_with(tmp_path, path, shape=shape).link(tmp_path / "links", armed=True)
    with running(SHELL, environment(link, tmp_path)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert ask(process, "toymod.step()") == "3"
        until(lambda: state(link)["reason"], "the refusal")
        assert state(link)["reason"] == reason
        turn(link, {"steps": 1})
        assert ask(process, "toymod.step()") == "3"
        assert ask(process, "toymod.core.scheduler.table is toymod.own") == "True"


def test_a_closed_knob_is_not_looked_for(tmp_path: Path) -> None:
    link = toy_with(tmp_path, open=False).link(tmp_path / "links", armed=True)
    with running(SHELL, environment(link, tmp_path)) as process:
        assert process.stdout is not None
        process.stdout.readline()
        turn(link, {"steps": 1})
        assert ask(process, "toymod.step()") == "3"
        assert knob_states(link, "steps") == []
