"""Arming and disarming live processes; what is refused; faults inside our own code."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specmeter.control import arm, beat, detach, disarm, mix, processes
from specmeter.runtime import layout
from tests.support.children import ask, environment, only_process, run_python, running, until
from tests.support.toy import Mark, Toy, make_toy, records

SOURCE = """
import sys, threading, time

def leaf(x):
    return x + 1

def step(n=1):
    return cycle(n)

def cycle(n):
    return leaf(n)

def slow():
    print("inside", flush=True)
    sys.stdin.readline()
    return leaf(1)

alive = True

def loop():
    while alive:
        leaf(1)
        time.sleep(0.001)

def nested(n):
    def inner():
        return leaf(n)
    return inner()
"""
MARKS = [Mark("cycle", role="cycle"), Mark("leaf", "verify.forward")]
# Executes the expressions it is sent and prints their values.
SHELL = """
import sys, os, threading, toymod
codes = {f: getattr(toymod, f).__code__ for f in ("cycle", "slow", "loop", "nested", "step")}
print("ready", flush=True)
for line in sys.stdin:
    print(repr(eval(line)), flush=True)
"""
SAME = "[f for f in codes if getattr(toymod, f).__code__ is not codes[f]]"


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return make_toy(tmp_path, "toymod", SOURCE, MARKS)


def ready(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line == "ready\n", child.stderr and child.stderr.read()


def test_arm_and_disarm_again_and_again_with_the_very_same_code_objects(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links")
    with running(SHELL, environment(link, tmp_path)) as child:
        ready(child)
        assert ask(child, "toymod.step()") == "2"
        for turn in range(1, 4):
            ack = arm(link)
            assert (len(ack.done), ack.silent, ack.done[0].armed) == (1, (), True)
            assert ask(child, "toymod.step()") == "2"
            assert sorted(eval(ask(child, SAME))) == ["cycle", "loop", "nested", "slow", "step"]
            assert not disarm(link).silent
            assert ask(child, SAME) == "[]", "disarmed means the original code objects"
            assert ask(child, "toymod.step()") == "2"
            found = records(only_process(link).ring)
            assert (found["kind"] == layout.KIND_HOST_SPAN).sum() == 2 * turn


def test_a_process_that_starts_after_arming_is_armed(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links")
    assert arm(link).done == ()
    run_python("import toymod; toymod.step()", environment(link, tmp_path))
    assert len(records(only_process(link).ring)) == 2


def test_a_frame_in_flight_finishes_safely_and_the_function_is_armed(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links")
    with running(SHELL, environment(link, tmp_path)) as child:
        ready(child)
        # Arming waits a second for such a frame to return; here as long as a busy machine takes.
        ask(child, "setattr(sys.modules['_specmeter_runtime.arming'], 'GRACE_S', 60.0)")
        assert ask(child, "toymod.slow()") == "inside"
        with ThreadPoolExecutor(1) as pool:
            arming = pool.submit(arm, link, 60.0)
            time.sleep(0.2)
            assert ask(child, "go on") == "2"
            assert not arming.result().silent
        assert only_process(link).report["refused"] == []
        assert ask(child, "toymod.slow()") == "inside"
        ack = disarm(link)
        assert ack.done[0].report["in_flight"] == ["slow"]
        assert ask(child, "go on") == "2", "the probed frame must return as ever"
        assert only_process(link).ring is None, "after disarming nothing is recorded, not even by a frame in flight"


def test_an_endless_loop_that_runs_already_is_refused_with_the_reason(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links")
    with running(SHELL, environment(link, tmp_path)) as child:
        ready(child)
        ask(child, "threading.Thread(target=toymod.loop, daemon=True).start()")
        report = arm(link).done[0].report
        (refused,) = report["refused"]
        assert "has been running since before arming" in refused["reason"] and "loop" in refused["reason"]
        assert refused["points"][0] not in report["armed_points"] and len(report["armed_points"]) == 4
        assert ask(child, "toymod.loop.__code__ is codes['loop']") == "True"
        assert not disarm(link).silent
        assert ask(child, SAME) == "[]"


def test_disarming_silences_a_loop_that_was_armed_from_the_start(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links", armed=True)
    with running(SHELL, environment(link, tmp_path)) as child:
        ready(child)
        ask(child, "threading.Thread(target=toymod.loop, daemon=True).start()")
        until(lambda: only_process(link).ring and len(records(only_process(link).ring)) > 5, "records of the loop")
        assert disarm(link).done[0].report["in_flight"] == ["loop"]
        before = len(records(only_process(link).ring))
        time.sleep(0.1)
        assert len(records(only_process(link).ring)) == before


def test_detach_leaves_nothing(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links", armed=True)
    with running(SHELL, environment(link, tmp_path)) as child:
        ready(child)
        threads = Path(f"/proc/{child.pid}/task")
        assert len(list(threads.iterdir())) == 2
        assert len(detach(link).done) == 1
        until(lambda: len(list(threads.iterdir())) == 1, "the control thread's end")
        assert ask(child, "'ImportHook' in [type(f).__name__ for f in sys.meta_path]") == "False"
        assert "make_writers" not in ask(child, "toymod.step.__code__.co_consts")
        assert list(link.path.glob("*.fifo")) == []
        assert ask(child, "toymod.step()") == "2"


def test_the_control_thread_sleeps_and_is_not_among_the_servers_threads(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links", armed=True)
    with running(SHELL, environment(link, tmp_path)) as child:
        ready(child)
        assert ask(child, "threading.active_count()") == "1"
        (other,) = [task for task in Path(f"/proc/{child.pid}/task").iterdir() if task.name != str(child.pid)]

        def switches() -> str:
            return next(line for line in (other / "status").read_text().splitlines() if line.startswith("voluntary"))

        def still() -> bool:
            before = switches()
            time.sleep(0.5)
            return switches() == before

        until(still, "half a second's sleep: a dormant process must not poll")  # at first it may not be dormant yet


def test_watchdog_disarms_after_the_last_beat(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links")
    with running(SHELL, environment(link, tmp_path)) as child:
        ready(child)
        assert arm(link, watchdog_s=2.5).done[0].armed
        for _ in range(8):
            time.sleep(0.4)
            beat(link)
        assert only_process(link).armed
        until(lambda: not only_process(link).armed, "the watchdog")
        assert "no beat" in only_process(link).report["faults"][0]
        assert ask(child, SAME) == "[]"


def test_a_stopped_process_is_reported_as_silent(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links")
    with running(SHELL, environment(link, tmp_path)) as child:
        ready(child)
        os.kill(child.pid, signal.SIGSTOP)
        until(lambda: Path(f"/proc/{child.pid}/stat").read_text().split(") ")[1][0] == "T", "the stop")
        assert [process.pid for process in arm(link, timeout_s=0.3).silent] == [child.pid]
        os.kill(child.pid, signal.SIGCONT)
        until(lambda: only_process(link).armed, "arming once it runs again")


def test_mix_marks_each_change_and_out_means_original_code(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links")
    with running(SHELL, environment(link, tmp_path)) as child:
        ready(child)
        assert not mix(link, seed=7, permille=500).silent
        assert ask(child, "sum(toymod.step() for _ in range(400))") == "800"
        states = eval(ask(child, "[(toymod.step(), toymod.cycle.__code__ is codes['cycle'])[1] for _ in range(100)]"))
        assert 20 < sum(states) < 80
        assert not disarm(link).silent and ask(child, SAME) == "[]"
    found = records(only_process(link).ring)
    marks = found[found["point"] == layout.POINT_SAMPLING]
    cycles = found[found["point"] == toy.id("cycle")]
    leaves = found[found["point"] == toy.id("verify.forward")]
    assert len(cycles) == 500, "the cycle point is always in"
    assert 150 < len(leaves) < 350
    at = marks["t0"].searchsorted(cycles["t0"], side="right") - 1
    state = marks["value"][at]
    inside = dict(zip(*[column.tolist() for column in (cycles["cycle"], state)], strict=True))
    with_leaf = set(leaves["cycle"].tolist())
    assert all((cycle in with_leaf) == (mark == 1) for cycle, mark in inside.items() if mark != 2)
    assert set(state.tolist()) >= {0, 1}


def test_threads_get_lanes_of_their_own(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links", armed=True)
    code = (
        "import toymod, threading\n"
        "ts = [threading.Thread(target=lambda: [toymod.step() for _ in range(2000)], name=f'w{i}') for i in range(4)]\n"
        "[t.start() for t in ts]; [t.join() for t in ts]; toymod.step()"
    )
    run_python(code, environment(link, tmp_path))
    found = records(only_process(link).ring)
    assert len(found) == 2 * (4 * 2000 + 1) and set(found["seq"].tolist()) == set(range(1, len(found) + 1))
    assert len(set(found["lane"].tolist())) >= 2


def test_slot_numbers_start_over_after_32_bits(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links", armed=True, capacity=1000)
    code = (
        "import toymod, sys\nrt = sys.modules['_specmeter_runtime.boot'].current()\ntoymod.step()\n"
        "take, ring = rt.recorder.take, rt.recorder.ring\nfor _ in range(1022): take()\n"
        "ring.next_mark = 2**32 - 1023\nfor _ in range(1021): take()\n"
        "for _ in range(3): toymod.step()"
    )
    assert run_python(code, environment(link, tmp_path)).stderr == ""
    process = only_process(link)
    found = records(process.ring)
    assert process.report["disarmed"] == [] and process.ring is not None
    assert process.ring.stat().st_size == layout.HEADER_SIZE + 1024 * layout.RECORD_SIZE
    assert sorted(found["seq"].tolist()) == [1, 2, 3, 4, 2**32 - 2, 2**32 - 1]


def test_wrap_around_keeps_the_newest_records(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links", armed=True, capacity=1024)
    run_python("import toymod\nfor _ in range(3000): toymod.step()", environment(link, tmp_path))
    found = records(only_process(link).ring)
    assert sorted(found["seq"].tolist()) == list(range(6000 - 1023, 6001))


def test_disk_full_disarms_and_the_server_goes_on(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links", armed=True)
    code = (
        "import resource, toymod\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "print(toymod.step(), toymod.step(), 'make_writers' in repr(toymod.cycle.__code__.co_consts))"
    )
    done = run_python(code, environment(link, tmp_path))
    assert (done.stdout, done.stderr) == ("2 2 False\n", "")
    process = only_process(link)
    assert not process.armed and process.ring is None
    assert "File too large" in process.report["faults"][0]


@pytest.mark.parametrize("place", ["slow way", "place", "ring", "lane", "cycle", "value"])
def test_a_fault_in_our_code_disarms_that_point_and_lets_the_call_through(place: str, tmp_path: Path) -> None:
    marks = [Mark("cycle", role="cycle", values={"v": "return"}), Mark("leaf", "verify.forward")]
    toy = make_toy(tmp_path, "toymod", SOURCE, marks)
    link = toy.link(tmp_path / "links", armed=True)
    breakage = {
        "slow way": "p.Recorder._expected = boom",
        "place": "p.Recorder._opened = boom",
        "ring": "sys.modules['_specmeter_runtime.process'].Ring = boom",
        "lane": "p.Recorder._new_lane = boom",
        "cycle": "rt.recorder.on_cycle = boom",
        "value": "p.Recorder._value = boom",
    }[place]
    code = f"""
