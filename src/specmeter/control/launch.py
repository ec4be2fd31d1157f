"""Starts a server with a link, and says why a runtime did not come up."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

import specmeter.runtime
from specmeter.control.link import Link
from specmeter.control.processes import processes
from specmeter.control.signals import TERMINATING
from specmeter.errors import Exit, SpecmeterError
from specmeter.source.process import started_first

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# How long a server's workers may take to follow it, and again after they were told. vLLM's end within a second.
GOING_S = 3.0


def site_folder() -> Path:
    """The folder that goes first on PYTHONPATH; it holds nothing but our ``sitecustomize``."""
    return Path(specmeter.runtime.__file__).parent / "site"


def launch_env(link: Link, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment ``env`` (default: this process's) with the two variables of the launch route set."""
    merged = dict(os.environ if env is None else env)
    merged.update(link_variables(link, merged.get("PYTHONPATH")))
    return merged


def link_variables(link: Link, pythonpath: str | None = None) -> dict[str, str]:
    """SPECMETER_LINK and PYTHONPATH; an existing PYTHONPATH follows ours."""
    site = str(site_folder())
    rest = [entry for entry in (pythonpath or "").split(os.pathsep) if entry and entry != site]
    return {"SPECMETER_LINK": str(link.path), "PYTHONPATH": os.pathsep.join([site, *rest])}


def interpreter_of(command: Sequence[str], env: Mapping[str, str] | None = None) -> Path:
    """The Python that ``command`` will run: itself, or the one its console script names in the first line.

    Raises SpecmeterError when the program is missing or is no Python.
    """
    if not command:
        raise SpecmeterError("There is no command to run", next_step="Give it after `--`: specmeter run -- CMD.")
    found = shutil.which(command[0], path=(env or os.environ).get("PATH"))
    if found is None:
        why = "It is neither a program on PATH nor an executable file."
        if Path(command[0]).is_symlink():
            why = f"It is a symbolic link to {Path(command[0]).readlink()}, which is not there."
        raise SpecmeterError(f"{command[0]} is not there", why, "Give the command as it starts the server by itself.")
    words = list(command)
    if Path(found).name == "env":
        return interpreter_of(behind_env(words)[1], env)
    if Path(found).name.startswith(("python", "pypy")):
        return Path(found)
    interpreter = _shebang(Path(found), env)
    if interpreter is None:
        raise SpecmeterError(
            f"{found} is not a Python program",
            "It is neither an interpreter nor a script whose first line names one.",
            "Name the server's interpreter with --python.",
        )
    return interpreter


def first_on_path(command: Sequence[str], env: Mapping[str, str], cwd: str) -> tuple[str, ...]:
    """The folders that the Python of ``command`` puts before its search path when it is started in ``cwd``.

    Those of its script, ``-m`` or ``-c``, of a console script its own folder; none where the command is no Python.
    """
    words, variables = list(command), dict(env)
    if words and Path(words[0]).name == "env":
        set_there, rest = behind_env(words)
        return first_on_path(rest, {**variables, **set_there}, cwd)
    if words and not Path(words[0]).name.startswith(("python", "pypy")):
        found = shutil.which(words[0], path=variables.get("PATH"))
        line = _shebang_words(Path(found)) if found else []
        if line and Path(line[0]).name == "env":
            line = [word for word in line[1:] if word != "-S"]
        if not line or "py" not in Path(line[0]).name:
            return ()
        words = [*line, str(found), *words[1:]]
    return started_first(words, cwd, variables)[1] if words else ()


