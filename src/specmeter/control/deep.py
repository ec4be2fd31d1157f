"""Asks a link's processes for a deep window: N decode cycles under torch's profiler, the same ones on every rank.

Three steps: every process tells what it has; those that run cycles make the profiler ready; all are told the number of
their cycle that begins the window. Where the recipe reads the engine's own iteration number, those cycles are one
iteration, far enough ahead that no rank has passed it. Standard library only: this runs on far hosts too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from specmeter.control import holder
from specmeter.control.link import Link
from specmeter.control.processes import POLL_S, Process, processes, tell
from specmeter.control.records import NewRecords
from specmeter.errors import Exit, SpecmeterError
from specmeter.runtime import layout

DEADLINE_S = 60.0
READY_S = 90.0
SAVE_S = 300.0
QUIET_S = 2.0
_SEEN = 8  # cycles before a process counts as one that runs them
_AHEAD_S = 0.4
_AHEAD = 8
MOST_CYCLES = 2000
_CUDA, _CPU = "cuda", "cpu"


@dataclass(frozen=True)
class DeepAsked:
    """What came of it. ``done`` and ``failed`` (with the reason) by pid; ``notes`` are sentences for the user.

    ``left_out`` are processes that run cycles and were not asked, with the reason.
    """

    id: int
    activity: str
    done: tuple[int, ...]
    failed: Mapping[int, str]
    left_out: Mapping[int, str]
    notes: tuple[str, ...]


@dataclass
class _Seen:
    """What one process's ring has shown since we look: the newest cycle and when, its rate, the engine's own number."""

    records: NewRecords
    cycle: int = -1
    count: int = 0
    core: int = 0
    begin_ns: int = 0
    end_ns: int = 0
    ahead: int | None = None
    steady: bool = True

    @property
    def turns(self) -> int:
        """How often the process counts in one cycle: an engine core and its worker in one process each do."""
        return max(1, round(self.count / self.core)) if self.core else 1

    @property
    def period_s(self) -> float:
        """Seconds from one cycle to the next."""
        return (self.end_ns - self.begin_ns) / 1e9 / max(1, self.count - 1)


@dataclass
class _Watch:
    """Follows the rings of a link's live processes."""

    link: Link
    cycle_ids: frozenset[int]
    core_ids: frozenset[int]
    iteration_ids: frozenset[int]
    seen: dict[tuple[int, int], _Seen] = field(default_factory=dict)

    def look(self) -> None:
        """Take what is new."""
        for process in processes(self.link, alive_only=True):
            key = (process.pid, process.start)
            if process.ring is None:
                continue
            if key not in self.seen:
                try:
                    self.seen[key] = _Seen(NewRecords(process.ring))
                except (OSError, ValueError):
                    continue
            self._take(self.seen[key])

    def _take(self, seen: _Seen) -> None:
        while True:
            data = seen.records.take(pass_holes=True)
            if not data:
                return
            for t0, _t1, cycle, point, kind, _lane, _value, _seq in layout.RECORD.iter_unpack(data):
                if kind == layout.KIND_HOST_SPAN and point in self.cycle_ids:
                    seen.begin_ns = seen.begin_ns or t0
                    seen.cycle, seen.end_ns, seen.count = cycle, t0, seen.count + 1
                    seen.core += point in self.core_ids
                elif kind == layout.KIND_VALUE and point in self.iteration_ids:
                    seen.steady = seen.steady and seen.ahead in (None, t0 - cycle)
                    seen.ahead = t0 - cycle

    def close(self) -> None:
        """Close the rings."""
        for seen in self.seen.values():
            seen.records.close()