import sys
import _specmeter_runtime.probe as p
exec("def boom(*a, **k): raise RuntimeError('injected')", p.__dict__)  # in our own file, as a fault of ours would be
p.boom.__code__ = p.boom.__code__.replace(co_filename=p.__file__)
boom = p.boom
import toymod
rt = sys.modules['_specmeter_runtime.boot'].current()
{breakage}
print([toymod.step(n) for n in range(-9, -4)])
"""
    done = run_python(code, environment(link, tmp_path))
    assert (done.stdout, done.stderr) == ("[-8, -7, -6, -5, -4]\n", "")
    report = only_process(link).report
    if place == "ring":
        assert "injected" in report["faults"][0] and not report["armed"]
    else:
        assert report["disarmed"] and all(
            entry["exception"] == "RuntimeError: injected" for entry in report["disarmed"]
        )
        broken = {entry["point"] for entry in report["disarmed"]}
        assert not broken & set(report["armed_points"])
        if place in ("cycle", "value"):
            assert broken == {toy.id("cycle")}
            found = records(only_process(link).ring)
            assert (found["point"] == toy.id("verify.forward")).sum() == 5, "the others go on"
            assert (found["kind"] == layout.KIND_DISARMED).sum() == len(broken)


def test_the_servers_own_exceptions_pass_through(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links", armed=True)
    code = """
