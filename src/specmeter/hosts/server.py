"""A server that was started on another host, and HTTP to servers that only that host reaches."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from specmeter.engines.process import STOP_GRACE_S, ServerProcess
from specmeter.errors import SpecmeterError
from specmeter.hosts.frames import Message
from specmeter.hosts.relay import Relay
from specmeter.trace.masking import mask_file

_MOST_EARLY = 1024
_KEPT_HEADERS = ("accept", "content-type", "authorization", "user-agent")


class FarProcess(ServerProcess):
    """As ``ServerProcess``, on another host: ``pid`` is there, the log is kept here as it comes."""

    def __init__(
        self,
        relay: Relay,
        number: int,
        command: Sequence[str],
        env: Mapping[str, str],
        log_path: Path,
        link: str | None,
    ) -> None:
        """Start ``command`` there, ``env`` added to the environment there; SpecmeterError if it cannot be run."""
        self.command = tuple(command)
        self.log_path = log_path
        self.exit_code: int | None = None
        self._relay = relay
        self._number = number
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._secrets: tuple[str, ...] = ()
        self._stopped = False
        answer, _ = relay.call("start", server=number, command=list(command), env=dict(env), link=link)
        self.pid = int(answer["pid"])
        self._secrets = tuple(str(secret) for secret in answer["secrets"])

    def heard(self, message: Message, payload: bytes) -> None:
        """A ``log`` or ``exited`` event of this server."""
        if message["event"] == "exited":
            self.exit_code = int(message["code"])
        elif not self._stopped:
            os.write(self._log, payload)

    def poll(self) -> int | None:
        """The exit code if it has ended. Raises SpecmeterError when the connection is lost: the server ends then."""
        if self.exit_code is None and self._relay.lost is not None:
            raise self._relay.lost
        return self.exit_code

    def stop(self, grace_s: float = STOP_GRACE_S) -> int | None:
        """End the server and all it started; its log is whole then."""
        if self._stopped:
            return self.exit_code
        try:
            code = self._relay.call("stop", server=self._number, grace_s=grace_s)[0]["code"]
            self.exit_code = self.exit_code if code is None else int(code)
        except SpecmeterError:
            pass  # the connection is lost, which is said elsewhere; the far side ends the server by itself
        except KeyboardInterrupt:
            self._relay.call("kill", server=self._number)
            raise
        finally:
            self._stopped = True
            os.close(self._log)
            mask_file(self.log_path, self._secrets)
        return self.exit_code

    def kill(self) -> None:
        """End it at once."""
        self._relay.call("kill", server=self._number)


class Processes:
    """The servers that one session has started; hands them their events."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._numbers = itertools.count(1)
        self._running: dict[int, FarProcess] = {}
        self._early: list[tuple[Message, bytes]] = []
        self._lock = threading.Lock()
        relay.listen("log", self._heard)
        relay.listen("exited", self._heard)

    def start(self, command: Sequence[str], env: Mapping[str, str], log_path: Path, link: str | None) -> FarProcess:
        """Start one. Raises SpecmeterError."""
        number = next(self._numbers)
        process = FarProcess(self._relay, number, command, env, log_path, link)
        with self._lock:
            self._running[number] = process
            # A server's first words may come before the answer that it was started.
            early, self._early = self._early, []
        for message, payload in early:
            process.heard(message, payload)
        return process

    def _heard(self, message: Message, payload: bytes) -> None:
        with self._lock:
            process = self._running.get(int(message["server"]))
            if process is None:
                if len(self._early) < _MOST_EARLY:
                    self._early.append((message, payload))
                return
        process.heard(message, payload)


class FarTransport(httpx.BaseTransport):
    """Sends each request through the session; its answer comes whole."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """One round trip. Raises httpx errors as a connection from here would."""
        timeouts = request.extensions.get("timeout") or {}
        timeout_s = float(timeouts.get("read") or timeouts.get("connect") or 5.0)
        headers = {name: value for name, value in request.headers.items() if name.lower() in _KEPT_HEADERS}
        answer, body = self._relay.call(
            "http", request.read(), method=request.method, url=str(request.url), headers=headers, timeout_s=timeout_s
        )
        if "failed" in answer:
            kind = httpx.ReadTimeout if answer["timeout"] else httpx.ConnectError
            raise kind(str(answer["failed"]), request=request)
        kept = [(name, _one_line(value)) for name, value in answer["headers"] if name.lower() == "content-type"]
        return httpx.Response(int(answer["status"]), headers=kept, content=body, request=request)


def _one_line(value: str) -> str:
    """A header's value with nothing but printable ASCII in it."""
    return "".join(letter if " " <= letter <= "~" else "?" for letter in value)
