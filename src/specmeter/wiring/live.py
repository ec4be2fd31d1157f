"""``check --link``: what is true in a running server, read by the probes of its link.

Each recipe has a point ``wiring`` in a function that runs once a request, so that it costs decoding nothing. Its values
are ids and shapes, written to the process's ring as any other value. A value ``NAME_2`` is another place for NAME.
Nothing here needs more than the standard library of 3.9, so that it runs on other hosts too.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from specmeter import control
from specmeter.control.processes import Process
from specmeter.control.records import NewRecords
from specmeter.errors import Exit, SpecmeterError
from specmeter.runtime import layout

POINT = "wiring"
RUNNERS = {"mrv1": "model runner V1", "mrv2": "model runner V2"}
PROMPT, NEW_TOKENS = "List three fruits.", 8
ANSWER_S = 120.0
# Ranks work in step: those that are to come have come this long after the first.
LATE_RANKS_S = 2.0
POLL_S = 0.05
_MOST_ANSWER = 16 << 20


@dataclass(frozen=True)
class Seen:
    """What one process of the server holds.

    ``rank`` and ``world`` are None where it knows none, ``runner`` is the recipe's runner that ran ("" for an engine
    with one). ``values`` maps a value's name to its integers (a shape, ids, or one number), ``unread`` a name to the
    reason why it could not be read.
    """

    pid: int
    rank: int | None
    world: int | None
    runner: str
    values: Mapping[str, tuple[int, ...]]
    unread: Mapping[str, str]

    @property
    def name(self) -> str:
        """``process 12``, or ``rank 1 (process 12)``."""
        return f"process {self.pid}" if self.rank is None else f"rank {self.rank} (process {self.pid})"

    def get(self, name: str) -> tuple[int, ...] | None:
        """A value, wherever the engine keeps it; None when it was not there to be read."""
        return next((self.values[place] for place in (name, f"{name}_2") if place in self.values), None)

    def number(self, name: str) -> int | None:
        """A value that is one number."""
        found = self.get(name)
        return found[0] if found is not None and len(found) == 1 else None


def watch(link: control.Link, url: str | None, wait_s: float) -> tuple[Seen, ...]:
    """Arm, let one request pass (sent to ``url``, else the server's own traffic), and read what the processes hold.

    Probes that were out before are out again afterwards. Raises SpecmeterError when the link's plan has no wiring
    point, a process does not answer, or no request reached the draft within ``wait_s`` seconds.
    """
    plan = link.plan()
    points = {int(point["id"]): point for point in plan["points"] if point["name"] == POINT}
    if not points:
        raise SpecmeterError(
            f"link {link.id} has no wiring point in its plan",
            "It was made by an older specmeter, or by a recipe of your own without a point named wiring.",
            "Start the server again with `specmeter run`; docs/check.md lists the values of that point.",
            Exit.REFUSED,
        )
    control.wait_for_processes(link, 1, 20.0)
    news = _News(link, plan, points)
    with _armed(link, wait_s + ANSWER_S):
        if url is not None:
            _ask(url)
        found = _wait_for(news.read, link, wait_s)
    if not found:
        raise SpecmeterError(
            f"no request reached the engine of link {link.id} within {wait_s:g} s",
            "What a process holds is read when a request begins.",
            "Send the server a request meanwhile, or give its address with --url; `specmeter status` shows the link.",
            Exit.SERVER_FAILED,
        )
    return found


def _wait_for(read: Callable[[], tuple[Seen, ...]], link: control.Link, wait_s: float) -> tuple[Seen, ...]:
    """What is there once every rank has written and nothing more comes; empty when nothing came in ``wait_s``."""
    until = time.monotonic() + wait_s
    found: tuple[Seen, ...] = ()
    while not found and time.monotonic() < until:
        time.sleep(POLL_S)
        if not control.processes(link, alive_only=True):
            raise SpecmeterError(f"the server of link {link.id} has ended", exit=Exit.SERVER_FAILED)
        found = read()
    late = time.monotonic() + LATE_RANKS_S
    before: tuple[Seen, ...] = ()
    while found and time.monotonic() < late and (found != before or len(found) < (found[0].world or 1)):
        time.sleep(POLL_S)
        before, found = found, read() or found
    return found


@contextmanager
def _armed(link: control.Link, longest_s: float) -> Iterator[None]:
    """Probes in while inside.

    Should this process be killed, the server's watchdog takes the probes out after ``longest_s``.
    """
    before = bool(link.document()["state"]["armed"])
    try:
        if not before:
            ack = control.arm(link, watchdog_s=longest_s)
            if ack.silent:
                raise SpecmeterError(
                    "The probes could not be put in.",
                    f"No answer from process {', '.join(str(process.pid) for process in ack.silent)}.",
                    f"specmeter status --link {link.id} says more.",
                    Exit.SERVER_FAILED,
                )
        yield
    finally:
        if not before:
            link.update(armed=False, watchdog_s=0.0)
            control.disarm(link)


def _ask(url: str) -> None:
    """One short greedy request. Raises SpecmeterError when the server refuses it or does not answer."""
    try:
        status, text = _http(url, "GET", "/v1/models")
        names = [str(entry["id"]) for entry in json.loads(text)["data"]] if status == 200 else []
        body = {"model": (names or ["default"])[0], "prompt": PROMPT, "max_tokens": NEW_TOKENS, "temperature": 0}
        status, text = _http(url, "POST", "/v1/completions", json.dumps(body).encode())
        if status >= 400:
            raise ValueError(f"HTTP {status}: {text[:200].decode('utf-8', 'replace').strip()}")
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as fault:
        raise SpecmeterError(
            f"the server at {url} did not answer a request",
            f"{type(fault).__name__}: {fault}",
            "Check --url, or leave it out and send a request yourself.",
            Exit.SERVER_FAILED,
        ) from None


def _http(url: str, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    """Status and body of one request. Never through a proxy: the environment's proxies are for the outside."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=ANSWER_S)
    try:
        connection.request(method, parts.path.rstrip("/") + path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read(_MOST_ANSWER)
    finally:
        connection.close()


class _News:
    """What the processes of a link write from its making on, as far as the wiring point is concerned."""

    def __init__(self, link: control.Link, plan: Mapping[str, Any], points: Mapping[int, Mapping[str, Any]]) -> None:
        self._link, self._points = link, points
        table = plan["value_ids"].items()
        self._ids = {int(id): key.partition(".")[2] for key, id in table if key.partition(".")[0] == POINT}
        self._rings: dict[Path, NewRecords] = {}
        self._spans: dict[Path, int] = {}
        # value id -> moment and numbers of its last reading
        self._values: dict[Path, dict[int, tuple[int, list[int]]]] = {}
        for process in control.processes(link, alive_only=True):
            self._open(process.ring, from_start=False)

    def read(self) -> tuple[Seen, ...]:
        """What is there now, the ranks in order."""
        seen = []
        for process in control.processes(self._link, alive_only=True):
            self._open(process.ring, from_start=True)
            if process.ring is not None and process.ring in self._rings:
                self._take(process.ring)
                if process.ring in self._spans:
                    seen.append(self._of(process, process.ring))
        return tuple(sorted(seen, key=lambda one: (one.rank is None, one.rank or 0, one.pid)))

    def _open(self, ring: Path | None, from_start: bool) -> None:
        if ring is None or ring in self._rings:
            return
        try:
            self._rings[ring] = NewRecords(ring, from_start)
        except (OSError, ValueError):
            return  # it is being made at this moment
        self._values[ring] = {}

    def _take(self, ring: Path) -> None:
        while data := self._rings[ring].take():
            for t0, t1, _cycle, point, kind, _lane, _value, _seq in layout.RECORD.iter_unpack(data):
                if kind == layout.KIND_HOST_SPAN and point in self._points:
                    self._spans[ring] = point
                elif kind == layout.KIND_VALUE and point in self._ids:
                    moment, numbers = self._values[ring].get(point, (t1, []))
                    kept = numbers if moment == t1 else []
                    self._values[ring][point] = (t1, [*kept, t0])

    def _of(self, process: Process, ring: Path) -> Seen:
        point = self._points[self._spans[ring]]
        values = {self._ids[id]: tuple(numbers) for id, (_, numbers) in self._values[ring].items()}
        refused = process.report.get("refused_values", {})
        unread = {self._ids[int(id)]: str(why) for id, why in refused.items() if int(id) in self._ids}
        # An empty list was read too, but leaves no record.
        values.update({name: () for name in point.get("values", {}) if name not in values and name not in unread})
        world = process.report.get("world")
        world = None if world is None else int(world)
        return Seen(process.pid, process.rank, world, str(point.get("runner") or ""), values, unread)
