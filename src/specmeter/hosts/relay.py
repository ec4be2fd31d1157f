"""This end of a session: one stream to a host, requests and their answers, and events as they come."""

from __future__ import annotations

import contextlib
import itertools
import queue
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

from specmeter.errors import Exit, SpecmeterError
from specmeter.hosts.address import Host
from specmeter.hosts.bundle import RELAY
from specmeter.hosts.client import MOST_NOISE, START_S, NotBegun, end_client, read_in_time, start_client
from specmeter.hosts.far_relay import GONE_S
from specmeter.hosts.frames import Frames, Message, StreamDamaged
from specmeter.hosts.session import Errors, not_begun, send, unreachable
from specmeter.hosts.shapes import check_answer, check_event, check_frame, far_error

BEAT_S = 10.0
END_WAIT_S = 15.0
_ERRORS_WAIT_S = 2.0
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
        self._child, held = start_client(host, python)
        try:
            held.release()
            self._open(python)
        except BaseException:
            end_client(self._child, 0.0)
            raise
        self.began = self._heard = time.monotonic()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._ended = threading.Event()
        for work in (self._beat, self._watch):
            threading.Thread(target=work, daemon=True).start()
        try:
            self.facts: dict[str, Any] = self.call("facts")[0]
        except BaseException:
            self.close()
            raise

    def listen(self, event: str, heard: OnEvent) -> None:
        """Hand on every event of that name; called in the reader's thread, so it must not call back."""
        self._listeners[event] = heard

    def call(self, op: str, payload: bytes = b"", within_s: float | None = None, **message: Any) -> Reply:
        """Ask and wait. Raises the far side's SpecmeterError, or one with exit 4 when the connection is lost.

        The answer has the fields of ``shapes.ANSWERS``; one without them is such an error too.
        """
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
            raise self.named(far_error(answer["error"]))
        try:
            check_answer(op, answer.get("ok"))
        except SpecmeterError as error:
            raise self.named(error) from None
        return answer["ok"], data

    def check_fault(self, disk: bool = False) -> None:
        """Raise the first thing that was wrong with what came by itself, if anything was.

        What this machine's disk refused counts with ``disk`` only.
        """
        if self.fault is not None and (disk or not isinstance(self.fault, OSError)):
            raise self.fault

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
        # Apart: it waits for a write that the far side does not read.
        threading.Thread(target=self._close_stdin, daemon=True).start()
        end_client(self._child, END_WAIT_S)
        self._reader.join(_ERRORS_WAIT_S)

    def _close_stdin(self) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(OSError):
            self._child.stdin.close()

    def _open(self, python: str) -> None:
        child, token = self._child, secrets.token_hex(8)
        assert child.stdin and child.stdout and child.stderr
        self._errors = Errors(child.stderr, token)
        writer = threading.Thread(target=send, args=(child.stdin, token, python, (), RELAY), daemon=True)
        writer.start()
        self._mark = f"\0specmeter {token} ".encode()
        until = time.monotonic() + START_S
        try:
            if not _begins(child.stdout, self._mark + b"start\n", until):
                code = end_client(child, END_WAIT_S)
                self._errors.join(_ERRORS_WAIT_S)
                raise unreachable(self.host, python, code, self._errors.lines)
            writer.join(max(0.0, until - time.monotonic()))
            if writer.is_alive():
                raise NotBegun("did not read what it was sent")
        except NotBegun as late:
            raise not_begun(self.host, str(late), self._errors.lines) from None
        self.frames = Frames(child.stdout, child.stdin)

    def _read(self) -> None:
        """Hand out what comes until the stream ends. However that is, nobody may wait for an answer any more."""
        why, wait_s = "The connection ended.", _ERRORS_WAIT_S
        try:
            while (read := self.frames.read()) is not None:
                self._hand_out(*read)
        except StreamDamaged as damaged:
            ended = damaged.rest and damaged.rest.startswith(self._mark[: len(damaged.rest)])
            why = "The far side ended." if ended else f"The stream is damaged: {damaged}."
            wait_s = wait_s if ended else 0.1
        except (OSError, ValueError):
            pass
        except BaseException as error:
            why, wait_s = f"The stream cannot be read: {type(error).__name__}.", 0.1
        self._lose(why, wait_s)

    def _hand_out(self, message: Message, payload: bytes) -> None:
        check_frame(message)
        self._heard = time.monotonic()
        if "id" in message:
            waiting = self._waiting.get(message["id"])
            if waiting is not None:
                waiting.put((message, payload))
        elif message["event"] in self._listeners:
            self._hear(message, payload)

    def _hear(self, message: Message, payload: bytes) -> None:
        try:
            check_event(message)
            self._listeners[message["event"]](message, payload)
        except Exception as error:  # a listener's fault must not end the session; the next answer would never come
            # The first one counts: others follow from it.
            if self.fault is None:
                self.fault = self.named(error) if isinstance(error, SpecmeterError) else error

    fault: Exception | None = None

    def named(self, error: SpecmeterError) -> SpecmeterError:
        """The same, with the host that it comes from."""
        return SpecmeterError(f"On {self.host.name}: {error.what}", error.why, error.next_step, error.exit)

    def _lose(self, why: str, wait_s: float = _ERRORS_WAIT_S) -> None:
        """Every call fails from now on, with the reason that was told first; the client may say more so long."""
        if not self._closing:
            self._errors.join(wait_s)
        said = next((line for line in reversed(self._errors.lines) if line.strip()), "")
        error = SpecmeterError(
            f"The connection to {self.host.name} was lost.",
            f"{why} {said}".strip(),
            f"{self.state} See `specmeter --on {self.host.name!r} status`.",
            Exit.SERVER_FAILED,
        )
        with self._lock:
            self.lost = self.lost or error
            waiting = list(self._waiting.values())
        for one in waiting:
            one.put(None)

    def _beat(self) -> None:
        """Tell the far side that we are here: it gives us up after a while without a word."""
        while not self._ended.wait(BEAT_S):
            try:
                self.frames.write({"id": 0, "op": "ping"})
            except (OSError, ValueError):
                return

    def _watch(self) -> None:
        """Give the far side up after a while without a word: not every client notices a dead connection, as ssh does.

        Apart from the beat, which stands still where the far side reads nothing.
        """
        while not self._ended.wait(BEAT_S):
            if time.monotonic() - self._heard > GONE_S:
                end_client(self._child, 0.0)
                self._lose(f"Nothing was heard for {GONE_S:.0f} s.")
                return


def _begins(stream: IO[bytes], mark: bytes, until: float) -> bool:
    """Read up to the mark. False at the end. Raises NotBegun.

    Never more than the mark still lacks, as far as it has come: what follows it belongs to the frames.
    """
    tail, count, lacks = b"", 0, len(mark)
    while lacks:
        data = read_in_time(stream, lacks, until)
        count += len(data)
        if not data:
            return False
        if count > MOST_NOISE:
            raise NotBegun(f"printed {MOST_NOISE >> 20} MiB and did not begin")
        tail = (tail + data)[-len(mark) :]
        lacks = next(left for left in range(len(mark) + 1) if tail.endswith(mark[: len(mark) - left]))
    return True
