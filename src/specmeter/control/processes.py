"""The processes of a link: their reports, and the commands that they acknowledge."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmeter.control import holder
from specmeter.control.link import Link, entries
from specmeter.control.sampling import Sampling
from specmeter.errors import Exit, SpecmeterError

POLL_S = 0.01


@dataclass(frozen=True)
class Process:
    """One process of a link as it last reported itself; ``report`` is the whole of PID-START.json."""

    pid: int
    start: int
    alive: bool
    report: dict[str, Any]
    ring: Path | None
    fifo: Path

    @property
    def armed(self) -> bool:
        """Whether its probes are in."""
        return bool(self.report.get("armed"))

    @property
    def generation(self) -> int:
        """The last generation of the wanted state that it acted on."""
        return int(self.report.get("generation", -1))

    @property
    def rank(self) -> int | None:
        """Its rank, if it knows one."""
        rank = self.report.get("rank")
        return int(rank) if rank is not None else None


@dataclass(frozen=True)
class Ack:
    """The outcome of a command: processes that acted on it, and live ones that did not answer in time."""

    generation: int
    done: tuple[Process, ...]
    silent: tuple[Process, ...]


def processes(link: Link, alive_only: bool = False) -> list[Process]:
    """The processes that imported a module of the plan, by pid. A report that is being replaced is read once more."""
    found = []
    for path in entries(link.path, "*-*.json"):
        pid_text, _, start_text = path.stem.partition("-")
        if not (pid_text.isdigit() and start_text.isdigit()):
            continue
        report = _report(path)
        if report is None:
            continue
        pid, start = int(pid_text), int(start_text)
        alive = link.lives(pid, start)
        ring = path.with_suffix(".ring")  # may be newer than the report
        process = Process(pid, start, alive, report, ring if ring.exists() else None, path.with_suffix(".fifo"))
        if alive or not alive_only:
            found.append(process)
    return found


def wait_for_processes(link: Link, count: int = 1, timeout_s: float = 60.0) -> list[Process]:
    """Wait until at least ``count`` live processes have reported. Raises SpecmeterError after ``timeout_s``."""
    until = time.monotonic() + timeout_s
    while True:
        found = processes(link, alive_only=True)
        if len(found) >= count:
            return found
        if time.monotonic() > until:
            raise SpecmeterError(
                f"{len(found)} of {count} processes of link {link.id} came up within {timeout_s:g} s",
                "A process shows up once it has imported a module of the plan with the runtime on its path.",
                "`specmeter status` shows what is there.",
                Exit.SERVER_FAILED,
            )
        time.sleep(POLL_S)


def arm(
    link: Link,
    timeout_s: float = 10.0,
    watchdog_s: float | None = None,
    take_over: bool = False,
    sampling: Sampling | None = None,
    nvtx: bool | None = None,
) -> Ack:
    """Put the probes in, in every process of the link and in those to come, and wait for the acknowledgements.

    With ``sampling`` they are in at random per cycle, the cycle point always. ``nvtx``: spans also push NVTX ranges
    (None: as before). This process then controls the link until it disarms or ends. Raises SpecmeterError (exit 3) when
    somebody else does, or has armed and ``take_over`` is false.
    """
    me = holder.take(link, take_over)
    before = link.document()["state"].get("armed_by") or {}
    extra: dict[str, Any] = {} if watchdog_s is None else {"watchdog_s": watchdog_s}
    if watchdog_s is None and before.get("beats"):
        extra = {"watchdog_s": 0.0}  # the last controller's own, which would disarm an arming that nobody beats for
    if nvtx is not None:
        extra["nvtx"] = nvtx
    drawn = sampling.as_json() if sampling is not None else None
    generation = link.update(armed=True, mix=drawn, armed_by={**me, "beats": watchdog_s is not None}, **extra)
    return _tell(link, f"arm {generation}" if sampling is None else sampling.line(generation), generation, timeout_s)


def disarm(link: Link, timeout_s: float = 10.0, take_over: bool = False) -> Ack:
    """Put the original code objects back, in every process of the link, and wait for the acknowledgements.

    Raises SpecmeterError (exit 3) while another controller runs and ``take_over`` is false.
    """
    holder.check_disarm(link, take_over)
    before = link.document()["state"].get("armed_by") or {}
    extra: dict[str, Any] = {"watchdog_s": 0.0} if before.get("beats") else {}
    generation = link.update(in_place=True, armed=False, mix=None, armed_by=None, knobs={}, **extra)
    try:
        return _tell(link, f"disarm {generation}", generation, timeout_s)
    finally:
        holder.release(link)


def mix(link: Link, seed: int, permille: int = 500, timeout_s: float = 10.0, why: str = "", again: bool = False) -> Ack:
    """Arm with the probes in at random per cycle (in for ``permille`` of 1000 draws), the cycle point always in.

    Where that is so already only the share changes, and whether somebody beats stays as it is. ``again``: raise
    SpecmeterError (exit 3) where the probes have been taken out meanwhile, or are somebody else's now.
    """
    me = holder.take(link)
    state = link.document()["state"]
    before = state.get("armed_by") or {}
    if again and not (state["armed"] and before.get("pid") == me["pid"]):
        what = f"Link {link.id} was disarmed meanwhile, or armed by somebody else."
        raise SpecmeterError(what, "It stays as they left it.", "`specmeter status` says who.", Exit.REFUSED)
    me["beats"] = bool(before.get("beats"))
    drawn = Sampling(seed, permille, why)
    generation = link.update(armed=True, armed_by=me, mix=drawn.as_json())
    return _tell(link, drawn.line(generation), generation, timeout_s)


def detach(link: Link, timeout_s: float = 10.0) -> Ack:
    """Disarm for good: the processes end their control thread and take their import hook out."""
    holder.check_disarm(link)
    generation = link.update(in_place=True, armed=False, mix=None, armed_by=None, knobs={}, detached=True)
    holder.release(link)
    targets = processes(link, alive_only=True)
    for process in targets:
        _send(process.fifo, "detach")
    return _await(
        link, generation, [process.pid for process in targets], timeout_s, lambda p: bool(p.report["detached"])
    )


def turn(link: Link, wanted: Mapping[str, int], timeout_s: float = 10.0) -> Ack:
    """Have knobs of the recipe set to these numbers at the next cycle; one not named goes back to the engine's own.

    The link must be armed by this process; disarming, or a missing beat, puts all of them back. ``knob_states`` says
    when the engine's thread has done it.
    """
    holder.take(link)
    generation = link.update(knobs=dict(wanted))
    return _tell(link, f"set {generation}", generation, timeout_s)


def knob_states(link: Link, name: str) -> list[dict[str, Any]]:
    """What each live process last said of the knob ``name`` (``runtime.knobs.Knob.describe``), with its ``pid``."""
    return [
        {**knob, "pid": process.pid}
        for process in processes(link, alive_only=True)
        for knob in process.report.get("knobs") or []
        if knob["name"] == name
    ]


def beat(link: Link) -> None:
    """Tell the processes that the controller is alive (they disarm ``watchdog_s`` after the last beat)."""
    for process in processes(link, alive_only=True):
        _send(process.fifo, "beat")


def tell(link: Link, line: str, generation: int, timeout_s: float) -> Ack:
    """Send a control line of that generation to every live process of the link, and wait for their answers."""
    return _tell(link, line, generation, timeout_s)


def _tell(link: Link, line: str, generation: int, timeout_s: float) -> Ack:
    targets = [process for process in processes(link, alive_only=True) if not process.report.get("detached")]
    for process in targets:
        _send(process.fifo, line)
    pids = [process.pid for process in targets]
    return _await(link, generation, pids, timeout_s, lambda process: process.generation >= generation)


def _await(link: Link, generation: int, pids: list[int], timeout_s: float, done: Any) -> Ack:
    until = time.monotonic() + timeout_s
    pause = POLL_S / 16  # most answer within a millisecond
    while True:
        now = [process for process in processes(link, alive_only=True) if process.pid in pids]
        silent = tuple(process for process in now if not done(process))
        if not silent or time.monotonic() > until:
            return Ack(generation, tuple(process for process in now if done(process)), silent)
        time.sleep(pause)
        pause = min(POLL_S, 2 * pause)


def _send(fifo: Path, line: str) -> None:
    """Write one line; a process that has just ended, or whose line is full, is noticed by its missing answer."""
    try:
        handle = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return
    try:
        os.write(handle, line.encode() + b"\n")
    except OSError:
        pass
    finally:
        os.close(handle)


def _report(path: Path) -> dict[str, Any] | None:
    for _ in range(2):
        try:
            document = json.loads(path.read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(document, dict):
            return document
    return None
