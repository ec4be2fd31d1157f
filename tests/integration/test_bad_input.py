"""Bad input of sources, plans and launches: a clear message, a next step, and nothing changed.

Every case is the real thing (another user, another Python, nowhere to write); where this machine cannot make it (other
users and mounts need root), the case is skipped. Disks: ``test_bad_disks.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import specmeter.commands.source
import specmeter.hosts.dispatch
from specmeter import cli
from specmeter.errors import Exit
from specmeter.source.pyfile import SourceError, read
from tests.support.contents import contents
from tests.support.recipes import install, point, recipe

assert specmeter.commands.source and specmeter.hosts.dispatch  # loaded here: another user may not read them
NOBODY = 65534
MODULE = "class Worker:\n    def leaf(self, x):\n        return x\n    def step(self):\n        return self.leaf(1)\n"
RECIPE = recipe(
    point("cycle", "toyeng.worker", "Worker.step", role="cycle", call="^self.leaf$"), dist="toyeng", range=">=1,<3"
)
root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount and become another user")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up engine of version 1.5 on the search path, two recipes for it, a runtime directory."""
    install(tmp_path, "toyeng", {"worker": MODULE})
    (tmp_path / "toy.toml").write_text(RECIPE)
    (tmp_path / "second.toml").write_text(RECIPE.replace('name = "cycle"', 'name = "other"'))
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def specmeter_says(*words: str, code: int) -> str:
    """What a command that must fail prints: an error with a next step, and neither a traceback nor output."""
    done = subprocess.run([sys.executable, "-m", "specmeter", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and "fault of ours" not in done.stderr and done.stdout == ""
    assert "\n  next: " in done.stderr, done.stderr
    return done.stderr


def pipe(place: Path) -> None:
    os.mkfifo(place / "pipe.py")


def failing_read(place: Path) -> None:
    (place / "toyeng" / "odd.py").symlink_to("/proc/self/mem")  # opens, and cannot be read


def renamed(place: Path) -> None:
    (place / "toyeng" / "worker.py").write_text(MODULE.replace("Worker", "FastWorker"))


def broken_venv(place: Path) -> None:
    (place / "venv" / "bin").mkdir(parents=True)
    (place / "venv" / "bin" / "python").symlink_to(place / "gone" / "python3.11")


def broken_home(place: Path) -> None:
    (place / "venv" / "bin").mkdir(parents=True)
    python = place / "venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nPYTHONHOME=/no/such/place exec {sys.executable} "$@"\n')
    python.chmod(0o755)


def nothing(_place: Path) -> None:
    pass


PLAN = ["plan", "--recipe", "toy.toml"]
RUN = ["run", "--recipe", "toy.toml", "--", sys.executable, "-c", "print('started')"]
CASES: dict[str, tuple[Callable[[Path], None], list[str], int, str]] = {
    "module not there": (nothing, ["source", "toyeng.wroker"], 5, "Nearest: toyeng.worker"),
    "a pipe": (pipe, ["source", "pipe.py"], 5, "no file but a pipe"),
    "a folder": (nothing, ["source", "toyeng/"], 5, "not a Python source file"),
    "a tree that is not there": (nothing, ["source", "toyeng.worker", "--path", "away"], 2, "away is not a folder"),
    "a read that fails": (failing_read, ["source", "toyeng.odd"], 5, "odd.py: Input/output error"),
    "no such engine": (nothing, ["plan", "--engine", "sglang==0.5.16"], 5, "sglang is not in the environment of"),
    "no such engine to run": (nothing, ["run", "--engine", "sglang==0.5.16", *RUN[3:]], 5, "sglang is not in the"),
    "no metadata": (nothing, ["plan", "--engine", "sglang"], 5, "no metadata of sglang"),
    "an empty tree": (nothing, ["plan", "--engine", "vllm", "--path", "run"], 5, "holds no package or module vllm"),
    "version outside": (nothing, [*PLAN, "--engine", "toy==4.0"], 3, "toy 4.0 is outside every range"),
    "version outside, run": (nothing, ["run", "--engine", "toy==4.0", *RUN[1:]], 3, "outside every range"),
    "renamed classes": (renamed, RUN, 1, "nearest: FastWorker.step"),
    "one call twice": (nothing, [*PLAN, "--recipe", "second.toml"], 2, "cycle and other both claim"),
    "broken venv": (broken_venv, [*PLAN, "--python", "venv/bin/python"], 5, "No such file"),
    "broken venv's home": (broken_home, [*PLAN, "--python", "venv/bin/python"], 5, "does not work"),
    "broken venv, run": (broken_venv, [*RUN[:3], "--", "venv/bin/python", "-c", "1"], 2, "a symbolic link to"),
    "PID gone": (nothing, ["source", "PID"], 5, "it has ended"),
    "PID gone, plan": (nothing, [*PLAN, "--pid", "PID"], 5, "it has ended"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_said_plainly_and_nothing_changed(case: str, place: Path) -> None:
    prepare, words, code, said = CASES[case]
    prepare(place)
    gone = subprocess.Popen(["true"])
    gone.wait()
    before = contents(place)
    text = specmeter_says(*[word.replace("PID", str(gone.pid)) for word in words], code=code)
    assert said in text
    after = contents(place)
    after.pop("run/specmeter", None)  # the empty folder that links would be in
    assert after == before


def test_an_engine_that_is_not_there_is_one_line(place: Path) -> None:
    assert len(specmeter_says("plan", "--engine", "vllm==0.32.0", code=5).splitlines()) == 2


def python_of(version: str) -> str:
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    if not found:
        pytest.skip(f"no CPython {version} in ~/.pyenv/versions")
    return str(found[-1])


@pytest.mark.parametrize(("version", "said"), [("2.7", "does not work"), ("3.8", "at least 3.9 is needed")])
def test_a_python_that_is_too_old(version: str, said: str, place: Path) -> None:
    before = contents(place)
    assert said in specmeter_says(*PLAN, "--python", python_of(version), code=5)
    assert contents(place) == before


def test_a_plan_for_another_python_leaves_the_server_alone_and_is_said(place: Path) -> None:
    code = "from toyeng.worker import Worker; print(Worker().step())"
    words = ["run", "--recipe", "toy.toml", "--python", python_of("3.13"), "--armed", "--", sys.executable, "-c", code]
    done = subprocess.run([sys.executable, "-m", "specmeter", *words], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert "the code was made by another Python" in done.stderr
    assert list((place / "run" / "specmeter").iterdir()) == []


# -- another user -----------------------------------------------------------------------------------------------------


def as_nobody(action: Callable[[], int]) -> tuple[int, str]:
    """Exit code and standard error of ``action`` in a child process of another user."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(writing, 2)
        sys.stderr = os.fdopen(2, "w")
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        code = 99
        try:
            code = action()
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as stream:
        text = stream.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


@root
@pytest.mark.parametrize("words", [["source"], ["plan", "--engine", "vllm", "--pid"]])
def test_a_process_of_another_user(words: list[str], place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], cwd=place)
    try:
        code, text = as_nobody(lambda: cli.main([*words, str(server.pid)]))
        assert code == Exit.ENVIRONMENT and "belongs to another user" in text and "next:" in text
        assert server.poll() is None
    finally:
        server.kill()
        server.wait()


@root
def test_a_file_without_permission(place: Path) -> None:
    path = place / "toyeng" / "worker.py"
    place.chmod(0o755)
    for parent in place.parents[:3]:
        parent.chmod(parent.stat().st_mode | 0o011)
    path.chmod(0o600)

    def reads() -> int:
        try:
            read(str(path))
        except SourceError as error:
            print(error.reason, file=sys.stderr)
            return 5
        return 0

    assert as_nobody(reads) == (5, f"{path}: Permission denied\n")
    path.chmod(0o644)
    assert as_nobody(reads) == (0, "")


@root
def test_nowhere_to_write_at_all(place: Path) -> None:
    """As in a pod whose root file system is read-only: no folder for the link, none for a temporary file."""
    places = ["/tmp", "/var/tmp", "/usr/tmp", str(place / "run"), str(place)]
    run = f"cd /proc && exec {sys.executable} -m specmeter run --recipe {place}/toy.toml -- {sys.executable} -c 1"
    script = "; ".join(f"[ ! -d {it} ] || mount -o bind,ro {it} {it}" for it in places)
    before = contents(place)
    words = ["unshare", "-m", "sh", "-c", f"set -e; {script}; {run}"]
    env = {**os.environ, "TMPDIR": "/tmp"}
    done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=60)
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip("no namespace of mounts can be made here")
    assert done.returncode == 5 and "next:" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert contents(place) == before


@pytest.mark.parametrize(
    ("words", "code"), [(["source", "toyeng.worker"], 5), ([*PLAN, "--python", sys.executable], 1)]
)
def test_an_unreadable_file_through_the_commands(words: list[str], code: int, place: Path) -> None:
    """Root without its capability to read everything is refused by the kernel as any user is."""
    capabilities = "-dac_override,-dac_read_search"
    drop = ["setpriv", f"--bounding-set={capabilities}", f"--inh-caps={capabilities}"] if os.geteuid() == 0 else []
    path = place / "toyeng" / "worker.py"
    path.chmod(0)
    try:
        if subprocess.run([*drop, "cat", str(path)], capture_output=True).returncode == 0:
            pytest.skip("the capability to read everything cannot be given up here")
    except FileNotFoundError:
        pytest.skip("setpriv is not installed")
    command = [*drop, sys.executable, "-m", "specmeter", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == code and f"{path}: Permission denied" in said and "Traceback" not in said
