"""The commands run, env, arm, disarm and status, on a toy server with its own recipe."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from specmeter.control import find_link, interpreter_of, make_link, processes
from specmeter.control.launch import _interpreter_options, site_folder
from specmeter.errors import SpecmeterError
from specmeter.runtime.ring import start_ticks
from tests.support.children import until
from tests.support.recipes import cycle, point, recipe

SERVER = """
import signal, sys, time
import toysrv
def stop(number, frame):
    print("stopping", flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, stop)
print("up", flush=True)
while True:
    toysrv.step()
    time.sleep(0.005)
"""
PARENT = """
import subprocess, sys, time
loop = "import time, toysrv\\nprint(flush=True)\\nwhile True:\\n    toysrv.step()\\n    time.sleep(0.005)"
worker = subprocess.Popen([sys.executable, "-c", loop], stdout=subprocess.PIPE)
worker.stdout.readline()
print(worker.pid, flush=True)
time.sleep(600)
"""
MODULE = "def leaf(x):\n    return x\n\ndef step():\n    return leaf(1)\n"


def toy_recipe(callee: str) -> str:
    """The step as the cycle, and its call of ``callee`` as a leaf."""
    return recipe(cycle("toysrv", "step"), point("verify.forward", "toysrv", "step", call=f"^{callee}$"))


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the toy server, its recipe, and a runtime directory of its own."""
    (tmp_path / "toysrv.py").write_text(MODULE)
    (tmp_path / "server.py").write_text(SERVER)
    (tmp_path / "toy.toml").write_text(toy_recipe("leaf"))
    (tmp_path / "run").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def specmeter(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specmeter", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def result(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["schema"].startswith("specmeter/") and document["warnings"] == []
    found: dict[str, Any] = document["result"]
    return found


def test_run_arm_status_disarm_and_the_servers_own_end(place: Path) -> None:
    command = [sys.executable, "-m", "specmeter", "run", "--recipe", str(place / "toy.toml"), "--"]
    server = subprocess.Popen(
        [*command, sys.executable, str(place / "server.py")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None and server.stdout.readline() == "up\n"
        (link,) = result(specmeter("status", "--json"))["links"]
        assert link["processes"][0]["armed"] is False
        armed = result(specmeter("arm", "--full", "--json"))
        assert (armed["silent"], armed["processes"][0]["armed"]) == ([], True)

        def hits() -> dict[str, int]:
            (entry,) = result(specmeter("status", "--json"))["links"]
            return {point["name"]: point["hits"] for point in entry["processes"][0]["points"]}

        until(lambda: min(hits().values()) > 3, "hits of both points")
        assert "2 of 2 points armed" in specmeter("status").stdout
        assert specmeter("disarm").returncode == 0
        before = hits()
        time.sleep(0.1)
        assert hits() == before
        server.send_signal(signal.SIGTERM)
        out, err = server.communicate(timeout=60)
        assert (out, server.returncode) == ("stopping\n", 7), err
        assert list((place / "run" / "specmeter").iterdir()) == [], "the link goes with its server"
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


@pytest.mark.parametrize("form", ["script", "module", "safe"])
def test_a_module_beside_the_script_is_found_as_python_finds_it(
    place: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH")
    (place / "here.py").write_text("import toysrv; print('found')")
    words = {"script": [str(place / "here.py")], "module": ["-m", "here"], "safe": ["-I", str(place / "here.py")]}[form]
    if form == "module":
        monkeypatch.chdir(place)
    done = specmeter("run", "--recipe", str(place / "toy.toml"), "--", sys.executable, *words)
    if form == "safe":
        assert done.returncode == 5 and "is not in the environment" in done.stderr
    else:
        assert (done.returncode, done.stdout) == (0, "found\n"), done.stderr
        assert "did not come up" not in done.stderr


def test_a_tree_may_hold_the_module_as_one_file(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH")
    words = ["plan", "--recipe", str(place / "toy.toml"), "--path", str(place), "--json"]
    assert "holds no package" not in specmeter(*words).stderr
    done = specmeter(*words, "--engine", "toy==1.0")
    assert done.returncode == 0 and result(done)["points"], done.stderr


def started(place: Path, server: Path, **how: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "specmeter", "run", "--recipe", str(place / "toy.toml"), "--"]
    return subprocess.Popen(
        [*command, sys.executable, str(server)], stdout=subprocess.PIPE, text=True, start_new_session=True, **how
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_link_goes_with_a_server_whose_worker_outlives_a_signal(place: Path, number: signal.Signals) -> None:
    (place / "parent.py").write_text(PARENT)
    server = started(place, place / "parent.py", stderr=subprocess.DEVNULL)
    try:
        assert server.stdout is not None
        worker = int(server.stdout.readline())
        assert list((place / "run" / "specmeter").iterdir())
        server.send_signal(number)
        assert server.wait(60) == 128 + number
        assert list((place / "run" / "specmeter").iterdir()) == []
        assert not Path(f"/proc/{worker}/exe").exists(), "the worker went too, as after Ctrl-C"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def test_a_signal_before_the_server_is_started_leaves_no_link(place: Path) -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 4096)
    os.set_blocking(write, True)
    server = started(place, place / "server.py", stderr=write)  # stands still where it names the link
    try:
        until(lambda: list((place / "run" / "specmeter").glob("*/link.json")), "a link")
        # The first thing after the link's making that makes the process sleep is the line that cannot be written.
        until(lambda: Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S", "the line")
        server.send_signal(signal.SIGTERM)
        os.close(write)
        with os.fdopen(read, "rb") as rest:
            rest.read()
        assert server.wait(60) == 130
        assert list((place / "run" / "specmeter").iterdir()) == []
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def test_an_anchor_that_does_not_resolve_starts_nothing(place: Path) -> None:
    (place / "toy.toml").write_text(toy_recipe("missing"))
    done = specmeter("run", "--recipe", str(place / "toy.toml"), "--", sys.executable, "-c", "print('started')")
    assert done.returncode == 1 and "started" not in done.stdout and "verify.forward" in done.stderr
    assert not (place / "run" / "specmeter").exists() or list((place / "run" / "specmeter").iterdir()) == []


def test_a_runtime_that_did_not_come_up_is_said(place: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(place)!r}); import toysrv; print(toysrv.step())"
    done = specmeter("run", "--recipe", str(place / "toy.toml"), "--", sys.executable, "-I", "-c", code)
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert "isolated mode" in done.stderr and "did not come up" in done.stderr


def test_env_prints_lines_that_a_shell_takes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = place / "o dd'$x"
    odd.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(odd))
    done = specmeter(
        "env", "--recipe", str(place / "toy.toml"), "--python", sys.executable, "--armed", "--full", "--link", "pod"
    )
    assert done.returncode == 0, done.stderr
    script = f"{done.stdout}\n{sys.executable} -c 'import toysrv; toysrv.step()'"
    ran = subprocess.run(["sh", "-c", script], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    (link,) = result(specmeter("status", "--json"))["links"]
    assert link["link"] == "pod" and [point["hits"] for point in link["processes"][0]["points"]] == [1, 1]
    systemd = specmeter("env", "--link", "pod", "--python", sys.executable, "--format", "systemd")
    assert systemd.stdout.startswith('Environment="SPECMETER_LINK=')


def env_file(text: str) -> dict[str, str]:
    """As `docker run --env-file` reads it: a variable a line, nothing quoted, "#" begins a comment line."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def unit_file(text: str) -> dict[str, str]:
    """As systemd reads Environment= (systemd.exec(5), systemd.syntax(7)): quotes, C escapes, %-specifiers."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, _, rest = line.partition("=")
        assert key == "Environment" and rest[0] == rest[-1] == '"', line
        inside = re.sub(r'\\(["\\n])', lambda hit: {"n": "\n"}.get(hit[1], hit[1]), rest[1:-1])
        assert not re.search(r'(?<!\\)(?:\\\\)*"', rest[1:-1]) and "%" not in inside.replace("%%", "")
        name, _, value = inside.partition("=")
        found[name] = value.replace("%%", "%")
    return found


def test_env_in_every_form_is_what_its_reader_takes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = place / "o dd'$x\"q\\b%n#é"
    odd.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(odd))
    words = ["env", "--recipe", str(place / "toy.toml"), "--python", sys.executable, "--link", "pod"]
    document = result(specmeter(*words, "--json"))
    folder = str(odd / "specmeter" / "pod")
    assert (document["link"], document["path"]) == ("pod", folder) and Path(folder).is_dir()
    wanted = {"SPECMETER_LINK": folder, "PYTHONPATH": str(site_folder())}
    assert document["env"] == wanted
    assert env_file(specmeter(*words, "--format", "docker").stdout) == wanted
    assert unit_file(specmeter(*words, "--format", "systemd").stdout) == wanted
    assert Path(folder).is_dir(), "it stays"
    assert specmeter("detach", "--link", "pod").returncode == 0 and not Path(folder).exists()


def test_an_env_file_cannot_hold_a_line_break(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = place / "two\nlines"
    odd.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(odd))
    words = ["env", "--recipe", str(place / "toy.toml"), "--python", sys.executable, "--link", "pod", "--format"]
    done = specmeter(*words, "docker")
    assert done.returncode == 2 and "line break" in done.stderr and done.stdout == ""
    assert unit_file(specmeter(*words, "systemd").stdout)["SPECMETER_LINK"] == str(odd / "specmeter" / "pod")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run"], "no command"),
        (["run", "--", "no-such-program"], "is not there"),
        (["run", "--", "/bin/true"], "not a Python program"),
        (["arm"], "no link"),
        (["arm", "--link", "nowhere"], "no link nowhere"),
        (["env"], "Which Python"),
        (["patch", "plan", "--path", "X"], "specmeter: patch plan: unrecognized arguments: --path X\n"),
        (["patch", "plan", "--path", "X"], "next: Run `specmeter patch plan --help`"),
        (["arm", "--lnk", "x"], "Run `specmeter arm --help`"),
        (["--lnk", "arm"], "specmeter: unrecognized arguments: --lnk\n"),
        (["run", "--records", "3", "--", sys.executable], "too few"),
        (["run", "--link", "../x", "--engine", "specmeter", "--", sys.executable], "cannot be a link id"),
    ],
)
def test_wrong_use_is_explained(place: Path, words: list[str], said: str) -> None:
    done = specmeter(*words)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_a_folder_that_others_can_write_to_is_refused(place: Path) -> None:
    (place / "run" / "specmeter").mkdir(mode=0o700)
    (place / "run" / "specmeter").chmod(0o777)
    done = specmeter("status")
    assert done.returncode == 3 and "cannot be trusted" in done.stderr


def test_a_folder_that_is_a_symbolic_link_is_refused(place: Path) -> None:
    (place / "elsewhere").mkdir(mode=0o700)
    (place / "run" / "specmeter").symlink_to(place / "elsewhere")
    assert specmeter("status").returncode == 3


def test_two_links_must_be_told_apart(place: Path) -> None:
    for name in ("one", "two"):
        make_link({"points": []}, {}, link_id=name)
    with pytest.raises(SpecmeterError, match="2 links"):
        find_link()
    with pytest.raises(SpecmeterError, match="exists already"):
        make_link({"points": []}, {}, link_id="one")
    assert find_link("two").id == "two"
    # A link whose processes have ended is not meant when there is just one other.
    for name, start in (("one", 1), ("two", start_ticks(os.getpid()))):
        (place / "run" / "specmeter" / name / f"{os.getpid()}-{start}.json").write_text("{}")
    assert find_link().id == "two"
    make_link({"points": []}, {}, link_id="waiting")
    with pytest.raises(SpecmeterError, match="3 links"):
        find_link()


def test_detach_says_what_is_left(place: Path) -> None:
    server = subprocess.Popen(
        [sys.executable, "-m", "specmeter", "run", "--link", "mine", "--recipe", str(place / "toy.toml"), "--",
         sys.executable, str(place / "server.py")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None and server.stdout.readline() == "up\n"
        until(lambda: processes(find_link("mine")), "the runtime")
        done = specmeter("detach")
        assert done.returncode == 0 and "which runs on with its own code" in done.stdout
        assert "link mine is detached and removed" in done.stdout and "dormant" not in done.stdout
    finally:
        server.send_signal(signal.SIGTERM)
        _, err = server.communicate(timeout=60)
    assert "did not come up" not in err
    link = make_link({"points": []}, {}, link_id="old")
    (link.path / "7-1.json").write_text(json.dumps({"points": []}))
    done = specmeter("detach", "--link", "old", "--keep")
    assert "none of its processes runs" in done.stdout and "`specmeter detach --link old` removes it" in done.stdout
    done = specmeter("detach", "--link", "old")
    assert "link old is detached and removed" in done.stdout and "will follow" not in done.stdout
    assert not link.path.exists()


def test_interpreters_behind_scripts(tmp_path: Path) -> None:
    direct, through_env, shell = (tmp_path / name for name in ("direct", "by-env", "long"))
    direct.write_text(f"#!{sys.executable} -E\nprint()\n")
    through_env.write_text(f"#!/usr/bin/env {Path(sys.executable).name}\n")
    shell.write_text(f"#!/bin/sh\n'''exec' \"{sys.executable}\" \"$0\" \"$@\"\n' '''\n")
    for script in (direct, through_env, shell):
        script.chmod(0o755)
    assert interpreter_of([str(direct)]) == Path(sys.executable)
    assert interpreter_of([str(shell)]) == Path(sys.executable)
    assert interpreter_of([str(through_env)]).name == Path(sys.executable).name
    assert interpreter_of(["env", "A=1", sys.executable, "x.py"]) == Path(sys.executable)
    assert _interpreter_options([str(direct)]) == ["-E"]