import toymod, signal, time
toymod.leaf = lambda n: 1 / 0
try: toymod.step()
except ZeroDivisionError: print('zero')
class Stop(Exception): pass
def handler(*_): raise Stop
signal.signal(signal.SIGALRM, handler)
toymod.leaf = lambda n: n
stopped = 0
for _ in range(300):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0005)
        while True: toymod.step()
    except Stop: stopped += 1
print(stopped)
"""
    done = run_python(code, environment(link, tmp_path))
    assert (done.stdout, done.stderr) == ("zero\n300\n", "")
    assert only_process(link).report["disarmed"] == []


def test_values_that_are_no_host_integers_are_refused_and_counted(tmp_path: Path) -> None:
    source = """
class Tensor:
    is_cuda = True
    def __len__(self): raise AssertionError('synchronized')
    def __index__(self): raise AssertionError('synchronized')
    __int__ = __bool__ = __iter__ = __getitem__ = __index__
def f(x): return x
def run(x): return f(x)
"""
    values = {"whole": "return", "item": "return[0]", "total": "return|sum", "none": "return.missing"}
    toy = make_toy(tmp_path, "toymod", source, [Mark("f", values=values)])
    link = toy.link(tmp_path / "links", armed=True)
    done = run_python("import toymod; t = toymod.Tensor(); print(toymod.run(t) is t)", environment(link, tmp_path))
    assert (done.stdout, done.stderr) == ("True\n", "")
    process = only_process(link)
    assert len(process.report["refused_values"]) == 4 and process.report["disarmed"] == []
    assert (records(process.ring)["kind"] == layout.KIND_VALUE).sum() == 0


def test_numpy_integers_lists_and_paths_are_read(tmp_path: Path) -> None:
    source = "def f(b, k): return {'n': [3, 4]}\ndef run(b, k):\n    return f(b.reqs, k=k)\n"
    values = {"batch": "arg0|len", "k": "kw.k", "all": 'return["n"]', "one": 'return["n"][1]', "sum": 'return["n"]|sum'}
    toy = make_toy(tmp_path, "toymod", source, [Mark("f", values=values)])
    link = toy.link(tmp_path / "links", armed=True)
    code = (
        "import numpy, types, toymod\n"
        "toymod.run(types.SimpleNamespace(reqs=[0, 0]), numpy.array([5, 6], dtype='int32'))\n"
        "toymod.run(types.SimpleNamespace(reqs=[]), numpy.int64(7))"
    )
    assert run_python(code, environment(link, tmp_path)).stderr == ""
    found = records(only_process(link).ring)
    names = {id: name.split(".")[1] for name, id in toy.plan["value_ids"].items()}
    read = [(names[int(r["point"])], int(r["t0"]), int(r["value"])) for r in found if r["kind"] == layout.KIND_VALUE]
    tail = [("all", 3, 0), ("all", 4, 1), ("one", 4, 0), ("sum", 7, 0)]
    assert read == [("batch", 2, 0), ("k", 5, 0), ("k", 6, 1), *tail, ("batch", 0, 0), ("k", 7, 0), *tail]


def test_nested_functions_and_async_code_run(tmp_path: Path) -> None:
    source = """
