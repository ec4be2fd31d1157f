"""The launch route with real child processes: import hook, children of every kind, traps of the import system."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from specmeter.control import processes, remove_link, why_not_up
from specmeter.runtime import layout
from tests.support.children import environment, only_process, run_python, running, until
from tests.support.toy import Mark, Toy, make_toy, records

SOURCE = """
import os

class W:
    def leaf(self, x):
        return x + 1

    def step(self, xs):
        total = 0
        for x in xs:
            total += self.leaf(x)
        return total

def work(n=3):
    return [W().step([1, 2]) for _ in range(n)]
"""
MARKS = [
    Mark("W.step", "cycle", role="cycle", kind="body", values={"n": "arg0|len", "out": "return"}),
    Mark("self.leaf", "verify.forward"),
]
INTERPRETERS = ["3.9", "3.10", "3.11", "3.12", "3.13"]


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return make_toy(tmp_path, "toymod", SOURCE, MARKS)


def spans(ring: Path | None, point: int) -> int:
    found = records(ring)
    return int(((found["point"] == point) & (found["kind"] == layout.KIND_HOST_SPAN)).sum())


def interpreter(version: str) -> str:
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    if f"{sys.version_info.major}.{sys.version_info.minor}" == version:
        return sys.executable
    if not found:
        pytest.skip(f"no CPython {version} in ~/.pyenv/versions")
    return str(found[-1])


@pytest.mark.parametrize("version", INTERPRETERS)
def test_armed_launch_on_each_interpreter(version: str, tmp_path: Path) -> None:
    python = interpreter(version)
    toy = make_toy(tmp_path, "toymod", SOURCE, MARKS, python)
    link = toy.link(tmp_path / "links", armed=True)
    done = run_python("import toymod; print(toymod.work())", environment(link, tmp_path), python)
    assert (done.stdout, done.stderr) == ("[5, 5, 5]\n", "")
    process = only_process(link)
    found = records(process.ring)
    assert spans(process.ring, toy.id("verify.forward")) == 6
    cycles = found[(found["point"] == toy.id("cycle")) & (found["kind"] == 0)]
    assert list(cycles["cycle"]) == [1, 2, 3]
    assert (found["t1"][found["kind"] == 0] >= found["t0"][found["kind"] == 0]).all()
    values = {name: found["t0"][found["point"] == id].tolist() for name, id in toy.plan["value_ids"].items()}
    assert values == {"cycle.n": [2, 2, 2], "cycle.out": [5, 5, 5]}
    assert process.report["faults"] == [] and process.report["refused"] == []
    assert [lane["name"] for lane in process.report["lanes"]] in (["MainThread"], [None])


def test_dormant_launch_records_nothing_and_runs_the_original_code(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links")
    code = "import toymod; print(toymod.work(), 'make_writers' in repr(toymod.W.step.__code__.co_consts))"
    done = run_python(code, environment(link, tmp_path))
    assert (done.stdout, done.stderr) == ("[5, 5, 5] False\n", "")
    process = only_process(link)
    assert process.ring is None and not process.armed and process.report["points"] == [1, 2]
    assert list(link.path.glob("*.ring")) == []


def test_a_process_without_plan_modules_leaves_no_file(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links", armed=True)
    assert run_python("import json", environment(link, tmp_path)).returncode == 0
    assert processes(link) == [] and sorted(path.name for path in link.path.iterdir()) == [
        "code",
        "link.json",
        "plan.json",
    ]


CHILDREN = {
    "spawn": "import multiprocessing as m\nif __name__ == '__main__':\n"
    " p = m.get_context('spawn').Process(target=toymod.work, args=(4,)); p.start(); p.join(); print(p.exitcode)",
    "forkserver": "import multiprocessing as m\nif __name__ == '__main__':\n"
    " p = m.get_context('forkserver').Process(target=toymod.work, args=(4,)); p.start(); p.join(); print(p.exitcode)",
    "fork": "toymod.work(1)\npid = os.fork()\nif pid == 0:\n toymod.work(4); os._exit(0)\nprint(os.waitpid(pid, 0)[1])",
    "subprocess": "import subprocess, sys\n"
    "print(subprocess.call([sys.executable, '-c', 'import toymod; toymod.work(4)']))",
}


@pytest.mark.parametrize("kind", CHILDREN)
def test_children_write_their_own_rings(kind: str, toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links", armed=True)
    script = tmp_path / "main.py"
    script.write_text(f"import os, toymod\n{CHILDREN[kind]}\n")
    done = subprocess.run(
        [sys.executable, str(script)], env=environment(link, tmp_path), capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("0\n", "")
    rings = [process.ring for process in processes(link) if process.ring is not None]
    assert 8 in [spans(ring, toy.id("verify.forward")) for ring in rings]
    if kind == "fork":
        assert sorted(spans(ring, toy.id("verify.forward")) for ring in rings) == [2, 8]


def test_fork_gives_no_warning_and_the_child_has_its_own_control_line(toy: Toy, tmp_path: Path) -> None:
    python = interpreter("3.12")
    toy = make_toy(tmp_path, "toymod", SOURCE, MARKS, python)
    link = toy.link(tmp_path / "links", armed=True)
    code = CHILDREN["fork"].replace("\npid", "\nimport warnings; warnings.simplefilter('error')\npid")
    done = run_python(f"import os, toymod\n{code}", environment(link, tmp_path), python, ["-W", "error"])
    assert (done.stdout, done.stderr) == ("0\n", "")
    assert len({process.fifo for process in processes(link)}) == 2


def test_kill_9_keeps_every_completed_record(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links", armed=True)
    code = "import toymod, sys, time\ntoymod.work(500)\nprint('done', flush=True)\ntime.sleep(60)"
    with running(code, environment(link, tmp_path)) as child:
        assert child.stdout is not None and child.stdout.readline() == "done\n"
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    process = only_process(link)
    assert not process.alive
    assert spans(process.ring, toy.id("verify.forward")) == 1000 and spans(process.ring, toy.id("cycle")) == 500


@pytest.mark.parametrize("option", ["-I", "-E", "-S", "-IS"])
def test_options_that_keep_the_runtime_out_are_reported(option: str, toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links", armed=True)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import toymod; print(toymod.work(1))"
    done = run_python(code, environment(link, tmp_path), options=[option])
    assert done.stdout == "[5]\n"
    assert processes(link) == [], "this option is believed to keep the runtime out"
    assert option in (why_not_up([sys.executable, option, "-m", "server"]) or "")


@pytest.mark.parametrize(
    "options", [[], ["-s"], ["-u", "-X", "utf8"], ["-W", "Ignore::S"], ["-m", "ISE"], ["-cimport SIE"]]
)
def test_options_that_let_the_runtime_in_give_no_warning(options: list[str]) -> None:
    assert why_not_up([sys.executable, *options, "server.py", "-I"]) is None


def test_an_existing_sitecustomize_still_runs(toy: Toy, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("import sys; sys.theirs = __file__; name = __name__")
    link = toy.link(tmp_path / "links", armed=True)
    code = "import sys, sitecustomize as s, toymod; print(sys.theirs == s.__file__, s.name, toymod.work(1))"
    done = run_python(code, environment(link, other, tmp_path))
    assert (done.stdout, done.stderr) == ("True sitecustomize [5]\n", "")
    assert spans(only_process(link).ring, toy.id("verify.forward")) == 2


def test_an_existing_sitecustomize_that_fails_fails_as_without_us(toy: Toy, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "sitecustomize.py").write_text("raise ImportError('theirs')")
    link = toy.link(tmp_path / "links", armed=True)
    done = run_python("import toymod; print(toymod.work(1))", environment(link, other, tmp_path))
    assert done.stdout == "[5]\n" and "theirs" in done.stderr
    assert spans(only_process(link).ring, toy.id("verify.forward")) == 2


def test_bytecode_caches_stay_clean_in_both_directions(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links", armed=True)
    code = "import toymod; print(toymod.work(1), 'make_writers' in repr(toymod.W.step.__code__.co_consts))"
    assert run_python(code, environment(link, tmp_path)).stdout == "[5] True\n"
    cached = list((tmp_path / "__pycache__").glob("toymod*.pyc"))
    assert len(cached) == 1 and b"specmeter" not in cached[0].read_bytes()
    before = cached[0].read_bytes()
    assert run_python(code, environment(None, tmp_path)).stdout == "[5] False\n"
    assert run_python(code, environment(link, tmp_path)).returncode == 0
    assert cached[0].read_bytes() == before
    assert len(processes(link)) == 2
    assert all(spans(process.ring, toy.id("verify.forward")) == 2 for process in processes(link))


def test_another_file_than_the_planned_one_is_refused_and_runs_unharmed(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links", armed=True)
    (tmp_path / "toymod.py").write_text(SOURCE.replace("x + 1", "x + 2"))
    done = run_python("import toymod; print(toymod.work(1))", environment(link, tmp_path))
    assert (done.stdout, done.stderr) == ("[7]\n", "")
    report = only_process(link).report
    assert (
        report["modules"] == {"toymod": "refused"}
        and "is not the file that was planned" in report["refused"][0]["reason"]
    )
    assert report["refused"][0]["points"] == [1, 2] and report["armed_points"] == []


def test_a_module_without_source_is_refused(toy: Toy, tmp_path: Path) -> None:
    import py_compile

    link = toy.link(tmp_path / "links", armed=True)
    py_compile.compile(str(tmp_path / "toymod.py"), cfile=str(tmp_path / "toymod.pyc"))
    (tmp_path / "toymod.py").unlink()
    done = run_python("import toymod; print(toymod.work(1))", environment(link, tmp_path))
    assert done.stdout == "[5]\n"
    assert "not imported from source" in only_process(link).report["refused"][0]["reason"]


def test_code_of_another_python_is_refused(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links", armed=True)
    done = run_python("import toymod; print(toymod.work(1))", environment(link, tmp_path), interpreter("3.13"))
    assert (done.stdout, done.stderr) == ("[5]\n", "")
    assert "another Python" in only_process(link).report["refused"][0]["reason"]


def test_optimized_python_is_refused(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links", armed=True)
    done = run_python("import toymod; print(toymod.work(1))", environment(link, tmp_path), options=["-O"])
    assert done.stdout == "[5]\n" and "-O level 1" in only_process(link).report["refused"][0]["reason"]


def test_a_module_imported_before_the_hook_is_taken(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links", armed=True)
    env = environment(None, tmp_path)
    boot = (
        "import toymod, os, sys\n"
        f"os.environ['SPECMETER_LINK'] = {str(link.path)!r}\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[2] / 'src')!r})\n"
        "from specmeter.runtime.plugin import activate\nactivate(); activate()\nprint(toymod.work(1))"
    )
    done = run_python(boot, env)
    assert (done.stdout, done.stderr) == ("[5]\n", "")
    assert spans(only_process(link).ring, toy.id("verify.forward")) == 2


def test_plugin_after_sitecustomize_changes_nothing(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links", armed=True)
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2] / 'src')!r})\n"
        "from specmeter.runtime.plugin import activate\nactivate()\nimport toymod; print(toymod.work(1))\n"
        "print(sum('toymod' in getattr(f, '_names', ()) for f in sys.meta_path))"
    )
    done = run_python(code, environment(link, tmp_path))
    assert (done.stdout, done.stderr) == ("[5]\n1\n", "")
    assert spans(only_process(link).ring, toy.id("verify.forward")) == 2


def test_plugin_without_a_link_does_nothing(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2] / 'src')!r})\n"
        "from specmeter.runtime.plugin import activate\nactivate()\nprint('specmeter.runtime.boot' in sys.modules)"
    )
    assert run_python(code, environment(None, tmp_path)).stdout == "False\n"


def test_reload_keeps_the_probes(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links", armed=True)
    code = "import toymod as t, importlib; t.work(1); importlib.reload(t); print(t.work(2), list(vars(t.__loader__)))"
    done = run_python(code, environment(link, tmp_path))
    assert done.stdout == "[5, 5] ['name', 'path']\n"
    process = only_process(link)
    assert spans(process.ring, toy.id("verify.forward")) == 6 and process.report["points"] == [1, 2]


def test_readers_of_source_see_the_original_text(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links", armed=True)
    code = "import toymod, inspect; print('specmeter' in inspect.getsource(toymod.W.step))"
    assert run_python(code, environment(link, tmp_path)).stdout == "False\n"


def test_two_links_do_not_mix(toy: Toy, tmp_path: Path) -> None:
    first, second = (toy.link(tmp_path / name, armed=True) for name in ("one", "two"))
    for link, count in ((first, 1), (second, 3)):
        run_python(f"import toymod; toymod.work({count})", environment(link, tmp_path))
    assert [spans(only_process(link).ring, toy.id("cycle")) for link in (first, second)] == [1, 3]


def test_a_link_open_to_others_is_not_trusted(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links", armed=True)
    link.path.chmod(0o777)
    done = run_python("import toymod; print(toymod.work(1))", environment(link, tmp_path))
    assert done.stdout == "[5]\n" and "not a private directory" in done.stderr
    assert processes(link) == []


def test_a_link_that_is_gone_leaves_the_server_alone(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links", armed=True)
    env = environment(link, tmp_path)
    shutil.rmtree(link.path)
    done = run_python("import toymod; print(toymod.work(1))", env)
    assert (done.stdout, done.stderr) == ("[5]\n", "")


def test_a_damaged_plan_leaves_the_server_alone(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links", armed=True)
    (link.path / "plan.json").write_text("{")
    (link.path / "code" / "toymod.bin").write_bytes(b"\0\1")
    done = run_python("import toymod; print(toymod.work(1))", environment(link, tmp_path))
    assert done.stdout == "[5]\n"


def test_link_removed_while_the_server_runs(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links", armed=True)
    code = "import toymod, sys\nprint(toymod.work(1))\nsys.stdin.readline()\nprint(toymod.work(1))"
    with running(code, environment(link, tmp_path)) as child:
        assert child.stdout is not None and child.stdin is not None
        assert child.stdout.readline() == "[5]\n"
        remove_link(link)
        assert not link.path.exists()
        out, err = child.communicate("\n", timeout=60)
    assert (out, err, child.returncode) == ("[5]\n", "", 0)


def test_the_probes_go_out_once_when_the_link_is_gone(toy: Toy, tmp_path: Path) -> None:
    """As when a login ends and its runtime directory with it: no report can be written, and none is tried for ever."""
    link = toy.link(tmp_path / "links", armed=True)
    code = """
