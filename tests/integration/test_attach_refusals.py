"""What keeps ``attach`` out of a process, each met with the real thing: named, with the fix, no harm done."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specmeter import cli
from tests.support.children import ask, running, until

ECHO = "import sys\nprint('ready', flush=True)\nfor line in sys.stdin: print(eval(line), flush=True)\n"
SRC = str(Path(__file__).resolve().parents[2] / "src")
ENV = {"PATH": os.environ["PATH"], "PYTHONPATH": SRC}
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user or make a namespace")
needs_gdb = pytest.mark.skipif(shutil.which("gdb") is None, reason="gdb is not installed")
NOT_DUMPABLE = "import ctypes\nctypes.CDLL(None).prctl(4, 0, 0, 0, 0)\n" + ECHO
WITHOUT_PTRACE = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"]


@pytest.fixture(autouse=True)
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def attach(capsys: pytest.CaptureFixture[str], pid: int, *options: str) -> tuple[int, str]:
    """The exit code, and the error's three parts as one text."""
    capsys.readouterr()
    code = cli.main(["attach", str(pid), *options, "--json"])
    return code, text_of(json.loads(capsys.readouterr().out))


def text_of(document: dict[str, Any]) -> str:
    error = document["error"]
    return f"{error['what']} {error['why']} {error['next']}"