import asyncio
async def leaf(x):
    await asyncio.sleep(0.02)
    return x
async def run():
    return sum(await asyncio.gather(one(1), one(2)))
async def one(x):
    return await leaf(x)
def nested(n):
    def inner(): return plain(n)
    return inner()
def plain(n): return n
"""
    toy = make_toy(tmp_path, "toymod", source, [Mark("leaf"), Mark("plain")])
    link = toy.link(tmp_path / "links", armed=True)
    done = run_python(
        "import toymod, asyncio; print(asyncio.run(toymod.run()), toymod.nested(4))", environment(link, tmp_path)
    )
    assert (done.stdout, done.stderr) == ("3 4\n", "")
    found = records(only_process(link).ring)
    took = (found["t1"] - found["t0"])[found["point"] == toy.id("leaf")]
    assert len(took) == 2 and (took > 15_000_000).all(), "the await is timed, not the making of the coroutine"
    assert (found["point"] == toy.id("plain")).sum() == 1


def test_a_suspended_coroutine_outlives_arming_and_disarming(tmp_path: Path) -> None:
    """Its frame is on no thread's stack: it goes on with the code that it began with, and writes nothing."""
    source = """
import asyncio
async def leaf(x):
    await asyncio.sleep(0)
    return x
async def run(x):
    return (await leaf(x)) + (await leaf(x))
"""
    shell = """
import toymod
kept = {}
def begin(name):
    kept[name] = toymod.run(3)
    kept[name].send(None)
def end(name):
    try:
        while True: kept[name].send(None)
    except StopIteration as stop: return stop.value
print("ready", flush=True)
import sys
for line in sys.stdin: print(repr(eval(line)), flush=True)
"""
    toy = make_toy(tmp_path, "toymod", source, [Mark("leaf")])
    link = toy.link(tmp_path / "links")
    with running(shell, environment(link, tmp_path)) as child:
        ready(child)
        ask(child, "begin('original')")
        assert len(arm(link).done[0].report["armed_points"]) == 2
        assert ask(child, "end('original')") == "6"
        ask(child, "begin('probed')")
        assert not disarm(link).silent
        assert ask(child, "end('probed')") == "6"
        assert only_process(link).ring is None, "neither wrote anything"
        ask(child, "begin('original again')")
        assert not arm(link).silent
        assert ask(child, "end('original again'), begin('whole'), end('whole')") == "(6, None, 6)"
        assert len(records(only_process(link).ring)) == 2
        assert only_process(link).report["faults"] == []


