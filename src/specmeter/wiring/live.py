"""``check --link``: what is true in a running server, read by the probes of its link.

Each recipe has a point ``wiring`` in a function that runs once a request, so that it costs decoding nothing. Its values
are ids and shapes, written to the process's ring as any other value. A value ``NAME_2`` is another place for NAME.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from specmeter import control
from specmeter.control.processes import Process
from specmeter.errors import Exit, SpecmeterError
from specmeter.runtime import layout
from specmeter.trace.ring import read_ring

POINT = "wiring"
RUNNERS = {"mrv1": "model runner V1", "mrv2": "model runner V2"}
PROMPT, NEW_TOKENS = "List three fruits.", 8
ANSWER_S = 120.0
# Ranks work in step: those that are to come have come this long after the first.
LATE_RANKS_S = 2.0
POLL_S = 0.05


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
    with _armed(link, wait_s + ANSWER_S) as since:
        if url is not None:
            _ask(url)
        found = _wait_for(lambda: _read(link, plan, points, since), link, wait_s)
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
def _armed(link: control.Link, longest_s: float) -> Iterator[int]:
    """Probes in while inside, gives the time (perf_counter_ns) from which records are new.

    Should this process be killed, the server's watchdog takes the probes out after ``longest_s``.
    """
    before = bool(link.document()["state"]["armed"])
    since = time.perf_counter_ns()
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
        yield since
    finally:
        if not before:
            link.update(armed=False, watchdog_s=0.0)
            control.disarm(link)


def _ask(url: str) -> None:
    """One short greedy request. Raises SpecmeterError when the server refuses it or does not answer."""
    # Never through a proxy: the environment's proxies are for the outside.
    with httpx.Client(base_url=url, timeout=ANSWER_S, trust_env=False) as http:
        try:
            models = http.get("/v1/models")
            names = [str(entry["id"]) for entry in models.json()["data"]] if models.status_code == 200 else []
            body = {"model": (names or ["default"])[0], "prompt": PROMPT, "max_tokens": NEW_TOKENS, "temperature": 0}
            answer = http.post("/v1/completions", json=body)
            answer.raise_for_status()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as fault:
            raise SpecmeterError(
                f"the server at {url} did not answer a request",
                f"{type(fault).__name__}: {fault}",
                "Check --url, or leave it out and send a request yourself.",
                Exit.SERVER_FAILED,
            ) from None


def _read(
    link: control.Link, plan: Mapping[str, Any], points: Mapping[int, Mapping[str, Any]], since: int
) -> tuple[Seen, ...]:
    found = [_of(process, plan, points, since) for process in control.processes(link, alive_only=True)]
    seen = [one for one in found if one is not None]
    return tuple(sorted(seen, key=lambda one: (one.rank is None, one.rank or 0, one.pid)))


def _of(process: Process, plan: Mapping[str, Any], points: Mapping[int, Mapping[str, Any]], since: int) -> Seen | None:
    """What one process has written since a moment; None when the wiring point has not run in it."""
    if process.ring is None:
        return None
    try:
        records = read_ring(process.ring).records
    except SpecmeterError:
        return None  # it is being made at this moment
    records = records[records["t1"] >= since]
    spans = records[records["kind"] == layout.KIND_HOST_SPAN]
    hit = next((int(id) for id in spans["point"][::-1] if int(id) in points), None)
    if hit is None:
        return None
    ids = {id: key.partition(".")[2] for key, id in plan["value_ids"].items() if key.partition(".")[0] == POINT}
    mine = records[records["kind"] == layout.KIND_VALUE]
    values: dict[str, tuple[int, ...]] = {}
    for id, name in ids.items():
        of_name = mine[mine["point"] == id]
        if len(of_name):
            last = of_name[of_name["t1"] == of_name["t1"].max()]
            values[name] = tuple(int(number) for number in last["t0"])
    refused = process.report.get("refused_values", {})
    unread = {ids[int(id)]: str(why) for id, why in refused.items() if int(id) in ids}
    # An empty list was read too, but leaves no record.
    values.update({name: () for name in points[hit].get("values", {}) if name not in values and name not in unread})
    world = process.report.get("world")
    return Seen(
        process.pid, process.rank, None if world is None else int(world), str(points[hit].get("runner") or ""), values,
        unread,
    )  # fmt: skip
