"""Fault injection at every place: each function of the runtime in turn raises when it is entered, in a live server.

The runtime's folder is copied and one function made to fail; the server's output, exit code and standard error (but for
a line of ours) must be those of a server without specmeter.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import specmeter.runtime
from tests.support.children import environment, run_python
from tests.support.toy import Mark, Toy, make_toy

RUNTIME = Path(specmeter.runtime.__file__).parent
SOURCE = """
class W:
    def __init__(self):
        self.plus = 1
    def leaf(self, x):
        return x + 1 + 0 * self.plus
    def step(self, xs):
        return [self.leaf(x) for x in xs]
def make(n):
    def inner(): return run(n)
    return inner
def run(n):
    return sum(W().step(range(n)))
def lazy(): return later()
later = lambda: (x for x in [1])
"""
MARKS = [
    Mark("W.step", "cycle", role="cycle", kind="body", values={"n": "arg0|len", "all": "return", "bad": "self"}),
    Mark("self.leaf", "verify.forward", knob_paths=["self.plus"]),
    Mark("run", "run"),
    Mark("later", "later"),
]
KNOB = {"name": "plus", "path": "self.plus", "shape": "int", "low": 0, "most": 3, "open": True}
# Called by the interpreter or the server itself: these fail inside their ``try``, before it there is nothing to fail.
OUTERMOST = {
    "forks.py:_tell", "hook.py:ImportHook.find_spec",
    "hook.py:ImportHook._watch.exec_module", "writers.py:make_writers.end",
    "writers.py:make_writers.recover", "writers.py:make_writers.make_cycle_begin.begin",
    "probe.py:Recorder._timed.timed_end",
    "writers.py:make_writers.values_end.end", "probe.py:Recorder._fault", "control.py:ControlLine._run",
    "knobs.py:Knob.wrapped.turning_begin", "knobs.py:Knob.wrapped.finding_end", "knobs.py:Knob._fail",
}  # fmt: skip
# The judge of whose fault an exception is cannot be judged; the three fork handlers only call _tell; what _chain raises
# is the next sitecustomize's own.
LEFT_OUT = {"writers.py:ours", "forks.py:_before", "forks.py:_after", "forks.py:_child", "site/sitecustomize.py:_chain"}
# Everything that the runtime can be asked: lines of control, a thread, a fork, a reload, the lap's end, detaching.
SERVER = """
import glob, importlib, os, sys, threading, time
import toymod as t
line = glob.glob(os.environ["SPECMETER_LINK"] + f"/{os.getpid()}-*.fifo")
def tell(text):
    if line:
        handle = os.open(line[0], os.O_RDWR | os.O_NONBLOCK)
        os.write(handle, text.encode() + b"\\n"); os.close(handle); time.sleep(0.03)
kept = t.make(3)
print(t.run(5), kept(), list(t.lazy()))
other = threading.Thread(target=lambda: print(t.run(3))); other.start(); other.join()
for text in ("disarm 2", "arm 3", "beat", "set 3", "mix 4 7 500", "report", "arm 5"):
    tell(text)
    print([t.run(n) for n in range(40)] == [n * (n + 1) // 2 for n in range(40)], kept())
if os.fork() == 0:
    print(t.run(4)); sys.stdout.flush(); os._exit(0)
os.wait()
importlib.reload(t)
print(t.run(6), sum(t.run(2) for _ in range(600)))
tell("detach 6")
print(t.run(7), kept())
"""


def places() -> Iterator[str]:
    """FILE:QUALNAME of every function of the runtime, closures included."""
    for path in sorted([*RUNTIME.glob("*.py"), RUNTIME / "site" / "sitecustomize.py"]):
        for qualname, _node in functions(ast.parse(path.read_text()), ""):
            place = f"{path.relative_to(RUNTIME)}:{qualname}"
            if place not in LEFT_OUT:
                yield place


def functions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        name = f"{prefix}{node.name}." if isinstance(node, ast.ClassDef | ast.FunctionDef) else prefix
        yield from functions(node, name)


def broken_copy(place: str, folder: Path) -> Path:
    """A copy of the runtime in which the function at ``place`` raises; its site folder."""
    copy = folder / "runtime"
    shutil.copytree(RUNTIME, copy, ignore=shutil.ignore_patterns("__pycache__"))
    name, qualname = place.split(":")
    tree = ast.parse((copy / name).read_text())
    (node,) = [node for found, node in functions(tree, "") if found == qualname]
    body = node.body
    if place in OUTERMOST:
        body = next((inner.body for inner in ast.walk(node) if isinstance(inner, ast.Try)), [])
    body.insert(0, ast.parse("raise RuntimeError('injected')").body[0])
    (copy / name).write_text(ast.unparse(ast.fix_missing_locations(tree)))
    return copy / "site"


def outcome(toy: Toy, site: Path | None, folder: Path) -> tuple[int, str, list[str]]:
    toy.plan["knobs"] = [{**KNOB, "points": [toy.id("verify.forward")]}]
    link = toy.link(folder / "links", armed=True, capacity=1024)
    link.update(knobs={"plus": 2})
    env = environment(link, folder.parent)
    if site is not None:
        first, *rest = env["PYTHONPATH"].split(":")
        assert first.endswith("site")
        env["PYTHONPATH"] = ":".join([str(site), *rest])
    try:
        done = run_python(SERVER, env)
    except subprocess.TimeoutExpired:
        return -1, "hangs", []
    ours = ("specmeter:",)
    return done.returncode, done.stdout, [row for row in done.stderr.splitlines() if not row.startswith(ours)]


def test_the_scenario_runs_whole(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    toy = make_toy(tmp_path, "toymod", SOURCE, MARKS)
    code, out, err = outcome(toy, None, tmp_path / "x")
    assert (code, err) == (0, []) and out.splitlines()[-1] == "28 6" and "False" not in out


def test_a_fault_at_any_place_leaves_the_server_as_it_is(tmp_path: Path) -> None:
    toy = make_toy(tmp_path, "toymod", SOURCE, MARKS)
    (tmp_path / "plain").mkdir()
    expected = outcome(toy, None, tmp_path / "plain")

    def attempt(numbered: tuple[int, str]) -> str | None:
        number, place = numbered
        folder = tmp_path / f"n{number}"
        folder.mkdir()
        found = outcome(toy, broken_copy(place, folder), folder)
        shutil.rmtree(folder)
        return None if found == expected else f"{place}: {found}"

    every = list(enumerate(places()))
    assert len(every) > 100
    with ThreadPoolExecutor(2) as pool:
        failed = [found for found in pool.map(attempt, every) if found]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("place", ["writers.py:make_writers.end", "control.py:ControlLine._run"])
def test_the_injection_is_real(place: str, tmp_path: Path) -> None:
    site = broken_copy(place, tmp_path)
    assert "injected" in (site.parent / place.split(":")[0]).read_text()