def test_a_call_that_turns_out_to_create_a_coroutine_is_disarmed_not_timed(tmp_path: Path) -> None:
    source = """
async def slow(x):
    return x
def gen():
    yield 1
async def agen():
    yield 1
table = {"plain": lambda x: x, "coroutine": slow, "generator": lambda x: gen(), "async": lambda x: agen()}
def run(kind):
    return call(kind)(3)
def call(kind):
    return table[kind]
def other(f):
    return f(1)
def third(f):
    return f(1)
"""
    toy = make_toy(tmp_path, "toymod", source, [Mark("call(kind)"), Mark("f", "fourth")])
    link = toy.link(tmp_path / "links", armed=True)
    code = """
import toymod as t, asyncio
print([t.run("plain") for _ in range(20)])
print(asyncio.run(t.run("coroutine")), t.run("plain"))
print(list(t.other(t.table["generator"])))
print(type(t.third(t.table["async"])).__name__)
"""
    done = run_python(code, environment(link, tmp_path))
    assert (done.stdout, done.stderr) == (f"{[3] * 20}\n3 3\n[1]\nasync_generator\n", "")
    process = only_process(link)
    found = records(process.ring)
    spans = found[found["kind"] == layout.KIND_HOST_SPAN]
    assert len(spans) == 20 and set(spans["point"].tolist()) == {toy.id("call(kind)")}, "no time of a mere creation"
    whys = [entry["exception"] for entry in process.report["disarmed"]]
    assert [why.split("creates a ")[1].split(":")[0] for why in whys] == ["coroutine", "generator", "async_generator"]
    assert process.report["armed_points"] == []


