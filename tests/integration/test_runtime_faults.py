"""Fault injection at every place: each function of the runtime in turn raises when it is entered, in a live server.

The runtime's folder is copied and one function made to fail; the server's output, exit code and standard error (but for
a line of ours) must be those of a server without the fault. Each fault writes a mark as it fires, so none passes unmet;
which functions the two servers here enter is seen first, with marks alone.
"""

from __future__ import annotations

import fnmatch
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.broken_runtime import entered, marked_copy, places, serve_with_torch, with_site
from tests.support.children import environment, run_python
from tests.support.toy import Mark, Toy, make_toy

SOURCE = """
class W:
    def __init__(self):
        self.plus = 1
        self.one = 1
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
VALUES = {
    "n": "arg0|len", "all": "return", "bad": "self", "sum": "arg0|sum", "far": "self.plus.real.real",
    "first": "return[0]",
}  # fmt: skip
MARKS = [
    Mark("W.step", "cycle", role="cycle", kind="body", values=VALUES),
    Mark("self.leaf", "verify.forward", knob_paths=["self.plus", "self.one"]),
    Mark("run", "run"),
    Mark("later", "later"),
]
KNOB = {
    "name": "plus", "path": "self.plus", "shape": "int", "low": 0, "most": 3, "open": True, "alone": ["self.one"],
}  # fmt: skip
CONTROL = """
import glob, importlib, json, os, sys, threading, time, types
import toymod as t
link = os.environ["SPECMETER_LINK"]
line = glob.glob(link + f"/{os.getpid()}-*.fifo")
def tell(text):
    if line:
        handle = os.open(line[0], os.O_RDWR | os.O_NONBLOCK)
        os.write(handle, text.encode() + b"\\n"); os.close(handle); time.sleep(0.03)
def wish(**changes):
    with open(link + "/link.json") as file:
        document = json.load(file)
    document["state"].update(changes)
    with open(link + "/link.json", "w") as file:
        json.dump(document, file)
"""
# Everything that the runtime can be asked: lines of control, a thread, a fork, a reload, the lap's end, NVTX ranges,
# the engine's plugin loader, detaching. torch.cuda.nvtx stands in for itself, as its documentation has it
# (https://docs.pytorch.org/docs/2.11/generated/torch.cuda.nvtx.range_push.html): there is no card here.
SERVER = (
    CONTROL
    + """
class Nvtx(types.ModuleType):
    depth, below, broken = 0, False, False
    def range_push(self, msg):
        if self.broken:
            raise RuntimeError("NVTX functions not installed. Are you sure you have a CUDA build?")
        self.depth += 1
        return self.depth - 1
    def range_pop(self):
        self.depth -= 1
        self.below |= self.depth < 0
        return self.depth
if "_specmeter_runtime" in sys.modules:
    importlib.import_module("_specmeter_runtime.plugin").activate()
