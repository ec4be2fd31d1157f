"""This end of a session: one stream to a host, requests and their answers, and events as they come."""

from __future__ import annotations

import itertools
import queue
import secrets
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specmeter.errors import Exit, SpecmeterError
from specmeter.hosts.address import Host
from specmeter.hosts.bundle import RELAY
from specmeter.hosts.far_relay import GONE_S
from specmeter.hosts.frames import Frames, Message, StreamDamaged
from specmeter.hosts.session import Errors, send, start_client, unreachable

BEAT_S = 10.0
END_WAIT_S = 15.0
_ERRORS_WAIT_S = 2.0
_NOISE = 1 << 20
_CLOCK_ROUNDS = 15
Reply = tuple[Message, bytes]
OnEvent = Callable[[Message, bytes], None]


@dataclass(frozen=True)
class Clock:
    """A host's perf_counter_ns against ours: theirs - ours = ``offset_ns``, wrong by at most ``error_ns``.

    The bound is half the shortest round trip, as in NTP (RFC 5905, section 8): the moment that the host read its clock
    lies somewhere between our two.
    """

    offset_ns: int
    error_ns: int


class Relay:
    """A session with one host. ``call`` may be used from several threads; a lost connection fails every call."""

    def __init__(self, host: Host, python: str) -> None:
        """Connect and send what is needed. Raises SpecmeterError (exit 5) with the reason when that fails."""
        self.host = host
        self.lost: SpecmeterError | None = None
        self.state = "Nothing was started or armed there."
        self._numbers = itertools.count(1)
        self._waiting: dict[int, queue.SimpleQueue[Reply | None]] = {}
        self._listeners: dict[str, OnEvent] = {}
        self._closing = False
        self._lock = threading.Lock()
        self._child = start_client(host, python)
        try:
            self._open(python)
        except BaseException:
            self._child.kill()
            self._child.wait()
            raise
        self.began = self._heard = time.monotonic()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._ended = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()
        self.facts: dict[str, Any] = self.call("facts")[0]

    def listen(self, event: str, heard: OnEvent) -> None:
        """Hand on every event of that name; called in the reader's thread, so it must not call back."""
        self._listeners[event] = heard

    def call(self, op: str, payload: bytes = b"", within_s: float | None = None, **message: Any) -> Reply:
        """Ask and wait. Raises the far side's SpecmeterError, or one with exit 4 when the connection is lost."""
        number = next(self._numbers)
        answers: queue.SimpleQueue[Reply | None] = queue.SimpleQueue()
        with self._lock:
            if self.lost is not None:
                raise self.lost
            self._waiting[number] = answers
        try:
            self.frames.write({"id": number, "op": op, **message}, payload)
            found = answers.get(timeout=within_s)
        except (OSError, ValueError):
            found = answers.get()  # the reader tells why
        except queue.Empty:
            raise SpecmeterError(
                f"{self.host.name} gave no answer within {within_s:g} s.", exit=Exit.SERVER_FAILED
            ) from None
        finally:
            self._waiting.pop(number, None)
        if found is None:
            assert self.lost is not None
            raise self.lost
        answer, data = found
        if "error" in answer:
            error = answer["error"]
            raise SpecmeterError(str(error["what"]), str(error["why"]), str(error["next"]), Exit(int(error["exit"])))
        return answer["ok"], data

    def clock(self) -> Clock:
        """Compare clocks, by the shortest of some round trips."""
        best: tuple[int, int] | None = None
        for _ in range(_CLOCK_ROUNDS):
            sent = time.perf_counter_ns()
            theirs = int(self.call("ping")[0]["perf_counter_ns"])
            trip = time.perf_counter_ns() - sent
            if best is None or trip < best[0]:
                best = (trip, theirs - (sent + trip // 2))
        assert best is not None
        return Clock(best[1], best[0] // 2 + 1)

    def unix_ns(self) -> int:
        """What the host adds to its perf_counter_ns for its calendar's time."""
        answer, _ = self.call("ping")
        return int(answer["time_ns"]) - int(answer["perf_counter_ns"])

    def traffic(self) -> dict[str, Any]:
        """Bytes of the session so far (what is sent at the start not counted) and how long it has lasted."""
        seconds = time.monotonic() - self.began
        return {"received_bytes": self.frames.received, "sent_bytes": self.frames.sent, "seconds": round(seconds, 3)}

    def close(self) -> None:
        """End the session; the far side tidies up. Waits for that, but not for ever."""
        self._closing = True
        self._ended.set()
        assert self._child.stdin is not None
        try:
            self._child.stdin.close()
        except OSError:
            pass
        try:
            self._child.wait(END_WAIT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._reader.join(_ERRORS_WAIT_S)

    def _open(self, python: str) -> None:
        child, token = self._child, secrets.token_hex(8)
        assert child.stdin and child.stdout and child.stderr
        self._errors = Errors(child.stderr, token)
        writer = threading.Thread(target=send, args=(child.stdin, token, python, (), RELAY), daemon=True)
        writer.start()
        mark = f"\0specmeter {token} ".encode()
        self._mark = mark
        tail = b""
        while not tail.endswith(mark + b"start\n"):
            # Byte by byte: what follows the mark belongs to the frames.
            byte = child.stdout.read(1)
            if not byte:
                code = child.wait()
                self._errors.join(_ERRORS_WAIT_S)
                raise unreachable(self.host, python, code, self._errors.lines)
            tail = (tail + byte)[-len(mark) - 8 :]
        writer.join()
        self.frames = Frames(child.stdout, child.stdin)

    def _read(self) -> None:
        """Hand out what comes until the stream ends."""
        why = "The connection ended."
        while True:
            try:
                read = self.frames.read()
            except StreamDamaged as damaged:
                ended = damaged.rest.startswith(self._mark[: len(damaged.rest)])
                why = "The far side ended." if ended else f"The stream is damaged: {damaged}."
                break
            except (OSError, ValueError):
                break
            if read is None:
                break
            message, payload = read
            self._heard = time.monotonic()
            if "id" in message:
                waiting = self._waiting.get(int(message["id"]))
                if waiting is not None:
                    waiting.put(read)
            elif message.get("event") in self._listeners:
                self._hear(message, payload)
        self._lose(why)

    def _hear(self, message: Message, payload: bytes) -> None:
        try:
            self._listeners[message["event"]](message, payload)
        except Exception as error:  # a listener's fault must not end the session; the next answer would never come
            self.fault = error

    fault: Exception | None = None

    def _lose(self, why: str) -> None:
        if not self._closing:
            self._errors.join(_ERRORS_WAIT_S)
        said = next((line for line in reversed(self._errors.lines) if line.strip()), "")
        error = SpecmeterError(
            f"The connection to {self.host.name} was lost.",
            f"{why} {said}".strip(),
            f"{self.state} See `specmeter --on {self.host.name!r} status`.",
            Exit.SERVER_FAILED,
        )
        with self._lock:
            self.lost = error
            waiting = list(self._waiting.values())
        for one in waiting:
            one.put(None)

    def _beat(self) -> None:
        """Tell the far side that we are here: it gives us up after a while without a word, and we give it up.

        Not every client notices a dead connection by itself, as ssh does.
        """
        while not self._ended.wait(BEAT_S):
            if time.monotonic() - self._heard > GONE_S:
                self._child.kill()
                return
            try:
                self.frames.write({"id": 0, "op": "ping"})
            except (OSError, ValueError):
                return