def test_closures_made_while_armed_are_given_their_own_code_back(tmp_path: Path) -> None:
    source = """
def leaf(x): return x
def make(n):
    def inner(): return leaf(n)
    return inner
before = make(1)
kept = []
"""
    toy = make_toy(tmp_path, "toymod", source, [Mark("leaf")])
    link = toy.link(tmp_path / "links")
    shell = "import sys, toymod as t\nplain = t.before.__code__\nprint('ready', flush=True)\n"
    shell += "for line in sys.stdin: print(repr(eval(line)), flush=True)"
    with running(shell, environment(link, tmp_path)) as child:
        ready(child)
        assert not arm(link).silent
        assert ask(child, "t.kept.append(t.make(2)), t.before(), t.kept[0]()") == "(None, 1, 2)"
        assert len(records(only_process(link).ring)) == 2, "a closure from before arming is probed too"
        assert ask(child, "t.before.__code__ is plain, t.kept[0].__code__ is plain") == "(False, False)"
        assert not disarm(link).silent
        assert ask(child, "t.before.__code__ is plain, t.kept[0].__code__ is plain") == "(True, True)"
        assert ask(child, "t.before(), t.kept[0](), t.make(3)()") == "(1, 2, 3)"
        assert len(records(only_process(link).ring)) == 2


def test_closures_go_along_when_probes_are_made_anew(tmp_path: Path) -> None:
    """NVTX on and off makes new code for every probe, and so does a point that disarms itself."""
    source = """
def leaf(x): return x
async def later(): return 1
def make(n):
    def inner(): return leaf(n)
    def lazy(fn): return fn()
    return inner, lazy
inner, lazy = make(1)
"""
    toy = make_toy(tmp_path, "toymod", source, [Mark("leaf"), Mark("fn", "lazy")])
    link = toy.link(tmp_path / "links")
    shell = "import sys, toymod as t\nplain = t.inner.__code__, t.lazy.__code__\nprint('ready', flush=True)\n"
    shell += "for line in sys.stdin: print(repr(eval(line)), flush=True)"
    with running(shell, environment(link, tmp_path)) as child:
        ready(child)
        assert not arm(link).silent
        assert ask(child, "t.inner(), t.lazy(t.later).close(), t.lazy(t.later).close()") == "(1, None, None)"
        until(lambda: len(only_process(link).report["disarmed"]) == 1, "the word that the point is out")
        assert not arm(link, nvtx=True).silent
        assert ask(child, "t.inner(), t.lazy(t.later).close()") == "(1, None)"
        found = records(only_process(link).ring)
        assert int((found["kind"] == layout.KIND_DISARMED).sum()) == 1, "taken out once"
        assert not disarm(link).silent
        assert ask(child, "t.inner.__code__ is plain[0], t.lazy.__code__ is plain[1]") == "(True, True)"


def test_two_processes_acknowledge(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links")
    env = environment(link, tmp_path)
    with running(SHELL, env) as one, running(SHELL, env) as two:
        ready(one)
        ready(two)
        assert len(arm(link).done) == 2
        assert {process.pid for process in processes(link, alive_only=True)} == {one.pid, two.pid}