def deep_window(
    link: Link,
    cycles: int,
    label: str = "",
    deadline_s: float = DEADLINE_S,
    say: Callable[[str], None] = lambda text: None,
) -> DeepAsked:
    """Have every process of an armed link that runs cycles take a window of ``cycles`` and save it below LINK/deep.

    Requests must run meanwhile. Returns when all have saved theirs or failed. Raises SpecmeterError when no process
    runs cycles, none has torch, or none could be asked; whatever happens, no profiler stays on.
    """
    if not 1 <= cycles <= MOST_CYCLES:
        raise SpecmeterError(f"A deep window of {cycles} cycles", f"It must be 1 to {MOST_CYCLES}.")
    holder.take(link)
    if not link.document()["state"]["armed"]:
        what, why = f"Link {link.id} is not armed.", "A deep window needs the probes in."
        raise SpecmeterError(what, why, "`specmeter arm` first.")
    watch = _watch(link)
    try:
        return _ask(_Window(link, cycles, label, deadline_s, say), watch)
    finally:
        watch.close()


def _watch(link: Link) -> _Watch:
    plan = link.plan()
    names = {int(point["id"]): str(point["name"]) for point in plan["points"] if point.get("role") == "cycle"}
    wanted = {f"{name}.iteration" for name in names.values()}
    iterations = frozenset(int(id) for name, id in (plan.get("value_ids") or {}).items() if name in wanted)
    core = frozenset(id for id, name in names.items() if name.endswith(".core"))
    return _Watch(link, frozenset(names), core, iterations)


@dataclass
class _Window:
    """One window that is asked for."""

    link: Link
    cycles: int
    label: str
    deadline_s: float
    say: Callable[[str], None]
    id: int = -1

    def request(self, mine: Mapping[str, Any]) -> dict[str, Any]:
        """What link.json says."""
        how = {"cycles": self.cycles, "deadline_s": self.deadline_s, "wait_s": QUIET_S, "label": self.label}
        return {"id": self.id, **how, "processes": dict(mine)}

    def tell(self, mine: Mapping[str, Any]) -> None:
        """Write it there and wake the processes."""
        generation = self.link.update(deep=self.request(mine))
        tell(self.link, f"deep {generation}", generation, 10.0)

    @contextmanager
    def called_off(self) -> Iterator[None]:
        """However it ends, nothing is left to begin."""
        try:
            yield
        finally:
            now = self.link.document()["state"].get("deep") or {}
            if now.get("id", self.id) == self.id:  # else another window has taken its place
                generation = self.link.update(in_place=True, deep=None)
                tell(self.link, f"deep {generation}", generation, 2.0)


def _ask(window: _Window, watch: _Watch) -> DeepAsked:
    running = _running(window, watch)
    window.id = int(window.link.document()["state"]["generation"]) + 1
    window.tell({})
    activity, targets, left_out = _chosen(window.link, running)
    mine: dict[str, dict[str, Any]] = {
        f"{p.pid}-{p.start}": {"activity": activity, "turns": watch.seen[p.pid, p.start].turns} for p in targets
    }
    with window.called_off():
        window.say("making the profiler ready")
        window.tell(mine)
        failed = _until(window, targets, ("ready",), READY_S)
        ready = [process for process in targets if process.pid not in failed]
        if not ready:
            raise _refused(failed)
        notes = _set_starts(window, watch, ready, mine)
        window.say(f"{window.cycles} cycles under the profiler")
        window.tell(mine)
        failed = {**failed, **_until(window, ready, ("done",), window.deadline_s + SAVE_S)}
    done = tuple(process.pid for process in targets if process.pid not in failed)
    if not done:
        raise _refused(failed)
    return DeepAsked(window.id, activity, done, failed, left_out, tuple(notes))


def _running(window: _Window, watch: _Watch) -> list[tuple[int, int]]:
    """The processes that run cycles, once one of them has run a few."""
    until = time.monotonic() + window.deadline_s
    while True:
        watch.look()
        if any(seen.count >= _SEEN for seen in watch.seen.values()):
            running = [key for key, seen in watch.seen.items() if seen.count]
            # An engine core of its own runs no model: its workers do.
            return [key for key in running if watch.seen[key].core < watch.seen[key].count] or running
        if time.monotonic() > until:
            raise SpecmeterError(
                "No process of the server runs decode cycles.",
                f"Fewer than {_SEEN} came within {window.deadline_s:g} s.",
                "Send requests meanwhile, longer or more of them.",
                Exit.SERVER_FAILED,
            )
        time.sleep(POLL_S)