def attach_under(prefix: Sequence[str], pid: int, *options: str) -> tuple[int, str]:
    """As ``attach``, by a command of its own that ``prefix`` starts."""
    command = [*prefix, sys.executable, "-m", "specmeter", "attach", str(pid), *options, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": SRC})
    assert done.stdout, done.stderr
    return done.returncode, text_of(json.loads(done.stdout))


def ready(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n", child.stderr and child.stderr.read()


def may_drop_ptrace() -> bool:
    command = [*WITHOUT_PTRACE, "true"]
    return shutil.which("setpriv") is not None and subprocess.run(command, capture_output=True).returncode == 0


needs_setpriv = pytest.mark.skipif(
    os.geteuid() != 0 or not may_drop_ptrace(), reason="needs root and setpriv, to give the capability up"
)


def test_no_process_and_no_python(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = attach(capsys, 2**22 - 1)
    assert code == 3 and "there is no process" in said and "another container or machine" in said
    with subprocess.Popen(["sleep", "30"]) as child:
        code, said = attach(capsys, child.pid)
        child.kill()
    assert code == 5 and "is no Python" in said


def test_a_process_that_has_ended(capsys: pytest.CaptureFixture[str]) -> None:
    child = subprocess.Popen(["true"])
    try:
        until(lambda: ") Z" in Path(f"/proc/{child.pid}/stat").read_text(), "its end")
        code, said = attach(capsys, child.pid)
        assert code == 3 and "has ended and only waits to be collected" in said
    finally:
        child.wait()


def test_a_stopped_process(capsys: pytest.CaptureFixture[str]) -> None:
    with running(ECHO, ENV) as child:
        ready(child)
        child.send_signal(signal.SIGSTOP)
        until(lambda: ") T" in Path(f"/proc/{child.pid}/stat").read_text(), "its stop")
        code, said = attach(capsys, child.pid)
        assert code == 3 and "is stopped" in said and f"kill -CONT {child.pid}" in said


@needs_root
def test_another_users_process(capsys: pytest.CaptureFixture[str]) -> None:
    """Root may look into it, but the runtime there trusts its own user's links only."""
    with running(f"import os; os.setuid(65534)\n{ECHO}", ENV) as child:
        ready(child)
        code, said = attach(capsys, child.pid)
        assert code == 3 and "belongs to another user" in said and "sudo -u" in said


@needs_root
def test_roots_process_seen_by_an_ordinary_user() -> None:
    """Such a user may not read the checkout's folder, so the facts are gathered in a fork that gives its rights up."""
    from specmeter.attach import obstacles
    from specmeter.attach.obstacles import Facts

    with running(ECHO, ENV) as child:
        ready(child)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            facts = obstacles.gather(child.pid)
            obstacle = obstacles.common(facts) if isinstance(facts, Facts) else facts
            os.write(writer, f"{obstacle}".encode())
            os._exit(0)
        os.close(writer)
        os.waitpid(pid, 0)
        with os.fdopen(reader) as file:
            said = file.read()
    assert "belongs to another user (root (uid 0))" in said and "you are" in said and "sudo -u root" in said


@needs_root
@pytest.mark.parametrize("option, which", [("-pf", "process"), ("-m", "file system")])
def test_another_namespace(option: str, which: str, capsys: pytest.CaptureFixture[str]) -> None:
    inside = subprocess.Popen(["unshare", option, sys.executable, "-c", ECHO], stdin=subprocess.PIPE, stdout=-1)
    try:
        assert inside.stdout is not None
        if inside.stdout.readline() != b"ready\n":
            pytest.skip("making a namespace is not allowed here")
        pid = _child_of(inside.pid) if option == "-pf" else inside.pid
        code, said = attach(capsys, pid)
        assert code == 3 and f"another {which} namespace" in said
        assert "docker exec" in said and f"nsenter -t {pid} -a" in said
    finally:
        inside.communicate(b"")  # its loop ends with its input


def _child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


@needs_setpriv
@pytest.mark.parametrize(
    "code, prefix, why, fix",
    [
        (ECHO, [], "holds capabilities that you do not, and CAP_SYS_PTRACE is missing here", "--cap-add SYS_PTRACE"),
        (NOT_DUMPABLE, WITHOUT_PTRACE, "is marked as not dumpable", "as root with CAP_SYS_PTRACE"),
    ],
    ids=["more capabilities", "not dumpable"],
)
def test_without_the_capability(code: str, prefix: list[str], why: str, fix: str) -> None:
    command = [*prefix, sys.executable, "-u", "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENV) as child:
        ready(child)
        exit_code, said = attach_under(WITHOUT_PTRACE, child.pid)
        assert exit_code == 3 and why in said and fix in said
        # The kernel is of the same opinion.
        assert subprocess.run([*WITHOUT_PTRACE, "readlink", f"/proc/{child.pid}/exe"], capture_output=True).returncode
        assert ask(child, "1 + 1") == "2"
        child.communicate("")


@needs_setpriv
@needs_gdb
def test_an_equal_needs_no_capability() -> None:
    """What is told apart above is not refused here: the same user, the same rights, nothing hidden."""
    command = [*WITHOUT_PTRACE, sys.executable, "-u", "-c", ECHO]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENV) as child:
        ready(child)
        _, said = attach_under(WITHOUT_PTRACE, child.pid, "--timeout", "0.3")
        assert "did not run what was queued" in said, "gdb got in; the process sits in one read"
        child.communicate("")


@needs_gdb
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_a_traced_process(capsys: pytest.CaptureFixture[str]) -> None:
    with running(ECHO, ENV) as child:
        ready(child)
        with subprocess.Popen(["strace", "-q", "-o", "/dev/null", "-p", str(child.pid)]) as tracer:
            until(lambda: "TracerPid:\t0" not in Path(f"/proc/{child.pid}/status").read_text(), "strace")
            code, said = attach(capsys, child.pid)
            assert code == 3 and f"traced by process {tracer.pid}" in said and "End that one" in said
            tracer.terminate()


def test_no_gdb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with running(ECHO, ENV) as child:
        ready(child)
        monkeypatch.setenv("PATH", str(tmp_path))
        code, said = attach(capsys, child.pid)
        assert code == 3 and "gdb: gdb is not on PATH" in said and "apt-get install gdb" in said
        assert f"remote-exec: Python {sys.version_info[0]}.{sys.version_info[1]} has no sys.remote_exec" in said


@needs_gdb
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_an_interpreter_that_exports_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = _static_python(tmp_path)
    child = subprocess.Popen(
        [python, "-S", "-c", ECHO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        ready(child)
        code, said = attach(capsys, child.pid)
        assert code == 3 and "static build that does not export PyRun_SimpleString, Py_AddPendingCall" in said
        assert "specmeter run" in said and "specmeter patch" in said
        assert ask(child, "1 + 1") == "2"
    finally:
        child.communicate("")


def _static_python(folder: Path) -> str:
    """The running Python's own static library linked into a program that exports no symbol."""
    facts = sysconfig.get_config_vars()
    archive = Path(facts["LIBPL"]) / facts["LIBRARY"]
    if not archive.exists():
        pytest.skip(f"{archive} is not there")
    (folder / "main.c").write_text(
        "extern int Py_BytesMain(int, char **);\nint main(int n, char **words) { return Py_BytesMain(n, words); }\n"
    )
    program = folder / "python-static"
    libraries = f"{facts.get('LIBS', '')} {facts.get('SYSLIBS', '')}".split()
    done = subprocess.run(
        ["cc", "-o", str(program), str(folder / "main.c"), str(archive), *libraries], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"it could not be linked: {done.stderr.strip().splitlines()[-1]}")
    (folder / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix) / 'bin'}\n")
    return str(program)