import sys, threading, time, toymod
from _specmeter_runtime.boot import current
toymod.work(1)
print("ready", flush=True)
sys.stdin.readline()
thread = threading.Thread(target=toymod.work, args=(1,))  # a new lane is news for the report
thread.start(); thread.join()
end = time.monotonic() + 30
while not current().detached and time.monotonic() < end: time.sleep(0.01)
before = time.process_time()
time.sleep(0.5)
runtime = current()
print(runtime.detached, runtime.arming.armed, len(runtime.faults), time.process_time() - before < 0.1, toymod.work(1))
"""
    with running(code, environment(link, tmp_path)) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        remove_link(link)
        out, err = child.communicate("\n", timeout=60)
    assert (out, err) == ("True False 1 True [5]\n", "")


def test_a_child_whose_line_cannot_be_made_touches_no_handle_of_the_servers(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links", armed=True)
    code = """
import os, sys, threading, time, toymod
from _specmeter_runtime.boot import current
toymod.work(1)
print("ready", flush=True)
sys.stdin.readline()
if os.fork() == 0:
    mine = [os.open(sys.argv[1], os.O_RDWR | os.O_CREAT) for _ in range(8)]  # one takes the closed handle's number
    thread = threading.Thread(target=toymod.work, args=(1,))
    thread.start(); thread.join()
    time.sleep(0.3)
    print(os.fstat(mine[0]).st_size, current()._line, flush=True)
    os._exit(0)
