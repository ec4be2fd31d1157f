"""The ways into a running process, in the order in which they are tried."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import specmeter.runtime
from specmeter.attach import bytecode, elf, obstacles
from specmeter.attach.obstacles import Facts, Obstacle
from specmeter.control.link import Link, links, write_private
from specmeter.control.processes import processes
from specmeter.runtime.ring import start_ticks
from specmeter.source.process import Process

ROUTES = ("remote-exec", "gdb")
_PYTHON_FILES = r"^(lib)?python3"
_LIBC_FILES = r"^(libc[.-]|ld-musl)"
_CALLS = {"Py_AddPendingCall", "PyRun_SimpleString"}


@dataclass(frozen=True)
class Closed:
    """A route that cannot be taken."""

    route: str
    obstacle: Obstacle


def carried(pid: int, base: Path | None = None) -> Link | None:
    """The link whose runtime the process carries already, as far as this user's links tell."""
    start = start_ticks(pid)
    for link in links(base):
        for process in processes(link, alive_only=True):
            if (process.pid, process.start) == (pid, start) and not process.report.get("detached"):
                return link
    return None


def prepare(link: Link, pid: int, python: str | None = None) -> tuple[Path, Path]:
    """Write what the process is to run into the link; gives that file, and the one that it will answer in.

    ``python``: the process's interpreter, to compile the runtime beforehand.
    """
    answer = link.path / f"attach-{pid}"
    program = link.path / "attach.py"
    starter = link.path / "attach-start.py"
    answer.unlink(missing_ok=True)
    folder = link.path / "runtime"  # a copy: specmeter may be gone, or another one, before the process has ended
    folder.mkdir(mode=0o700, exist_ok=True)
    sources = Path(specmeter.runtime.__file__).parent
    for path in sources.glob("*.py"):
        write_private(folder / path.name, path.read_bytes())
    cache = folder / "__pycache__"
    cache.mkdir(mode=0o700, exist_ok=True)
    for name, data in (bytecode.compiled(python, sources) if python else {}).items():
        write_private(cache / name, data)
    constants = f"LINK, FOLDER, ANSWER = {str(link.path)!a}, {str(folder)!a}, {str(answer)!a}\n"
    text = (Path(__file__).parent / "inject.py").read_text().replace('LINK = FOLDER = ANSWER = ""\n', constants)
    write_private(program, text.encode())
    write_private(starter, statement(program).encode())
    return starter, answer


def statement(program: Path) -> str:
    """Python statements, ASCII only, that run ``program`` in a namespace of its own and never raise."""
    path = ascii(str(program))
    return (
        "try:\n"
        f"    (lambda file: (exec(file.read(), {{'__file__': file.name}}), file.close()))(open({path}))\n"
        "except BaseException:\n"
        "    pass\n"
    )


def closed_remote_exec(process: Process, version: tuple[int, int], facts: Facts) -> Obstacle | None:
    """Why ``sys.remote_exec`` cannot be used, or None. The process's own interpreter calls it, so versions match."""
    has = version >= (3, 14) and _has_remote_exec(process.python)
    return obstacles.for_remote_exec(version, process.argv, process.env, has) or obstacles.for_ptrace(facts)


def closed_gdb(version: tuple[int, int], facts: Facts) -> Obstacle | None:
    """Why gdb cannot be used, or None."""
    obstacle = obstacles.for_ptrace(facts)
    if obstacle is not None:
        return obstacle
    found = _addresses(facts.pid)
    return obstacles.for_gdb(version, set(found), {*_CALLS, "mmap"})


def by_remote_exec(process: Process, starter: Path) -> Obstacle | None:
    """Have the process run ``starter`` at its next safe point (PEP 768); what failed, or None."""
    code = "import sys; sys.remote_exec(int(sys.argv[1]), sys.argv[2])"
    done = _run([process.python, "-I", "-c", code, str(process.pid), str(starter)])
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return Obstacle(f"sys.remote_exec failed: {lines[-1] if lines else done.returncode}", "Try --how gdb.")


