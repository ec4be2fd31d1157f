"""A server's process: started under a guardian, its log kept, and stopped surely."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from specmeter.engines.causes import cause_in_log, log_tail
from specmeter.errors import Exit, SpecmeterError
from specmeter.trace.masking import mask_file, secrets_of

STOP_GRACE_S = 10.0


def free_port() -> int:
    """A loopback TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def port_is_taken(port: int, host: str = "127.0.0.1") -> bool:
    """True if something listens on ``host:port`` already; a ``host`` that is not ours is the server's to refuse."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error.errno in (errno.EADDRINUSE, errno.EACCES)
        except OverflowError:
            return False  # no port at all, which the server will say
    return False


class ServerProcess:
    """One running server command and everything it starts.

    ``pid`` is the server's own process. The server lives in a session of its own, so a Ctrl-C in the terminal reaches
    us only; it ends when ``stop`` is called or when this process ends in whatever way. Secrets that its command line or
    environment holds are masked in what we print of its log, and in the log itself once it has ended.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log_path: Path) -> None:
        """Start ``command`` with exactly ``env`` as its environment; raises SpecmeterError if it cannot be run."""
        if shutil.which(command[0], path=env.get("PATH", os.defpath)) is None:
            raise SpecmeterError(
                f"The server's command was not found: {command[0]}",
                "No such file on PATH, or it is not executable.",
                "Give the full path, or run specmeter in the server's environment.",
                Exit.USAGE,
            )
        self.command = tuple(command)
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        self._secrets = secrets_of(command, env)
        self.exit_code: int | None = None
        self._buffer = b""
        self._guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("guardian.py")), str(log_path), "--", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(env),
            start_new_session=True,
        )
        self.pid = self._wait_started()

    def _wait_started(self) -> int:
        line = self._next_line(60.0)  # a starting machine may be busy
        if line is not None and line.startswith("started "):
            return int(line.split()[1])
        reason = line.split(" ", 2)[2] if line is not None and line.startswith("failed ") else "no answer"
        self._guardian.kill()
        self._guardian.wait()
        raise SpecmeterError(f"The server's command could not be started: {self.command[0]}", reason, exit=Exit.USAGE)

    def _next_line(self, timeout_s: float) -> str | None:
        """The guardian's next status line, or None if none comes within ``timeout_s`` or it has ended."""
        assert self._guardian.stdout is not None
        fd = self._guardian.stdout.fileno()
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return None
            data = os.read(fd, 4096)
            if not data:
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode("utf-8", "replace")

    def poll(self) -> int | None:
        """The server's exit code if it has ended (negative: the signal), else None."""
        if self.exit_code is None:
            line = self._next_line(0.0)
            if line is not None and line.startswith("exited "):
                self.exit_code = int(line.split()[1])
            elif self._guardian.poll() is not None:
                self.exit_code = -signal.SIGKILL
        return self.exit_code

    def failure(self, what: str) -> SpecmeterError:
        """An error (exit 4) that says ``what`` failed and gives the log's cause."""
        cause = cause_in_log(self.log_path, self.exit_code, self._secrets)
        return SpecmeterError(what, cause, f"The whole log: {self.log_path}", Exit.SERVER_FAILED)

    def last_line(self) -> str:
        """The last line of the log, empty if there is none."""
        return "".join(log_tail(self.log_path, 1, self._secrets))

    def stop(self, grace_s: float = STOP_GRACE_S) -> int | None:
        """End the server and all it started; returns the exit code. A Ctrl-C meanwhile kills without more waiting."""
        with _interrupts_become(lambda: self._order(b"kill\n")):
            self._order(f"stop {grace_s}\n".encode())
            deadline = time.monotonic() + grace_s + 35.0
            while self._guardian.poll() is None and time.monotonic() < deadline:
                if self.poll() is None:
                    time.sleep(0.02)
                else:
                    self._guardian.wait(timeout=30.0)
            self.poll()
            with contextlib.suppress(OSError, ValueError):
                self._guardian.stdin.close()  # type: ignore[union-attr]
            if self._guardian.stdout is not None:
                self._guardian.stdout.close()
            mask_file(self.log_path, self._secrets)
        return self.exit_code

    def kill(self) -> None:
        """Kill the server itself; the guardian ends what it started."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGKILL)

    def _order(self, line: bytes) -> None:
        stdin = self._guardian.stdin
        if stdin is not None and not stdin.closed:
            with contextlib.suppress(OSError):
                os.write(stdin.fileno(), line)


@contextlib.contextmanager
def _interrupts_become(action: object) -> Iterator[None]:
    """While inside, SIGINT and SIGTERM call ``action`` and are raised as KeyboardInterrupt only at the end."""
    pending: list[int] = []

    def note(number: int, frame: object) -> None:
        pending.append(number)
        action()  # type: ignore[operator]

    try:
        old = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:
        # Not the main thread: signals are not delivered here anyway.
        yield
        return
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    if pending:
        raise KeyboardInterrupt