kept = t.make(3)
print(t.run(5), kept(), list(t.lazy()))
other = threading.Thread(target=lambda: print(t.run(3))); other.start(); other.join()
for text in ("disarm 2", "arm 3", "beat", "set 3", "mix 4 7 500", "mix 4 7 400", "report", "arm 5"):
    tell(text)
    print([t.run(n) for n in range(40)] == [n * (n + 1) // 2 for n in range(40)], kept())
torch, nvtx = types.ModuleType("torch"), Nvtx("torch.cuda.nvtx")
torch.version = types.SimpleNamespace(cuda="13.0")
sys.modules.update({"torch": torch, "torch.cuda.nvtx": nvtx})
wish(nvtx=True)
tell("arm 6")
print([t.run(n) for n in range(9)] == [n * (n + 1) // 2 for n in range(9)], kept())
nvtx.broken = True
print(t.run(5), "below" if nvtx.below else "never below")
if os.fork() == 0:
    print(t.run(4)); sys.stdout.flush(); os._exit(0)
os.wait()
importlib.reload(t)
print(t.run(6), sum(t.run(2) for _ in range(600)))
tell("detach 7")
print(t.run(7), kept())
"""
)
TORCH_SOURCE = """
import torch
a = torch.ones(4, 4)
def leaf(x): return x + 1
def helper(x): return leaf(x) * 2
def root(x): return helper(x) - 1
def other(x): return helper(x) + 1
class Model(torch.nn.Module):
    def forward(self, x):
        return leaf(x) + 2
def cycle(n): return int(leaf(a).sum()) + n
def step(n): return cycle(n)
"""
TORCH_MARKS = [Mark("cycle", role="cycle"), Mark("leaf", "verify.forward"), Mark("helper", "helper")]
# With torch: compilations before and while it is armed, a deep window to its end, and one that is called off, with a
# fork below it.
TORCH_SERVER = (
    CONTROL
    + """
import torch
x = torch.ones(2)
first, model = torch.compile(t.root, backend="eager"), torch.compile(t.Model(), backend="eager")
print(first(x).tolist(), model(x).tolist(), [t.step(n) for n in range(3)])
for text in ("disarm 2", "arm 3"):
    tell(text)
second = torch.compile(t.other, backend="eager")
print(second(x).tolist(), first(x).tolist())
with open("/proc/self/stat") as file:
    mine = f"{os.getpid()}-" + file.read().rpartition(")")[2].split()[19]
def state(id):
    try:
        with open(f"{link}/{mine}.json") as file:
            deep = json.load(file)["deep"]
        return deep["state"] if deep["id"] == id else ""
    except (OSError, ValueError, LookupError):
        return ""
def window(id, cycles, wanted, until):
    asked = {"id": id, "cycles": cycles, "deadline_s": 20, "wait_s": 0.01, "label": ""}
    start = {"activity": "cpu", "turns": 1, "start": 0}
    if wanted:
        wish(generation=id, deep={**asked, "processes": {mine: start}})
        tell(f"deep {id}")
    end = time.monotonic() + float(os.environ["FAULT_WAIT_S"])
    while time.monotonic() < end and state(id) not in until:
        t.step(1)
    return state(id)
if window(4, 3, True, ("done", "failed")) == "done" and window(5, 10**6, True, ("on", "failed")) == "on":
    pass
if os.fork() == 0:
    print(t.step(2)); sys.stdout.flush(); os._exit(0)
os.wait()
wish(deep=None)
tell("deep 6")
window(5, 0, False, ("", "failed"))
print(t.step(3), first(x).tolist())
tell("detach 7")
print(t.step(4), second(x).tolist())
"""
)
# What neither server enters, with where it fails instead.
NOT_ENTERED = {
    "device*.py:*",  # tests/unit/runtime/test_device_faults.py: needs a device, simulated there
    "report.py:overwrite",  # a full disk: tests/integration/test_disk_full.py
    "writers.py:make_writers.patient_end",  # CPython 3.9
    "probe.py:Recorder.time_device",  # with a device
    "deep_tool.py:teardown_fault",  # with a CUDA device: tests/unit/runtime/test_deep_teardown.py
    "boot.py:_complain", "boot.py:current", "swap.py:stack_codes",  # a link that is not ours; asked by attach alone
    "arming.py:Arming._give_up", "arming.py:Arming._put_stamped", "writers.py:through",
    "control.py:ControlLine.pausing",
    # Where something has failed, or is unusual, already; each is itself a last resort, or called by one.
    "process.py:Runtime._late", "process.py:Runtime._note", "process.py:Runtime._refuse_module",
    "process.py:Runtime._unwatched", "process.py:Runtime._go", "process.py:Runtime._hurried", "mix.py:Mixer.pause",
    "process.py:Runtime._at_exit", "deep.py:Deep.wait_ended",  # a server that ends without having been detached
}  # fmt: skip
# Output and exit code stay, but torch warns on standard error: of a graph break where it meets probed code that could
# not be put out before it compiles, or of its profiler, which could not be called off before the server's end.
# These stop torch's profiler. Where they fail it stays on, and torch brings the process down at its very end, after all
# that the server does: known, and not to be helped from outside of torch.
PROFILER_STAYS = {"deep.py:Deep._off", "deep.py:Deep.end", "deep_tool.py:Tool.leave", "deep_tool.py:Tool.stop"}
WARNED = {
    "arming.py:Arming._handed_to_compiler", "compilers.py:_add", "compilers.py:follow.call", "deep.py:Deep.end",
}  # fmt: skip
Outcome = tuple[int, str, list[str]]


def heard(code: int, out: str, err: str) -> Outcome:
    """What the server's users see of it."""
    # torch's profiler has lines of its own: where it starts and stops, and that it was first met on another thread.
    others = ("specmeter:", "USDT:", "ERROR: External init callback")
    return code, out, [row for row in err.splitlines() if not row.startswith(others)]


def environment_of(toy: Toy, site: Path | None, folder: Path) -> dict[str, str]:
    toy.plan["knobs"] = [{**KNOB, "points": [toy.id("verify.forward")]}]
    link = toy.link(folder / "links", armed=True, capacity=1024)
    link.update(knobs={"plus": 2})
    return with_site(environment(link, folder.parent), site)


def outcome(toy: Toy, site: Path | None, folder: Path) -> Outcome:
    folder.mkdir(exist_ok=True)
    try:
        done = run_python(SERVER, environment_of(toy, site, folder))
    except subprocess.TimeoutExpired:
        return -1, "hangs", []
    return heard(done.returncode, done.stdout, done.stderr)


def outcomes_with_torch(toy: Toy, sites: list[tuple[Path | None, Path]], wait_s: float) -> list[Outcome]:
    jobs = []
    for site, folder in sites:
        folder.mkdir(exist_ok=True)
        env = {**environment_of(toy, site, folder), "FAULT_WAIT_S": str(wait_s)}
        jobs.append({"folder": str(folder), "env": env})
    return [heard(*done) for done in serve_with_torch(jobs, TORCH_SERVER, 3 * wait_s + 20)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Toy, Outcome, set[str]]:
    """The first server: a folder, its plan, what it says without a fault, and what it enters."""
    folder = tmp_path_factory.mktemp("plain")
    toy = make_toy(folder, "toymod", SOURCE, MARKS)
    expected = outcome(toy, None, folder / "without")
    site, marks = marked_copy(places(), folder / "marked", fails=False)
    assert outcome(toy, site, folder / "marked") == expected
    return folder, toy, expected, entered(marks)


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Toy, Outcome, set[str]]:
    """The second server, the same."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("torch")
    toy = make_toy(folder, "toymod", TORCH_SOURCE, TORCH_MARKS)
    site, marks = marked_copy(places(), folder / "marked", fails=False)
    expected, marked = outcomes_with_torch(toy, [(None, folder / "without"), (site, folder / "marked")], 30.0)
    assert marked == expected
    return folder, toy, expected, entered(marks)


def test_the_scenario_runs_whole(plain: tuple[Path, Toy, Outcome, set[str]]) -> None:
    code, out, err = plain[2]
    assert (code, err) == (0, []) and out.splitlines()[-1] == "28 6" and "False" not in out and "never below" in out


def test_the_scenario_with_torch_runs_whole(with_torch: tuple[Path, Toy, Outcome, set[str]]) -> None:
    folder, _toy, (code, out, err), _entered = with_torch
    assert (code, err) == (0, []) and out.splitlines()[-1] == "36 [5.0, 5.0]"
    metas = list((folder / "without" / "links").glob("*/deep/*.meta.json"))
    assert len(metas) == 1, "a window that ended, and one that was called off"


def test_what_no_server_enters_is_known(
    plain: tuple[Path, Toy, Outcome, set[str]], with_torch: tuple[Path, Toy, Outcome, set[str]]
) -> None:
    unmet = set(places()) - plain[3] - with_torch[3]
    unknown = {place for place in unmet if not any(fnmatch.fnmatchcase(place, known) for known in NOT_ENTERED)}
    assert unknown == set()
    assert len(plain[3] | with_torch[3]) > 200


def test_a_fault_at_any_place_leaves_the_server_as_it_is(plain: tuple[Path, Toy, Outcome, set[str]]) -> None:
    base, toy, expected, chosen = plain

    def attempt(place: str, again: bool = True) -> str | None:
        folder = base / place.replace(":", "-").replace("/", "-")
        folder.mkdir()
        site, marks = marked_copy([place], folder, fails=True)
        found, fired = outcome(toy, site, folder), bool(entered(marks))
        shutil.rmtree(folder)
        if not fired and again:
            return attempt(place, False)  # a thread came too late on a busy machine
        return None if found == expected and fired else f"{place}: {found if fired else 'the fault did not fire'}"

    with ThreadPoolExecutor(2) as pool:
        failed = [found for found in pool.map(attempt, sorted(chosen)) if found]
    assert not failed, "\n".join(failed)


def test_a_fault_at_any_place_leaves_a_server_with_torch_as_it_is(
    plain: tuple[Path, Toy, Outcome, set[str]], with_torch: tuple[Path, Toy, Outcome, set[str]]
) -> None:
    base, toy, expected, met = with_torch
    own = ("deep.py", "deep_tool.py", "compilers.py")
    chosen = sorted(place for place in met if place not in plain[3] or place.startswith(own))
    failed = chosen
    said: list[str] = []
    for wait_s in (1.5, 20.0):  # the second for those whose thread came too late on a busy machine
        sites = []
        for place in failed:
            folder = base / f"{wait_s}-{place.replace(':', '-')}"
            sites.append(marked_copy([place], folder, fails=True))
        found = outcomes_with_torch(toy, [(site, site.parent.parent) for site, _ in sites], wait_s)
        fired = [bool(entered(marks)) for _, marks in sites]
        pairs = list(zip(failed, found, fired, strict=True))
        said = [
            f"{place}: {one}"
            for place, one, met_it in pairs
            if not (place in PROFILER_STAYS and one[:2] == (-11, expected[1]))
            if met_it and (one[:2] != expected[:2] or (one[2] and place not in WARNED))
        ]
        failed = [place for place, _, met_it in pairs if not met_it]
        assert not said, "\n".join(said)
        if not failed:
            break
    assert not failed, f"the fault did not fire: {failed}"
    assert len(chosen) > 50