def by_gdb(pid: int, program: Path) -> Obstacle | None:
    """Queue a pending call that runs ``program``; what failed, or None.

    The process is stopped wherever it is, so nothing that takes a lock or allocates may be called: the text lies in a
    fresh page from ``mmap``, and ``Py_AddPendingCall`` has the interpreter run it at its next safe point.
    """
    done = _run(gdb_command(pid, program, _addresses(pid)))
    if re.search(r"^\$\d+ = 0$", done.stdout, re.MULTILINE):
        return None
    if "ptrace: Operation not permitted" in done.stdout + done.stderr:
        why = "the kernel refused ptrace: a seccomp filter or a security module"
        return Obstacle(why, "docker run --cap-add SYS_PTRACE --security-opt seccomp=unconfined.")
    said = re.search(r"^(ptrace: .*|The program being debugged .*|.*[Tt]imed out.*)$", done.stderr, re.MULTILINE)
    last = done.stderr.strip().rpartition("\n")[2]
    why = said.group(0) if said else last or "no answer"
    return Obstacle(f"gdb did not get through: {why.rstrip('.')}", "Try again, or use `patch`.")


def gdb_command(pid: int, program: Path, addresses: dict[str, int]) -> list[str]:
    """The command line of gdb: no file of the user or the program is read, no library's symbols are loaded."""
    text = "".join(f"\\{ord(letter):03o}" for letter in statement(program))
    size = len(statement(program)) + 1
    map_page = f"((void *(*)(void *, unsigned long, int, int, int, long)) {addresses['mmap']})"
    call = f"((int (*)(void *, void *)) {addresses['Py_AddPendingCall']})"
    # No library is looked for (with PyTorch some 200 are mapped) and gdb's own Python part is not loaded, so both are
    # sought where nothing can ever be: 44 ms of processor time in place of 100.
    nowhere = f"/proc/{pid}/nowhere"
    before = ["auto-solib-add off", "auto-load off", "debuginfod enabled off", "confirm off", "width 0"]
    before += [f"sysroot {nowhere}", "unwindonsignal on"]
    # A signal for the server must not end the calls below half way: it gets it as if nobody was there.
    commands = [
        "handle all nostop noprint pass",
        "handle SIGINT nostop noprint pass",
        "handle SIGSEGV SIGBUS SIGILL SIGFPE stop",
        f"attach {pid}",
        f"set $page = {map_page}(0, {-(-size // 4096) * 4096}, 3, 0x22, -1, 0)",
        f'set {{char[{size}]}} $page = "{text}"',
        f"print {call}((void *) {addresses['PyRun_SimpleString']}, $page)",
        "detach",
    ]
    # Debug information would be read while the process is stopped (0.4 s of a Python built with -g).
    words = ["gdb", "-nx", "-batch", "--readnever", "--data-directory", nowhere]
    for option in before:
        words += ["-iex", f"set {option}"]
    # The program is named here, so that its symbols are read before the process is stopped.
    words += ["-ex", f"file /proc/{pid}/exe"]
    for command in commands:
        words += ["-ex", command]
    return words


def wait_for_answer(answer: Path, timeout_s: float) -> str | None:
    """What the process answered: empty when the runtime is there, else why not; None when it did not answer in time."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if answer.exists():
            return answer.read_text()
        time.sleep(0.002)
    return None


def version_of(python: str) -> tuple[int, int] | None:
    """The version of an interpreter, or None when it does not run."""
    done = _run([python, "-I", "-S", "-c", "import sys; print(*sys.version_info[:2])"])
    words = done.stdout.split()
    return (int(words[0]), int(words[1])) if done.returncode == 0 and len(words) == 2 else None


def _has_remote_exec(python: str) -> bool:
    code = "import sys; sys.exit(not (hasattr(sys, 'remote_exec') and sys.is_remote_debug_enabled()))"
    return _run([python, "-I", "-S", "-c", code]).returncode == 0


def _addresses(pid: int) -> dict[str, int]:
    try:
        return {**elf.find(pid, _CALLS, _PYTHON_FILES), **elf.find(pid, {"mmap"}, _LIBC_FILES)}
    except OSError:
        return {}


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "SPECMETER_LINK"}
    try:
        return subprocess.run(
            list(command),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            stdin=subprocess.DEVNULL,
            env=env,
            start_new_session=True,  # an interrupt from the keyboard must not end gdb in the middle of a call
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(list(command), 127, "", str(error))
