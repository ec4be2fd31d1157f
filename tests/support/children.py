"""Real server processes for the tests of the runtime."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specmeter.control import Link, Process, launch_env, processes

WAIT_S = 60.0  # what is waited for comes in a moment, unless the machine is very busy


def environment(link: Link | None, *paths: Path, **extra: str) -> dict[str, str]:
    """A clean environment with ``paths`` importable, and the launch route's variables when there is a link."""
    keep = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "LANG") if name in os.environ}
    env = {**keep, "PYTHONPATH": os.pathsep.join(map(str, paths)), **extra}
    return launch_env(link, env) if link is not None else env


def run_python(
    code: str, env: dict[str, str], python: str = sys.executable, options: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` to its end."""
    return subprocess.run(
        [python, *options, "-c", code], env=env, capture_output=True, text=True, timeout=120, start_new_session=True
    )


@contextmanager
def running(code: str, env: dict[str, str], python: str = sys.executable) -> Iterator[subprocess.Popen[str]]:
    """Run ``code`` in the background, its group killed at the end. It reads commands from standard input, if any."""
    child = subprocess.Popen(
        [python, "-u", "-c", code],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield child
    finally:
        try:
            os.killpg(child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        child.communicate()


def until(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    """Wait for a true value of ``condition`` and give it."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


def only_process(link: Link) -> Process:
    """The one process of a link."""
    found = processes(link)
    assert len(found) == 1, [process.report for process in found]
    return found[0]


def ask(child: subprocess.Popen[str], line: str) -> str:
    """Send a line to a child's standard input and read one line of its output."""
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(line + "\n")
    child.stdin.flush()
    return child.stdout.readline().strip()
