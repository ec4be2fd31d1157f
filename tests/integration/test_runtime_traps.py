"""Traps 3, 11 and 12 of a prototype: another sitecustomize, readers of source text, one anchor with several sites."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specmeter.control import Link, make_link, processes
from specmeter.control.hits import count_hits
from specmeter.recipes.planner import build_plan
from specmeter.trace import load_link
from tests.support.children import environment, only_process, run_python
from tests.support.recipes import cycle, install, point, recipe
from tests.support.toy import Mark, make_toy

SOURCE = '''
import functools

def leaf(x): return x + 1

def outer(function):
    @functools.wraps(function)
    def inside(*args):
        return function(*args)
    return inside

class W:
    """Its text is what a reader wants."""

    @outer
    def step(self, xs):
        """A docstring, and a comment."""  # kept
        total = 0
        for x in xs:
            total += leaf(x)  # the call
        return total

    def closure(self):
        def inner(x):
            return leaf(x)
        return inner

def fails():
    return leaf("x")

def run():
    return W().step([1, 2]), W().closure()(1)
'''
MARKS = [
    Mark("W.step", "cycle", role="cycle", kind="body", values={"out": "return"}),
    Mark("leaf", "verify.forward"),
]

PYTHONS = [sys.executable, *map(str, sorted(Path.home().glob(".pyenv/versions/3.*/bin/python")))]
PYTHONS = [path for path in PYTHONS if not path.split("versions/")[-1].startswith(("3.6", "3.7", "3.8"))]

# -- 3: another sitecustomize -----------------------------------------------------------------------------------------

COUNTS = "import sys; sys.theirs = getattr(sys, 'theirs', 0) + 1\n"
SPAWNS = """
import multiprocessing as m, sys
def show():
    import toymod
    print(sys.theirs, toymod.run(), 'make_writers' in repr(toymod.fails.__code__.co_consts), flush=True)
if __name__ == '__main__':
    show()
    child = m.get_context('spawn').Process(target=show)
    child.start()
    child.join()
"""


@pytest.fixture
def link(tmp_path: Path) -> Link:
    """An armed link of the toy module, which lies in ``tmp_path``."""
    return make_toy(tmp_path, "toymod", SOURCE, MARKS).link(tmp_path / "links", armed=True)


@pytest.mark.parametrize("twice", [False, True])
def test_each_process_runs_the_other_sitecustomize_once_and_ours(twice: bool, link: Link, tmp_path: Path) -> None:
    for name in ("other", "last"):
        (tmp_path / name).mkdir()
    (tmp_path / "other" / "sitecustomize.py").write_text(COUNTS)
    # The interpreter runs the first one alone; a further one must stay as unused as it is without us.
    (tmp_path / "last" / "sitecustomize.py").write_text("raise SystemExit('the last one ran')\n")
    (tmp_path / "main.py").write_text(SPAWNS)
    env = environment(link, tmp_path / "other", tmp_path / "last", tmp_path)
    if twice:  # a launcher below a launcher
        env["PYTHONPATH"] = env["PYTHONPATH"].split(os.pathsep)[0] + os.pathsep + env["PYTHONPATH"]
    done = subprocess.run(
        [sys.executable, "main.py"], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("1 (5, 2) True\n" * 2, "")
    assert len([process for process in processes(link) if process.ring is not None]) == 2


def test_a_sitecustomize_that_comes_before_ours_is_noticed(link: Link, tmp_path: Path) -> None:
    """It keeps ours out silently, so a launch has to look whether the runtime is there."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "sitecustomize.py").write_text(COUNTS)
    env = environment(link, tmp_path)
    before = {**env, "PYTHONPATH": f"{tmp_path / 'other'}{os.pathsep}{env['PYTHONPATH']}"}
    code = "import sys, toymod; print(sys.theirs, toymod.run())"
    assert run_python(code, before).stdout == "1 (5, 2)\n"
    assert processes(link) == [], "this order is believed to keep the runtime out"
    # The engines' own plugins are the second way in.
    plugin = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2] / 'src')!r})\n"
    plugin += "from specmeter.runtime.plugin import activate\nactivate()\n"
    assert run_python(plugin + code, before).stdout == "1 (5, 2)\n"
    assert only_process(link).armed and only_process(link).ring is not None


def test_a_launch_says_that_another_sitecustomize_kept_the_runtime_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = made_engine(tmp_path, "")
    (place / "other").mkdir()
    (place / "other" / "sitecustomize.py").write_text("print('theirs')\n")
    (place / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(place / "run"))
    monkeypatch.setenv("PYTHONPATH", str(place))
    wrapper = place / "serve.sh"
    wrapper.write_text(
        f'#!/bin/sh\nPYTHONPATH="{place}/other:$PYTHONPATH" exec {sys.executable} -c "import eng.core; print(1)"\n'
    )
    wrapper.chmod(0o755)
    words = ["run", "--python", sys.executable, "--recipe", str(place / "eng.toml"), "--", str(wrapper)]
    done = subprocess.run([sys.executable, "-m", "specmeter", *words], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "theirs\n1\n")
    assert "the runtime did not come up in any process" in done.stderr and "sitecustomize" in done.stderr


# -- 11: readers of source text ---------------------------------------------------------------------------------------