os.wait()
"""
    code = code.replace("sys.argv[1]", repr(str(tmp_path / "mine")))
    with running(code, environment(link, tmp_path)) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        remove_link(link)
        out, err = child.communicate("\n", timeout=60)
    assert (out, err) == ("0 None\n", "")


def test_files_are_private(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links", armed=True)
    with running("import toymod, time; toymod.work(1); time.sleep(60)", environment(link, tmp_path)):
        until(lambda: [process for process in processes(link) if process.ring], "the ring")
        modes = {path.suffix: path.stat().st_mode & 0o777 for path in link.path.iterdir()}
    assert {modes[suffix] for suffix in (".ring", ".json", ".fifo")} == {0o600} and modes[""] == 0o700
    assert link.path.stat().st_mode & 0o777 == 0o700


def test_report_is_plain_json_with_the_documented_keys(toy: Toy, tmp_path: Path) -> None:
    link = toy.link(tmp_path / "links", armed=True)
    run_python("import toymod; toymod.work(1)", environment(link, tmp_path, RANK="2", WORLD_SIZE="4"))
    report = json.loads(next(link.path.glob("*-*.json")).read_text())
    assert (report["rank"], report["world"], report["engine"], report["modules"]) == (2, 4, "toy", {"toymod": "ready"})
    assert report["armed_points"] == [1, 2]
