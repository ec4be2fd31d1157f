"""The environment of a running process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specmeter.source.process import inspect
from specmeter.source.pyfile import SourceError


@pytest.fixture
def server(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    script = tmp_path / "server.py"
    script.write_text("import sys\nprint('up', flush=True)\nsys.stdin.read()\n")
    env = {**os.environ, "PYTHONPATH": "/some/where"}
    process = subprocess.Popen(
        [sys.executable, "-u", "server.py"], cwd=tmp_path, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdin is not None
    process.stdout.readline()
    yield process
    process.stdin.close()
    process.wait()
    process.stdout.close()


def test_interpreter_of_the_virtual_environment_and_search_path(
    server: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    found = inspect(server.pid)
    # /proc/PID/exe leads out of a virtual environment; the command says which one it was.
    assert found.python == sys.executable
    assert (found.cwd, found.script) == (str(tmp_path), str(tmp_path / "server.py"))
    assert found.first == (str(tmp_path),)
    assert found.env["PYTHONPATH"] == "/some/where"


def test_gone(server: subprocess.Popen[bytes]) -> None:
    assert server.stdin is not None
    server.stdin.close()
    server.wait()
    with pytest.raises(SourceError, match="there is no process"):
        inspect(server.pid)


def test_no_python() -> None:
    sleeper = subprocess.Popen(["sleep", "30"])
    try:
        with pytest.raises(SourceError, match="is no Python"):
            inspect(sleeper.pid)
    finally:
        sleeper.kill()
        sleeper.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_process(server: subprocess.Popen[bytes]) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        try:
            inspect(server.pid)
            reason = "it was read"
        except SourceError as error:
            reason = error.reason
        os.write(writing, reason.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as stream:
        assert "belongs to another user" in stream.read()
    os.waitpid(child, 0)
