"""Two processes of one server in lockstep take the same iterations into their windows, whatever each has counted."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from specmeter.control import arm, disarm, processes
from specmeter.control.deep import deep_window
from specmeter.runtime import layout
from specmeter.trace.deep import load_deep
from tests.support.children import environment, running, until
from tests.support.toy import Mark, make_toy, records

pytest.importorskip("torch")
pytestmark = pytest.mark.timeout(240)
SOURCE = """
import os, torch
torch.set_num_threads(1)
a = torch.randn(32, 32)
there, back = (os.open(os.environ["PIPES"] + name, os.O_RDWR) for name in ("there", "back"))

class Engine:
    number = 0
    def forward(self):
        return torch.mm(a, a)
    def run(self):
        self.number += 1
        return self.forward()
    def step(self):
        return self.run()

engine = Engine()

def step(rank):
    mine, other = (there, back) if rank == 0 else (back, there)
    os.write(mine, b"x")
    os.read(other, 1)
    engine.step()
"""
MARKS = [
    Mark("self.run", "cycle", role="cycle", values={"iteration": "self.number"}),
    Mark("self.forward", "verify.forward"),
]
SHELL = """
import os, time, toymod
rank = int(os.environ["RANK"])
engine = toymod.engine
# This rank has counted more before: only the engine's own number joins them.
engine.number = 500
print("ready", flush=True)
while True:
    toymod.step(rank)
    time.sleep(0.002)
"""


def test_ranks_take_the_same_iterations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "specmeter.control.deep._AHEAD_S", 3.0
    )  # no rank passes the first one, however busy the machine
    for name in ("there", "back"):
        os.mkfifo(tmp_path / name)
    link = make_toy(tmp_path, "toymod", SOURCE, MARKS).link(tmp_path / "links")
    environments = [environment(link, tmp_path, RANK=str(rank), PIPES=f"{tmp_path}/") for rank in (0, 1)]
    with running(SHELL, environments[0]) as one, running(SHELL, environments[1]) as two:
        for child in (one, two):
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
        arm(link)
        until(lambda: all(process.ring for process in processes(link)) and len(processes(link)) == 2, "both have rings")
        asked = deep_window(link, 6)
        disarm(link)
        assert len(asked.done) == 2 and asked.notes == ()
        windows = load_deep(link.path)
        assert [window.rank for window in windows] == [0, 1] and {w.cycle_count for w in windows} == {6}
        firsts = []
        id = link.plan()["value_ids"]["cycle.iteration"]
        for window in windows:
            [process] = [process for process in processes(link) if process.pid == window.pid]
            found = records(process.ring)
            values = found[(found["kind"] == layout.KIND_VALUE) & (found["point"] == id)]
            firsts.append(int(values["t0"][values["cycle"] == window.cycles[0]][0]))
            assert np.unique(window.kernels["cycle"][window.inside()]).tolist() == list(
                range(window.cycles[0], window.cycles[1] + 1)
            )
        assert firsts[0] == firsts[1]
