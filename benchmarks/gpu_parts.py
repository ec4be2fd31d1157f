"""Runs a long measurement in parts that survive the end of a call: what is done stays done, what hangs is ended.

    PARTS = (Part("unpack", unpack, 120.0), Part("tp4", measure_tp4, 300.0, needs=("unpack",)))
    sys.exit(run_parts(PARTS, work, budget_s=540.0, closing=save))

A machine is lent for minutes at a time, so a call may be cut off anywhere. Each part runs in a process of its own and
is given WORK/results/NAME; when it returns, WORK/done/NAME.json is written (atomically), and a later call goes on with
the next part. A part that is not done is run again from its beginning, at most ``ATTEMPTS`` times in all. At a part's
limit, or at the end of the call's budget, it is ended with everything that it started, also what went into sessions of
its own. WORK/parts.jsonl has a line for each attempt, WORK/logs/NAME.log what the part printed.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from specmeter.engines.guardian import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, descendants, prctl

ATTEMPTS = 3
# Exit codes of a call: everything is done, a part failed for good, call again (EX_TEMPFAIL of sysexits.h).
ALL_DONE, FAILED, MORE = 0, 1, 75
# Time kept back for closing and for ending what a part left behind.
CLOSING_S = 20.0
_GRACE_S = 5.0
_SHOWN_LINES = 15
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Part:
    """A step of a measurement. ``run`` gets its results folder, WORK/results/NAME, which keeps what earlier attempts
    left there, and raises where it failed; ``limit_s`` is the longest it may take, in seconds. It is run only when
    all parts that it ``needs`` are done."""

    name: str
    run: Callable[[Path], None]
    limit_s: float
    needs: tuple[str, ...] = ()


def run_parts(parts: Sequence[Part], work: Path, budget_s: float, closing: Callable[[Path], None] | None = None) -> int:
    """Run what is not done yet, for at most ``budget_s`` seconds; gives ALL_DONE, FAILED or MORE.

    MORE: what is left did not fit, or failed and has attempts left. ``closing`` is called with ``work`` at the end of
    every call, whatever happened, to save what there is. Raises ValueError for parts that cannot be run in order or do
    not fit into a call, and RuntimeError while another call runs in ``work``.
    """
    _check(parts, budget_s - CLOSING_S)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    end = time.monotonic() + budget_s
    for folder in ("done", "logs", "results"):
        (work / folder).mkdir(parents=True, exist_ok=True)
    with _alone(work), _ended_by_signals():
        try:
            for part in parts:
                if _wanted(part, work) and not _attempt(part, work, end - CLOSING_S):
                    break
        finally:
            if closing is not None:
                rest = max(CLOSING_S / 2, end - time.monotonic() - _GRACE_S)
                _report("closing", _in_process(lambda: closing(work), work / "logs" / "closing.log", rest), work)
        return _outcome(parts, work)


def is_done(name: str, work: Path) -> bool:
    """Whether a part has been done, in this call or an earlier one."""
    return (work / "done" / f"{name}.json").is_file()


def attempts(name: str, work: Path) -> int:
    """How often a part was begun; one that was cut off with its call counts."""
    try:
        lines = (work / "parts.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return 0
    begun = json.dumps({"begun": name})[:-1]
    return sum(line.startswith(f"{begun},") for line in lines)


def _check(parts: Sequence[Part], longest_s: float) -> None:
    seen: set[str] = set()
    for part in parts:
        if part.name in seen or not part.name or not all(c.isalnum() or c in "-_." for c in part.name):
            raise ValueError(f"part {part.name!r}: names are unique and made of letters, digits, '-', '_' and '.'")
        if missing := set(part.needs) - seen:
            raise ValueError(f"part {part.name!r} needs {sorted(missing)}, which no part before it is")
        if part.limit_s > longest_s:
            raise ValueError(f"part {part.name!r}: {part.limit_s:g} s never fit into a call, {longest_s:g} s do")
        seen.add(part.name)


def _wanted(part: Part, work: Path) -> bool:
    if is_done(part.name, work):
        return False
    if missing := [name for name in part.needs if not is_done(name, work)]:
        print(f"{part.name}: left out, {', '.join(missing)} not done", flush=True)
        return False
    if attempts(part.name, work) >= ATTEMPTS:
        print(f"{part.name}: given up after {ATTEMPTS} attempts", flush=True)
        return False
    return True


def _attempt(part: Part, work: Path, end: float) -> bool:
    """One attempt; False where the call's time is over, before it or during it.

    A part is begun only if its whole limit fits: one cut off by the end of the call would be run again from its start.
    """
    rest = end - time.monotonic()
    if rest < part.limit_s:
        print(f"{part.name}: {part.limit_s:.0f} s do not fit into the {max(rest, 0):.0f} s left", flush=True)
        return False
    results = work / "results" / part.name
    results.mkdir(exist_ok=True)
    _write(work, {"begun": part.name, "unix_s": time.time()})
    print(f"{part.name}: begins", flush=True)
    began = time.monotonic()
    error = _in_process(lambda: part.run(results), work / "logs" / f"{part.name}.log", part.limit_s)
    _report(part.name, error, work, time.monotonic() - began)
    return True


def _report(name: str, error: str, work: Path, seconds: float = 0.0) -> None:
    _write(work, {"ended": name, "seconds": round(seconds, 3), "error": error})
    if not error:
        if name != "closing":
            new = work / "done" / f".{name}.new"
            new.write_text(json.dumps({"name": name, "seconds": round(seconds, 3), "unix_s": time.time()}) + "\n")
            new.replace(work / "done" / f"{name}.json")
            print(f"{name}: done in {seconds:.1f} s", flush=True)
        return
    print(f"{name}: failed, {error}; the end of its log:", flush=True)
    with suppress(OSError):
        lines = (work / "logs" / f"{name}.log").read_text(errors="replace").splitlines()
        print("\n".join(f"    {line}" for line in lines[-_SHOWN_LINES:]), flush=True)


def _in_process(run: Callable[[], None], log: Path, limit_s: float) -> str:
    """Run in a forked process with its output in ``log``; nothing where it went well, else what went wrong."""
    sys.stdout.flush()
    sys.stderr.flush()
    # A signal between the fork and the child's own handlers would close the call a second time, in the child.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    child = os.fork()
    if child == 0:
        _child(run, log)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
    status = None
    try:
        deadline = time.monotonic() + limit_s
        while (status := _waited(child)) is None and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        left = _end_descendants()
    if status is None:
        return f"ended after its limit of {limit_s:.0f} s"
    if status != 0:
        return f"exit {status}" if status > 0 else f"ended by signal {-status}"
    if left:
        print(f"    ended {left} processes that it left behind", flush=True)
    return ""


def _child(run: Callable[[], None], log: Path) -> None:
    """Never returns."""
    code = 1
    try:
        for number in _ENDING:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        to = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(to, 1)
        os.dup2(to, 2)
        run()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1 if error.code else 0
        if isinstance(error.code, str):
            print(error.code, flush=True)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)


def _waited(child: int) -> int | None:
    """The child's exit code (negative: a signal) once it has ended; orphans that have ended are collected too."""
    status = None
    with suppress(ChildProcessError):
        while True:
            pid, raw = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                status = os.waitstatus_to_exitcode(raw)
    return status


