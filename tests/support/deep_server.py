"""Little servers that run cycles with torch, for deep windows: on the CPU, and on a GPU with a captured graph."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specmeter.control.link import Link
from tests.support.children import ask, environment, running
from tests.support.toy import Mark, make_toy

ON_CPU = """
import torch
torch.set_num_threads(1)
a = torch.randn(64, 64)

class Core:
    def forward(self, x):
        return torch.relu(torch.mm(x, a))
    def sample(self, x):
        return int(x.argmax())
    def step(self):
        return self.sample(self.forward(a))

core = Core()

def run_cycle():
    return core.step()

def step():
    return run_cycle()
"""
STEPS = 3
ON_GPU = f"""
import torch
a = torch.randn(512, 512, device="cuda")
x, y = torch.randn_like(a), torch.empty_like(a)

def chain():
    y.zero_()
    for _ in range({STEPS}):
        torch.mm(x, a, out=y)
        x.copy_(torch.relu(y))
    return x.argmax()

side = torch.cuda.Stream()
with torch.cuda.stream(side):
    chain()
torch.cuda.current_stream().wait_stream(side)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    best = chain()

class Core:
    waits = True
    def draft(self):
        graph.replay()
    def forward(self, b):
        return torch.exp(b * 1e-9).sum()
    def sample(self, s):
        return float(s.cpu())
    def step(self):
        self.draft()
        s = self.forward(x)
        return self.sample(s) if self.waits else 0.0

core = Core()

def run_cycle():
    return core.step()

def step():
    return run_cycle()
"""
WITHOUT_TORCH = """
def run_cycle():
    return sum(range(1000))

def step():
    return run_cycle()
"""
MARKS = [
    Mark("run_cycle", "cycle", role="cycle"),
    Mark("self.draft", "draft.graph"),
    Mark("self.forward", "verify.forward"),
    Mark("self.sample", "accept.sample"),
]
# Lines from standard input are run by the thread that runs the cycles, between two of them.
SHELL = """
import queue, sys, threading, time, toymod
lines = queue.Queue()
threading.Thread(target=lambda: [lines.put(line) for line in sys.stdin], daemon=True).start()
going = True
def turn():
    while not lines.empty():
        words = lines.get().strip()
        exec(words, globals()) if "=" in words else print(repr(eval(words)), flush=True)
        print("done", flush=True) if "=" in words else None
    if going:
        toymod.step()
    time.sleep(PAUSE)
print("ready", flush=True)
while True:
    turn()
"""
_PASSED_ON = ("LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "CUDA_HOME", "NVIDIA_VISIBLE_DEVICES")


@contextmanager
def deep_server(folder: Path, source: str, pause_s: float = 0.001) -> Iterator[tuple[Link, subprocess.Popen[str]]]:
    """A process that runs cycles of ``source``, with its link. ``run_line`` has it do something between two of them."""
    link = make_toy(folder, "toymod", source, MARKS).link(folder / "links")
    extra = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    with running(SHELL.replace("PAUSE", str(pause_s)), environment(link, folder, **extra)) as child:
        assert child.stdout is not None and child.stderr is not None
        line = child.stdout.readline()
        assert line == "ready\n", child.stderr.read()
        yield link, child


def run_line(child: subprocess.Popen[str], line: str) -> str:
    """Run a statement with ``=`` in it (gives ``done``) or evaluate an expression in the server's own thread."""
    return ask(child, line)


def point_ids(link: Link) -> dict[str, int]:
    """The plan's ids by name."""
    points: list[dict[str, Any]] = link.plan()["points"]
    return {str(point["name"]): int(point["id"]) for point in points}