def behind_env(command: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The variables that ``env ...`` sets, and the command that it runs; its own options are left out."""
    words, variables = list(command[1:]), dict[str, str]()
    while words and (words[0].startswith("-") or "=" in words[0]):
        word = words.pop(0)
        if not word.startswith("-"):
            name, _, variables[name] = word.partition("=")
        elif word in ("-u", "--unset", "-C", "--chdir") and words:
            words.pop(0)
    return variables, words


def launch(command: Sequence[str], link: Link, env: Mapping[str, str] | None = None) -> int:
    """Run ``command`` with the link until it ends, passing signals on; returns its exit code (128 + N for signal N).

    After a terminating signal, processes of the link that outlive their server get it too, as after Ctrl-C, which the
    terminal sends to all of them. Raises SpecmeterError when the command cannot be started.
    """
    child: subprocess.Popen[bytes] | None = None
    came: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        came.append(number)
        # The terminal sends Ctrl-C to the whole foreground group already.
        if child and (number != signal.SIGINT or os.getpgid(child.pid) != os.getpgrp() or not os.isatty(0)):
            child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in FORWARDED}
    try:
        child = _started(command, launch_env(link, env))
        for number in came[:]:  # those that came before there was a child
            child.send_signal(number)
        code = child.wait()
        ending = [number for number in came if number in TERMINATING]
        if ending:
            _end_the_rest(link, ending[-1])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _started(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(list(command), env=dict(env))
    except OSError as error:
        raise SpecmeterError(f"{command[0]} cannot be started", str(error.strerror), exit=Exit.SERVER_FAILED) from error


def _end_the_rest(link: Link, number: int) -> None:
    """Wait for the link's processes; those that do not go by themselves get the signal."""
    for told in (False, True):
        until = time.monotonic() + GOING_S
        while (rest := processes(link, alive_only=True)) and time.monotonic() < until:
            time.sleep(0.02)
        for process in [] if told else rest:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, number)


def why_not_up(command: Sequence[str], env: Mapping[str, str] | None = None) -> str | None:
    """Why no process of ``command`` can load the runtime, as far as its command line and environment tell."""
    for word in _interpreter_options(command):
        letters = "" if word.startswith("--") else word[1:]
        for letter, reason in (("I", "isolated mode"), ("E", "PYTHON* variables off"), ("S", "no site module")):
            if letter in letters:
                return f"`{word}` starts Python with {reason}, so it never loads the runtime's sitecustomize."
    if (env or os.environ).get("PYTHONSAFEPATH") and not (env or os.environ).get("PYTHONPATH"):
        return None
    return None


def _interpreter_options(command: Sequence[str]) -> list[str]:
    """The options that go to the interpreter itself (up to the script, -c or -m)."""
    words = list(command)
    if words and Path(words[0]).name == "env":
        words = behind_env(words)[1]
    options: list[str] = []
    if words and not Path(words[0]).name.startswith("python"):
        found = shutil.which(words[0])
        words = _shebang_words(Path(found)) if found else []
    skip = False
    for word in words[1:]:
        if skip:
            skip = False
            continue
        if not word.startswith("-") or word in ("-", "--"):
            break
        flag = word.lstrip("-")
        head = flag.split("c")[0].split("m")[0] if not word.startswith("--") else flag
        options.append(f"-{head}" if head != flag and not word.startswith("--") else word)
        if head != flag and not word.startswith("--"):
            break
        skip = word in ("-W", "-X", "--check-hash-based-pycs")
    return options


def _shebang(path: Path, env: Mapping[str, str] | None) -> Path | None:
    words = _shebang_words(path)
    if not words:
        return None
    if Path(words[0]).name == "env":
        rest = behind_env(words)[1]
        found = shutil.which(rest[0], path=(env or os.environ).get("PATH")) if rest else None
    else:
        found = words[0] if Path(words[0]).exists() else None
    return Path(found) if found and "py" in Path(found).name else None


def _shebang_words(path: Path) -> list[str]:
    """The interpreter line of a script as words; long paths come as a shell trampoline (``exec "PYTHON" "$0"``)."""
    try:
        with path.open("rb") as file:
            head = file.read(4096).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    if not head or not head[0].startswith("#!"):
        return []
    words = head[0][2:].split()
    if words and Path(words[0]).name in ("sh", "bash") and len(head) > 1 and "exec" in head[1]:
        inner = head[1].split("exec", 1)[1].replace("'''", " ").replace("'", " ").replace('"', " ").split()
        return [inner[0]] if inner and inner[0].startswith("/") else []
    return words
