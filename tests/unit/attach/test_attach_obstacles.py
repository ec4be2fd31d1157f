"""Each obstacle by its name and with its fix; the parts of attaching that need no process."""

from __future__ import annotations

import ast
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specmeter import runtime
from specmeter.attach import bytecode, elf, obstacles, routes
from specmeter.attach.obstacles import Facts, Obstacle
from specmeter.control import Link

FREE = Facts(
    pid=7, uid=1000, own_uid=1000, capable=False, scope=0, tracer=0, state="S", dumpable=True, covers=True,
    same_pid_namespace=True, same_mount_namespace=True,
)  # fmt: skip


def why(obstacle: Obstacle | None) -> str:
    return "" if obstacle is None else f"{obstacle.why} | {obstacle.fix}"


@pytest.mark.parametrize(
    "change, said, fix",
    [
        ({}, "", ""),
        ({"tracer": 42}, "traced by process 42", "End that one"),
        ({"state": "T"}, "is stopped", "kill -CONT 7"),
        ({"scope": 1}, "ptrace_scope is 1", "sysctl kernel.yama.ptrace_scope=0"),
        ({"scope": 1, "capable": True}, "", ""),
        ({"scope": 2}, "only CAP_SYS_PTRACE", "--cap-add SYS_PTRACE"),
        ({"scope": 2, "capable": True}, "", ""),
        ({"scope": 3, "capable": True}, "nobody may trace", "specmeter run"),
        ({"covers": False}, "CAP_SYS_PTRACE is missing", "--cap-add SYS_PTRACE"),
        ({"dumpable": False}, "not dumpable", "CAP_SYS_PTRACE"),
    ],
)
def test_ptrace(change: dict[str, int], said: str, fix: str) -> None:
    text = why(obstacles.for_ptrace(dataclasses.replace(FREE, **change)))  # type: ignore[arg-type]
    assert (said in text and fix in text) if said else text == ""


@pytest.mark.parametrize(
    "change, said, fix",
    [
        ({}, "", ""),
        ({"uid": 0}, "another user (root (uid 0))", "sudo -u root specmeter attach 7"),
        ({"state": "Z"}, "has ended", "Nothing"),
        ({"same_pid_namespace": False}, "another process namespace", "nsenter -t 7"),
        ({"same_mount_namespace": False}, "another file system namespace", "docker exec"),
    ],
)
def test_common(change: dict[str, int], said: str, fix: str) -> None:
    text = why(obstacles.common(dataclasses.replace(FREE, **change)))  # type: ignore[arg-type]
    assert (said in text and fix in text) if said else text == ""


@pytest.mark.parametrize(
    "version, argv, env, has, said",
    [
        ((3, 13), [], {}, False, "3.13 has no sys.remote_exec"),
        ((3, 14), [], {}, False, "--without-remote-debug"),
        ((3, 14), [], {"PYTHON_DISABLE_REMOTE_DEBUG": "1"}, True, "PYTHON_DISABLE_REMOTE_DEBUG is set"),
        ((3, 14), ["python", "-X", "disable-remote-debug"], {}, True, "-X disable-remote-debug"),
        ((3, 14), ["python", "-Xdisable_remote_debug"], {}, True, "-X disable-remote-debug"),
        ((3, 14), ["python", "serve.py"], {}, True, ""),
    ],
)
def test_remote_exec(version: tuple[int, int], argv: list[str], env: dict[str, str], has: bool, said: str) -> None:
    text = why(obstacles.for_remote_exec(version, argv, env, has))
    assert (said in text) if said else text == ""


