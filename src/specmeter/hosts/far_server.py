"""A server on the far side: under the same guardian as one here, its log sent as it grows. Standard library of 3.9."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import specmeter
from specmeter.errors import Exit, SpecmeterError

LOG_TICK_S = 0.25
_LOG_PIECE = 65536
_KILL_WAIT_S = 35.0
Send = Callable[[dict[str, Any], bytes], None]


class FarServer:
    """One server command and all it starts. ``send`` gets ``log`` and ``exited`` events; ``pid`` is the server's."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, send: Send, number: int) -> None:
        if shutil.which(command[0], path=env.get("PATH", os.defpath)) is None:
            raise SpecmeterError(
                f"The server's command was not found there: {command[0]}",
                "No such file on PATH there, or it is not executable.",
                "Give the full path on that host.",
            )
        self._log, self._send, self._number = log, send, number
        self._sent = 0
        os.close(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600))
        guardian = Path(specmeter.__file__).parent / "engines" / "guardian.py"
        self._guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", str(guardian), str(log), "--", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(env),
            start_new_session=True,
        )
        assert self._guardian.stdout is not None
        line = self._guardian.stdout.readline().decode("utf-8", "replace")
        if not line.startswith("started "):
            self._guardian.kill()
            self._guardian.wait()
            raise SpecmeterError(f"The server's command could not be started there: {command[0]}", line.strip())
        self.pid = int(line.split()[1])
        self._ended = threading.Event()
        self.exit_code: int | None = None
        threading.Thread(target=self._watch, daemon=True).start()

    def stop(self, grace_s: float) -> int:
        """End the server and all it started; returns the exit code. Its log has been sent whole then."""
        self._order(f"stop {grace_s}\n")
        if not self._ended.wait(grace_s + _KILL_WAIT_S):
            self._order("kill\n")
            self._ended.wait(_KILL_WAIT_S)
        return -9 if self.exit_code is None else self.exit_code

    def kill(self) -> None:
        """End it without asking."""
        self._order("kill\n")

    def _order(self, line: str) -> None:
        stdin = self._guardian.stdin
        if stdin is not None and not stdin.closed:
            with contextlib.suppress(OSError):
                os.write(stdin.fileno(), line.encode())

    def _watch(self) -> None:
        """Send the log as it grows until the guardian says how the server ended."""
        assert self._guardian.stdout is not None and self._guardian.stdin is not None
        said: list[bytes] = []
        reader = threading.Thread(target=lambda: said.append(self._guardian.stdout.read()), daemon=True)  # type: ignore[union-attr]
        reader.start()
        while reader.is_alive():
            self._send_log()
            reader.join(LOG_TICK_S)
        self._guardian.wait()
        self._send_log()
        words = said[0].split() if said else []
        self.exit_code = int(words[1]) if len(words) > 1 and words[0] == b"exited" else -9
        with contextlib.suppress(OSError):
            self._guardian.stdin.close()
        with contextlib.suppress(OSError, ValueError):
            self._send({"event": "exited", "server": self._number, "code": self.exit_code}, b"")
        self._ended.set()

    def _send_log(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._log.open("rb") as file:
            file.seek(self._sent)
            while data := file.read(_LOG_PIECE):
                self._sent += len(data)
                self._send({"event": "log", "server": self._number}, data)


def free_or_stated(stated: int | None, host: str) -> int:
    """The stated port if nothing listens on it at ``host``; without one a free one of loopback.

    Raises SpecmeterError, with exit 4 where it is taken. A host that is not this machine's is the server's to refuse.
    """
    where = host if stated is not None else "127.0.0.1"
    try:
        made = socket.socket(socket.AF_INET6 if ":" in where else socket.AF_INET)
    except OSError:
        if stated is None:
            raise
        return stated  # a host without this kind of address
    with made as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((where, stated or 0))
        except OverflowError:
            raise SpecmeterError(f"{stated} is no port.", "A port is at most 65535.") from None
        except OSError as error:
            if stated is None or error.errno in (errno.EADDRINUSE, errno.EACCES):
                raise SpecmeterError(
                    f"Port {stated} is taken there: something listens on it already.",
                    "The command asks for this port.",
                    "Stop what uses it, or leave --port out: specmeter then picks a free one.",
                    Exit.SERVER_FAILED,
                ) from None
            return stated
        port: int = probe.getsockname()[1]
    return port


def variables(pids: Sequence[int], names: Sequence[str]) -> dict[str, str]:
    """The values of environment variables in the last of the processes that has them; what is not there is left out."""
    found: dict[str, str] = {}
    for pid in pids:
        try:
            entries = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace").split("\0")
        except OSError:
            continue
        for entry in entries:
            name, equals, value = entry.partition("=")
            if equals and name in names:
                found[name] = value
    return found
