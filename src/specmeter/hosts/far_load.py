"""The load generator beside the server: sends requests, stamps what comes back on that machine's clock.

Standard library of 3.9. It knows nothing of what the events of a stream mean: that is read where the analysis is.
"""

from __future__ import annotations

import http.client
import json
import select
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

CONNECT_S = 10.0
MAX_EVENT_BYTES = 16 * 1024 * 1024
_PIECE = 65536
_END = b"[DONE]"
Send = Callable[[dict[str, Any], bytes], None]


class Drive:
    """One load: ``calls`` are request bodies, sent ``concurrency`` at once or at their ``due_s`` (seconds from now).

    Where ``ramp_s`` is given, the streams of ``concurrency`` begin evenly over so many seconds. ``headers`` go with
    each.

    ``done(message, payload)`` hears of each as it ends: ``{"index", "send_ns", "end_ns", "arrivals_ns", "status",
    "problem"}``, the payload being the compressed event data, each with its length before it. ``stop`` sends no more.
    """

    def __init__(self, request: dict[str, Any], calls: list[bytes], done: Send) -> None:
        self.url = str(request["url"])
        self.path = str(request["path"])
        self.timeout_s = float(request["timeout_s"])
        self.headers = {str(name): str(value) for name, value in (request.get("headers") or {}).items()}
        self.concurrency = int(request["concurrency"])
        self.due_s: list[float] | None = request.get("due_s")
        self.stop_on_error = bool(request["stop_on_error"])
        self.ramp_s = float(request.get("ramp_s", 0.0))
        self.full_ns: int | None = None
        self._over = threading.Event()
        self._calls = calls
        self._done = done
        self._next = iter(range(len(calls)))
        self._lock = threading.Lock()
        self._stopped = False

    def stop(self) -> None:
        """Send nothing more; what is under way is answered still."""
        self._stopped = True

    def run(self) -> dict[str, float | None]:
        """Send all and wait; gives ``wall_s``, ``cpu_share`` and ``full_ns``.

        They are the time it took, what this process used of one core meanwhile, and when the last stream began.
        """
        began, cpu = time.perf_counter(), time.process_time()
        if self.due_s is None:
            streams = min(self.concurrency, len(self._calls))
            threads = [
                threading.Thread(target=self._closed, args=(number == streams - 1,), daemon=True)
                for number in range(streams)
            ]
            for number, thread in enumerate(threads):
                due = self.ramp_s * number / max(1, streams - 1)
                # A stream that is to begin after the work has run out holds nothing up.
                if number and self._over.wait(max(0.0, began + due - time.perf_counter())):
                    threads = threads[:number]
                    break
                thread.start()
        else:
            threads = self._open(began, self.due_s)
        for thread in threads:
            thread.join()
        wall = time.perf_counter() - began
        share = (time.process_time() - cpu) / wall if wall else 0.0
        return {"wall_s": wall, "cpu_share": share, "full_ns": self.full_ns}

    def _open(self, began: float, due_s: list[float]) -> list[threading.Thread]:
        threads = []
        for index, due in enumerate(due_s):
            # From the schedule, not from the last send: a late send must not shift all later ones.
            time.sleep(max(0.0, began + due - time.perf_counter()))
            if self._stopped:
                break
            threads.append(threading.Thread(target=self._alone, args=(index,), daemon=True))
            threads[-1].start()
        return threads

    def _alone(self, index: int) -> None:
        connection = _Connection(self.url, self.timeout_s, self.headers)
        try:
            self._one(connection, index)
        finally:
            connection.close()

    def _closed(self, last: bool) -> None:
        connection = _Connection(self.url, self.timeout_s, self.headers)
        try:
            while not self._stopped:
                with self._lock:
                    index = next(self._next, None)
                if index is None:
                    break
                if last and self.full_ns is None:
                    self.full_ns = time.perf_counter_ns()
                self._one(connection, index)
        finally:
            self._over.set()
            connection.close()

    def _one(self, connection: _Connection, index: int) -> None:
        arrivals: list[int] = []
        events: list[bytes] = []
        problem, status = "", 0
        began = time.perf_counter_ns()
        try:
            response = connection.post(self.path, self._calls[index])
            status = response.status
            if status != 200:
                events.append(response.read(1 << 20))
                problem = "refused"
            else:
                problem = _read_events(response, arrivals, events)
        except (OSError, ValueError, http.client.HTTPException) as error:
            problem = f"the connection failed: {type(error).__name__} {error}".rstrip()
        ended = time.perf_counter_ns()
        if problem:
            connection.close()
            if self.stop_on_error:
                self._stopped = True
        message = {"index": index, "send_ns": began, "end_ns": ended, "arrivals_ns": arrivals}
        lengths = [len(event) for event in events]
        payload = zlib.compress(json.dumps(lengths).encode() + b"\n" + b"".join(events))
        self._done({**message, "status": status, "problem": problem}, payload)


class _Connection:
    """One kept-alive connection."""

    def __init__(self, url: str, timeout_s: float, headers: dict[str, str]) -> None:
        self._parts = urlsplit(url)
        self._timeout_s = timeout_s
        self._headers = {"Content-Type": "application/json", "Accept": "*/*", **headers}
        self._http: http.client.HTTPConnection | None = None

    def post(self, path: str, body: bytes) -> http.client.HTTPResponse:
        """Send and give the response with its body unread. Raises OSError or HTTPException."""
        sock = self._http.sock if self._http is not None else None
        # An idle connection that is readable was closed by the server meanwhile.
        if sock is not None and select.select([sock], [], [], 0)[0]:
            self.close()
        if self._http is None or self._http.sock is None:
            self._http = connect(self._parts, CONNECT_S)
            self._http.connect()
            self._http.sock.settimeout(self._timeout_s)
        self._http.request("POST", self._parts.path.rstrip("/") + path, body, self._headers)
        return self._http.getresponse()

    def close(self) -> None:
        """Close it; the next request opens another."""
        if self._http is not None:
            self._http.close()
            self._http = None


def connect(parts: Any, timeout_s: float) -> http.client.HTTPConnection:
    """An HTTP connection, not opened yet. Never through a proxy: those are for the outside."""
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname, parts.port, timeout=timeout_s)


def _read_events(response: http.client.HTTPResponse, arrivals: list[int], events: list[bytes]) -> str:
    """Split a stream of server-sent events at its blank lines; gives what is wrong with it, or nothing.

    Every event has the time at which its last byte arrived (WHATWG HTML, section 9.2).
    """
    buffer = b""
    while True:
        chunk = response.read1(_PIECE)
        now = time.perf_counter_ns()
        if not chunk:
            break
        buffer += chunk
        if b"\r" in buffer:  # in all of it: a line's end may be split between two chunks
            buffer = buffer.replace(b"\r\n", b"\n")
        if len(buffer) > MAX_EVENT_BYTES:
            return "the stream is malformed: an event has no end"
        *whole, buffer = buffer.split(b"\n\n")
        for event in whole:
            if event.strip():
                arrivals.append(now)
                events.append(event)
    if buffer.strip():
        return f"the stream ended within an event: {buffer.strip()[:80]!r}"
    if not any(_END in event for event in events[-2:]):
        return "the stream ended before its end mark [DONE]"
    return ""