def test_gdb(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = {"Py_AddPendingCall", "mmap"}
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/gdb")
    assert obstacles.for_gdb((3, 11), needed, needed) is None
    assert "does not export Py_AddPendingCall" in why(obstacles.for_gdb((3, 11), {"mmap"}, needed))
    assert "needs CPython 3.9" in why(obstacles.for_gdb((3, 8), needed, needed))
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "apt-get install gdb" in why(obstacles.for_gdb((3, 11), needed, needed))


def test_the_facts_of_this_very_process() -> None:
    facts = obstacles.gather(os.getpid())
    assert isinstance(facts, Facts)
    assert (facts.uid, facts.own_uid, facts.state) == (os.getuid(), os.geteuid(), "R")
    assert obstacles.common(facts) is None
    assert isinstance(obstacles.gather(2**22 - 1), Obstacle)


def test_addresses_are_those_of_this_process() -> None:
    import ctypes

    names = {"Py_AddPendingCall", "PyRun_SimpleString"}
    found = elf.find(os.getpid(), names, r"^(lib)?python3")
    for name in names:
        assert found[name] == ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value
    libc = elf.find(os.getpid(), {"mmap"}, r"^(libc[.-]|ld-musl)")
    assert libc["mmap"] == ctypes.cast(ctypes.CDLL(None).mmap, ctypes.c_void_p).value


def test_files_that_are_no_elf(tmp_path: Path) -> None:
    for data in (b"#!/bin/sh\n" + b" " * 100, b"\x7fELF\x01\x01" + b" " * 100):
        (tmp_path / "file").write_bytes(data)
        with pytest.raises(ValueError, match="no 64-bit"):
            elf.exports(tmp_path / "file", {"x"})


def test_what_is_run_in_the_process_is_ascii_and_cannot_raise(tmp_path: Path) -> None:
    hostile = tmp_path / 'it"s \\ a\n folder ü'
    hostile.mkdir()
    program = hostile / "attach.py"
    program.write_text("raise SystemExit(3)\n")
    text = routes.statement(program)
    assert text.isascii() and isinstance(ast.parse(text).body[0], ast.Try)
    done = subprocess.run(
        [sys.executable, "-c", text + "print(sorted(n for n in globals() if n[:2] != '__'))"], capture_output=True
    )
    assert (done.stdout, done.returncode) == (b"[]\n", 0), "no exception, no name left"
    program.write_text("import sys; print('ran in', __file__ == sys.argv[1])\n")
    done = subprocess.run([sys.executable, "-c", text, str(program)], capture_output=True)
    assert done.stdout == b"ran in True\n"


def test_the_command_of_gdb_reads_no_file_of_the_user_and_carries_no_quotes(tmp_path: Path) -> None:
    words = routes.gdb_command(7, tmp_path / 'a"b', {"mmap": 1, "Py_AddPendingCall": 2, "PyRun_SimpleString": 3})
    assert words[:3] == ["gdb", "-nx", "-batch"] and "set auto-load off" in words and "set auto-solib-add off" in words
    (text,) = (word for word in words if word.startswith("set {char["))
    body = text.split(' = "')[1][:-1]
    assert set(body) <= set("\\01234567"), "every letter of the path is an octal escape"
    assert bytes(int(code, 8) for code in body.split("\\")[1:]).decode() == routes.statement(tmp_path / 'a"b')
    assert words.index("file /proc/7/exe") < words.index("attach 7"), "symbols are read before the process is stopped"


@pytest.mark.parametrize("python", [sys.executable, *map(str, Path.home().glob(".pyenv/versions/3.9.*/bin/python"))])
def test_the_runtime_is_compiled_before_the_server_loads_it(tmp_path: Path, python: str) -> None:
    sources = Path(runtime.__file__).parent
    link = Link("one", tmp_path)
    routes.prepare(link, 7, python)
    # Text that does not even parse shows which of the two is loaded.
    for path in (tmp_path / "runtime").glob("*.py"):
        path.write_text("(")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import runtime.process as p; print(p.__file__)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env={})
    assert done.stdout == f"{tmp_path / 'runtime' / 'process.py'}\n", done.stderr
    assert not list(sources.glob("*.new")) and bytecode.compiled("/no/such/python", sources) == {}
    for path in tmp_path.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