def _chosen(link: Link, running: list[tuple[int, int]]) -> tuple[str, list[Process], dict[int, str]]:
    """What to record, in which processes, and why others that run cycles are left out."""
    found = [p for p in processes(link, alive_only=True) if (p.pid, p.start) in running]
    has = {process.pid: process.report.get("deep") or {} for process in found}
    cuda = any(one.get("cuda") for one in has.values())
    left_out: dict[int, str] = {}
    for process in found:
        one = has[process.pid]
        if "state" not in one:
            left_out[process.pid] = "its runtime is of an earlier specmeter"
        elif not one.get("torch"):
            left_out[process.pid] = "torch is not imported there"
        elif cuda and not one.get("cuda"):
            left_out[process.pid] = "it uses no CUDA device, others of the server do"
    targets = [process for process in found if process.pid not in left_out]
    if not targets:
        raise _refused(left_out)
    return _CUDA if cuda else _CPU, targets, left_out


def _set_starts(window: _Window, watch: _Watch, ready: list[Process], mine: dict[str, dict[str, Any]]) -> list[str]:
    """Choose the cycle that begins the window, for each process in its own count."""
    watch.look()
    seen = {process.pid: watch.seen[process.pid, process.start] for process in ready}
    period = max(one.period_s for one in seen.values())
    ahead = max(_AHEAD, math.ceil(_AHEAD_S / max(period, 1e-6)))
    notes: list[str] = []
    numbered = all(one.ahead is not None and one.steady for one in seen.values())
    if len(ready) == 1:
        starts = {ready[0].pid: 0}
    elif numbered:
        first = max(one.cycle + int(one.ahead or 0) for one in seen.values()) + ahead
        starts = {pid: first - int(one.ahead or 0) for pid, one in seen.items()}
    else:
        starts = {pid: one.cycle + ahead for pid, one in seen.items()}
        notes.append(
            "the recipe reads no number of the engine's iteration: ranks began within a few cycles of each other"
        )
    for process in ready:
        mine[f"{process.pid}-{process.start}"]["start"] = starts[process.pid]
    return notes


def _until(window: _Window, targets: list[Process], states: tuple[str, ...], timeout_s: float) -> dict[int, str]:
    """Wait until each process is in one of ``states``, and give those that failed, ended or did not answer."""
    until = time.monotonic() + timeout_s
    waiting = {process.pid for process in targets}
    failed: dict[int, str] = {}
    while waiting:
        now = {process.pid: process for process in processes(window.link, alive_only=True)}
        for pid in sorted(waiting):
            deep = (now[pid].report.get("deep") or {}) if pid in now else None
            if deep is None:
                failed[pid] = "the process has ended"
            elif deep.get("id") == window.id and deep.get("state") in states:
                waiting.discard(pid)
            elif deep.get("id") == window.id and deep.get("state") == "failed":
                failed[pid] = str(deep.get("reason"))
            elif int(deep.get("id", -1)) > window.id:
                failed[pid] = "another window was begun"
        waiting -= set(failed)
        if waiting and time.monotonic() > until:
            failed.update(dict.fromkeys(waiting, f"no answer within {timeout_s:g} s"))
            break
        if waiting:
            time.sleep(5 * POLL_S)
    return failed


def _refused(reasons: Mapping[int, str]) -> SpecmeterError:
    said = "; ".join(f"process {pid}: {reason}" for pid, reason in sorted(reasons.items()))
    return SpecmeterError(
        "There is no deep window.", f"{said}.", "The normal window does not need the profiler.", Exit.REFUSED
    )