def _end_descendants() -> int:
    """End everything below this process, politely first; how many there were."""
    me = os.getpid()
    found = descendants(me)
    for number, patience in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, 30.0)):
        deadline = time.monotonic() + patience
        for pid in descendants(me):
            with suppress(OSError):
                os.kill(pid, number)
        while (left := descendants(me)) and time.monotonic() < deadline:
            _waited(-1)
            if number == signal.SIGKILL:
                for pid in left:
                    with suppress(OSError):
                        os.kill(pid, number)
            time.sleep(0.02)
    _waited(-1)
    return len(found)


def _outcome(parts: Sequence[Part], work: Path) -> int:
    left = [part for part in parts if not is_done(part.name, work)]
    if not left:
        print("all parts are done", flush=True)
        return ALL_DONE
    given_up = {part.name for part in left if attempts(part.name, work) >= ATTEMPTS}
    for part in left:
        if given_up & set(part.needs):
            given_up.add(part.name)
    print(f"left: {', '.join(part.name for part in left)}", flush=True)
    return FAILED if given_up == {part.name for part in left} else MORE


def _write(work: Path, entry: dict[str, Any]) -> None:
    with (work / "parts.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")


@contextmanager
def _alone(work: Path) -> Iterator[None]:
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"another call runs in {work}") from None
        yield


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end a call as Ctrl-C does: parts are ended, closing is done."""

    def ended(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    old = {number: signal.signal(number, ended) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
