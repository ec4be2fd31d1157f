"""Starts one server in a session of its own and makes sure that nothing of it outlives the caller.

Run as a script (``python -I -S guardian.py LOG -- COMMAND...``), so it uses the standard library alone. Its standard
input is the caller's control line: ``stop SECONDS`` asks politely and kills after that many seconds, ``kill`` does not
ask, and end of file (the caller is gone, however it died) means ``stop 3``. Its standard output says
``started PID``, ``failed ERRNO TEXT`` or ``exited CODE`` (negative: the signal that ended the server).

A process group alone is not enough: servers start workers that make groups or sessions of their own, or that are
orphaned when their parent dies first. The guardian is therefore a child subreaper (prctl(2)): every descendant stays
in its tree, and the stop walks that tree.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
GONE_CALLER_GRACE_S = 3.0


def prctl(option: int, value: int) -> None:
    """prctl(2) with one argument; where the system has none, nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(1, text.encode("utf-8", "replace") + b"\n")


def _parents() -> dict[int, int]:
    """PID -> parent's PID of every process that can be read, zombies left out."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            after_name = (entry / "stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            continue
        if after_name[0] not in (b"Z", b"X"):
            parents[int(entry.name)] = int(after_name[1])
    return parents


def descendants(root: int) -> list[int]:
    """The living descendants of process ``root``, deepest last."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents().items():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    queue = [root]
    while queue:
        queue = [child for pid in queue for child in children.get(pid, [])]
        found.extend(queue)
    return found


def _signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)


class Guardian:
    """One server: started, watched, and ended together with everything that it started."""

    def __init__(self, command: list[str], log_path: Path) -> None:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        with log_path.open("ab", buffering=0) as log:
            self.child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        self.exit_code: int | None = None
        self.buffer = b""

    def watch(self) -> None:
        """Block until the server has ended, obeying the control line; then end what it left behind."""
        try:
            watched = os.pidfd_open(self.child.pid)
        except (AttributeError, OSError):
            watched = -1
        while not self._reap():
            fds = [0, watched] if watched >= 0 else [0]
            ready = select.select(fds, [], [], None if watched >= 0 else 0.2)[0]
            if 0 in ready:
                grace = self._order()
                if grace is not None:
                    self._end(grace)
                    break
        self._end(0.0)

    def _order(self) -> float | None:
        """Seconds of grace if the caller ordered a stop, else None."""
        data = os.read(0, 4096)
        if not data:
            return GONE_CALLER_GRACE_S
        self.buffer += data
        *lines, self.buffer = self.buffer.split(b"\n")
        for line in lines:
            words = line.split()
            if words[:1] == [b"stop"]:
                return float(words[1]) if len(words) > 1 else GONE_CALLER_GRACE_S
            if words[:1] == [b"kill"]:
                return 0.0
        return None

    def _reap(self) -> bool:
        """Collect ended children, the orphans included; True once the server itself has ended."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return self.exit_code is not None
            if pid == self.child.pid:
                self.exit_code = os.waitstatus_to_exitcode(status)

    def _end(self, grace_s: float) -> None:
        """TERM and a wait of ``grace_s`` (unless it is 0), then KILL until no descendant is left."""
        me = os.getpid()
        if grace_s > 0:
            with contextlib.suppress(OSError):
                os.killpg(self.child.pid, signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while time.monotonic() < deadline:
                self._reap()
                if not descendants(me) or self._told_to_kill():
                    break
                time.sleep(0.02)
        deadline = time.monotonic() + 30
        while (left := descendants(me)) and time.monotonic() < deadline:
            _signal_all(left, signal.SIGKILL)
            time.sleep(0.01)
            self._reap()
        self._reap()

    def _told_to_kill(self) -> bool:
        if not select.select([0], [], [], 0)[0]:
            return False
        data = os.read(0, 4096)
        # A caller that is gone by now keeps the grace already granted.
        return b"kill" in data


def main(arguments: list[str]) -> int:
    """Run the guardian; ``arguments`` are LOG, ``--``, and the server's command."""
    log_path, command = Path(arguments[0]), arguments[2:]
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    try:
        guardian = Guardian(command, log_path)
    except OSError as error:
        _say(f"failed {error.errno or 0} {error.strerror}")
        return 1

    def ordered(number: int, frame: object) -> None:
        raise SystemExit

    signal.signal(signal.SIGTERM, ordered)
    _say(f"started {guardian.child.pid}")
    try:
        guardian.watch()
    finally:
        guardian._end(0.0 if guardian.exit_code is not None else GONE_CALLER_GRACE_S)
    _say(f"exited {guardian.exit_code if guardian.exit_code is not None else -9}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