READS = """
import hashlib, inspect, linecache, sys, traceback
import toymod as t
shown = [t.run()]
probed = [f.__code__.co_consts for f in (inspect.unwrap(t.W.step), t.fails)]
shown += [inspect.getsource(f) for f in (t.W, t.W.step, t.W.closure, t.W().closure(), t.fails)]
shown += [inspect.getsourcelines(t.W.step), inspect.getsourcefile(t.W.step), inspect.signature(t.W.step)]
shown += [inspect.getdoc(t.W.step), inspect.getcomments(t.fails), linecache.getlines(t.__file__)]
try:
    t.fails()
except TypeError:
    shown += [traceback.format_exc()]
frames = []
t.leaf = lambda x: frames.append(inspect.stack(context=3)[1]) or x
t.fails()
shown += [(frames[0].lineno, frames[0].function, frames[0].code_context)]
print('make_writers' in repr(probed), hashlib.sha256(repr(shown).encode()).hexdigest(), repr(shown))
"""


@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: path.split("versions/")[-1].split("/")[0])
def test_readers_of_source_text_read_what_they_read_without_us(python: str, tmp_path: Path) -> None:
    link = make_toy(tmp_path, "toymod", SOURCE, MARKS, python).link(tmp_path / "links", armed=True)
    armed, plain = (run_python(READS, environment(at, tmp_path), python) for at in (link, None))
    assert (armed.stderr, plain.stderr) == ("", "")
    (was_armed, *rest), (was_plain, *expected) = armed.stdout.split(" ", 2), plain.stdout.split(" ", 2)
    assert (was_armed, was_plain) == ("True", "False")
    assert rest == expected and "leaf(x)  # the call" in rest[1]


GRAPHS = """
import inspect, sys, torch, toymod as t
torch.set_num_threads(1)
graphs = []
def backend(module, inputs):
    probed = any('make_writers' in repr(f.__code__.co_consts) for f in (t.root, t.helper))
    graphs.append((probed, module.code, inspect.getsource(t.root)))
    return module.forward
x = torch.ones(2)
call = torch.compile(t.root, backend=backend, fullgraph=True)
print([t.around(f, x).tolist() for f in (call, call, t.helper)], list(dict.fromkeys(graphs)))
print('make_writers' in repr(t.around.__code__.co_consts))
"""
TRACED = """
def leaf(x): return x + 1
def helper(x): return leaf(x) * 2
def root(x): return helper(x) - 1
def around(f, x): return go(f, x)
def go(f, x): return f(x)
"""


def test_a_cache_by_source_text_gets_the_same_graph(tmp_path: Path) -> None:
    """A compiler's cache keyed by source text cannot tell probed code from plain: what it is given must be the same."""
    pytest.importorskip("torch")
    marks = [Mark("leaf"), Mark("helper", "helper"), Mark("go", "around")]
    link = make_toy(tmp_path, "toymod", TRACED, marks).link(tmp_path / "links", armed=True)
    armed, plain = (run_python(GRAPHS, environment(at, tmp_path)) for at in (link, None))
    assert (armed.stderr, plain.stderr) == ("", "")
    (seen, probed), (expected, _) = armed.stdout.splitlines(), plain.stdout.splitlines()
    assert seen == expected and seen.count("def forward") == 1 and "(False, " in seen
    assert probed == "True", "the probe around the compiled call is in"


# -- 12: one anchor, several sites ------------------------------------------------------------------------------------

ENGINE = """
class Core:
    def step(self, way):
        return self.turn(way)

    def turn(self, way):
        if way == "graph":
            return self.propose(1)
        elif way == "eager":
            return self.propose(2)
        for _ in range(2):
            last = self.propose(3)
        return last

    def propose(self, n):
        return n
"""
RECIPE = recipe(
    cycle("eng.core", "Core.step"),
    point("draft.forward", "eng.core", "Core.turn", call=r"^self\.propose$", sites=3),  # whichever branch calls it
    engine="eng",
    dist="eng",
    range="",
)


def made_engine(folder: Path, extra: str) -> Path:
    """A made-up engine with its recipe."""
    (folder / "eng.toml").write_text(RECIPE)
    return install(folder, "eng", {"core": ENGINE + extra}, "1.0")


def test_the_branches_of_one_anchor_are_told_apart_and_added_up(tmp_path: Path) -> None:
    place = made_engine(tmp_path, "")
    env = {**os.environ, "PYTHONPATH": str(place)}
    planned = build_plan(Path(sys.executable), recipe=place / "eng.toml", env=env)
    sites = {point["id"]: point["line"] for point in planned.plan["points"] if point["name"] == "draft.forward"}
    lines = [number for number, text in enumerate(ENGINE.splitlines(), 1) if "self.propose(" in text]
    assert len(sites) == 3 and sorted(sites.values()) == lines
    (place / "links").mkdir(mode=0o700)
    link = make_link(planned.plan, planned.code, base=place / "links", armed=True, capacity=1024)
    code = "from eng.core import Core\nfor way in ['eager'] * 5 + ['other'] * 2: Core().step(way)"
    assert run_python(code, environment(link, place)).stderr == ""
    hits = count_hits(only_process(link).ring)
    assert {line: hits.get(id, 0) for id, line in sites.items()} == dict(zip(lines, [0, 5, 4], strict=True))
    trace = load_link(link.path)
    names = [point["name"] for point in planned.plan["points"] if hits.get(point["id"], 0)]
    assert len(trace.main.cycles) == 7 and names.count("draft.forward") == 2


@pytest.mark.parametrize("sites", [1, 2, 4])
def test_another_number_of_sites_is_refused_with_all_of_them(sites: int, tmp_path: Path) -> None:
    place = made_engine(tmp_path, "")
    (place / "eng.toml").write_text(RECIPE.replace("sites = 3", f"sites = {sites}"))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, "-m", "specmeter", "plan", "--recipe", str(place / "eng.toml")],
        capture_output=True,
        text=True,
        env=env,
        timeout=60,
    )
    assert done.returncode == 1 and "draft.forward (required point): 3 calls match" in done.stdout
    assert f", not {sites}\n" in done.stdout and done.stdout.count("nearest: line") == 3
