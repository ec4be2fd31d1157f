"""The deep window: some decode cycles under torch's profiler, begun and ended at a cycle's begin, never left on.

A thread of ours owns the profiler. The engine's thread hands it the moment of begin and end and waits for each, so that
the window's edges are whole cycles; the deadline, disarming, detaching and the process's end need no cycle. Whatever
fails turns the profiler off and is told in the process's report; the server goes on.
"""

from __future__ import annotations

import json
import os
import socket
import time
from _thread import allocate_lock, get_ident, get_native_id, start_new_thread
from typing import Any, Callable, Dict, Optional

from . import report
from .deep_tool import CannotProfile, Tool, look, pairs
from .probe import Recorder
from .ring import boot_id, start_ticks
from .writers import ours

NONE, PREPARING, READY, STARTING, ON, STOPPING, SAVING, DONE, FAILED = (
    "none", "preparing", "ready", "starting", "on", "stopping", "saving", "done", "failed",
)  # fmt: skip
EXTRA = 2  # cycles after the wanted ones: a device that runs behind its host has finished those by then
HOLD_S = 10.0  # the engine's thread waits no longer
END_S = 5.0
QUIET_S = 0.2
_START, _STOP = "start", "stop"


class Bell:
    """One thread waits until another one rings; rings before that count."""

    def __init__(self) -> None:
        self._lock = allocate_lock()
        self._lock.acquire()

    def ring(self) -> None:
        """Wake the one that waits, or the next one that does."""
        try:
            self._lock.release()
        except RuntimeError:
            pass  # it has rung already

    def wait(self, seconds: float) -> bool:
        """False when it has not rung in that time."""
        return self._lock.acquire(timeout=max(0.0, seconds))


class Deep:
    """The deep windows of one process, one at a time. ``folder`` is the link, ``news()`` has the report written."""

    def __init__(self, folder: str, recorder: Recorder, news: Callable[[], None]) -> None:
        self._folder = folder
        self._recorder = recorder
        self._news = news
        self._tool: Optional[Tool] = None
        self._reset()

    def forked(self) -> None:
        """In a forked child: nothing is on there, and no lock is held."""
        tool = self._tool
        self._reset()
        try:
            if tool is not None:
                tool.forked()
        except Exception:
            pass  # the child comes first

    def _reset(self) -> None:
        self.state, self.reason = NONE, ""
        self._recorder.on_deep = None
        self._id = -1
        self._start_at: Optional[int] = None
        self._tool = None
        self._order, self._why = "", ""
        self._bell, self._answer, self._ended = Bell(), Bell(), Bell()
        self._turning = allocate_lock()
        self._facts: Dict[str, Any] = {}
        self._device = self._first = -1
        self._count = self._turns = self._seen = 0

    # -- asked by the control thread ------------------------------------------------------------------------------

    def command(self, armed: bool) -> int:
        """Do what link.json's state.deep says; gives its generation.

        ``{"id", "cycles", "deadline_s", "wait_s", "label", "processes": {"PID-START": {"activity", "turns",
        "start"}}}``: a process that is named with an activity makes the profiler ready, and with a ``start`` begins at
        the first cycle of that number or a later one; ``turns`` is how often it counts in one cycle. All others only
        tell what they have.
        """
        with open(os.path.join(self._folder, "link.json"), "rb") as file:
            state = json.loads(file.read())["state"]
        request = state.get("deep") or {}
        mine = (request.get("processes") or {}).get(self._stem())
        if mine is None:
            self.end("it was called off")
        elif self._id != request["id"]:
            self._begin(request, mine, armed)
        if mine is not None and "start" in mine:
            self._start_at = int(mine["start"])
        return int(state["generation"])

    def end(self, why: str) -> None:
        """Turn the profiler off and keep nothing, from any thread; returns at once."""
        if self.running:
            self._why = self._why or why
            self._bell.ring()

    def wait_ended(self) -> None:
        """Wait a little until it is off, before the process ends."""
        if self.running:
            self._ended.wait(END_S)

    @property
    def running(self) -> bool:
        """Whether our thread is at work."""
        return self.state not in (NONE, DONE, FAILED)

    def describe(self) -> Dict[str, Any]:
        """For the process's report."""
        return {"id": self._id, "state": self.state, "reason": self.reason, **look()}

    def _begin(self, request: Dict[str, Any], mine: Dict[str, Any], armed: bool) -> None:
        if self.running:
            self.end("another window was asked for")  # nobody waits for it any more: a link has one controller
            self._ended.wait(END_S)
        if self.running:
            return  # whoever asks sees its id in the report
        self._reset()
        self._id, self._count = int(request["id"]), int(request["cycles"])
        self._turns = (self._count + EXTRA) * int(mine["turns"])
        if not armed:
            self.state, self.reason = FAILED, "the probes are not in, so no cycle is seen"
            return
        self.state = PREPARING
        start_new_thread(self._run, (request, str(mine["activity"])))

    # -- in the engine's thread -----------------------------------------------------------------------------------

    def _cycle(self, cycle: int) -> None:
        """A cycle begins. Raises nothing of its own."""
        try:
            self._seen = cycle
            tool = self._tool
            if tool is None:
                return None
            if self.state == READY and self._start_at is not None and cycle >= self._start_at:
                busy = tool.busy()
                if busy:
                    return self.end(busy)
                self._device, self._first = tool.current_device(), cycle
                self._hand(_START, READY, STARTING)
            elif self.state == ON and cycle >= self._first + self._turns:
                self._facts["stop_cycle"] = cycle
                self._hand(_STOP, ON, STOPPING)
        except Exception as error:
            if not ours(error):
                raise
            self.end(f"{type(error).__name__}: {error}")
        return None

    def _hand(self, order: str, before: str, state: str) -> None:
        began = time.perf_counter_ns()
        with self._turning:
            if self.state != before:
                return  # it has just ended by itself
            self.state = state
        self._order = order
        self._bell.ring()
        answered = self._answer.wait(HOLD_S)
        self._facts[f"{order}_held"] = [began, time.perf_counter_ns(), int(answered)]

    # -- in our thread --------------------------------------------------------------------------------------------

    def _run(self, request: Dict[str, Any], activity: str) -> None:
        state, reason = FAILED, ""
        answer, ended = self._answer, self._ended
        try:
            self._window(request, activity)
            state = DONE
        except CannotProfile as why:
            reason = str(why)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        finally:
            self._recorder.on_deep = None
            try:
                failed = self._off()  # whatever the reason is: an open profiler brings the process down at its end
            except Exception as error:
                failed = f"{type(error).__name__}: {error}"
            reason = reason or failed
            with self._turning:
                self.reason, self.state = reason or failed, state  # at last: now the next window may begin
            # Each of them whatever becomes of the others: the engine's thread may wait for the first.
            for tell in (answer.ring, ended.ring, self._news):
                try:
                    tell()
                except Exception:
                    pass  # Python would print it on the server's standard error

    def _off(self) -> str:
        tool, self._tool = self._tool, None
        try:
            if tool is not None:
                tool.leave()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _window(self, request: Dict[str, Any], activity: str) -> None:
        until = time.perf_counter() + float(request["deadline_s"])
        tool = self._tool = Tool(activity)
        busy = tool.busy()
        if busy:
            raise CannotProfile(busy)
        self._timed("prepare", tool.prepare)
        self._say(READY)
        self._recorder.on_deep = self._cycle
        while self._order != _STOP and not self._why:
            if not self._bell.wait(until - time.perf_counter()):
                break
            if self._order == _START:
                self._order = ""
                self._start(tool)
        if self._why:
            raise CannotProfile(self._why)
        if not tool.on:
            raise CannotProfile(f"no cycle of that number began within {request['deadline_s']:g} s")
        self._stop(tool)
        self._wait_quiet(float(request["wait_s"]))
        self._save(tool, request)

    def _start(self, tool: Tool) -> None:
        self._facts["start_pairs"] = pairs()
        self._timed("start", lambda: tool.start(self._device))
        self._facts["start_marks"] = tool.marks()
        self._facts["device"] = tool.device_name()
        self._facts["begin_ns"] = time.perf_counter_ns()
        self._say(ON)
        self._answer.ring()

    def _stop(self, tool: Tool) -> None:
        self._facts["end_ns"] = time.perf_counter_ns()
        self._facts["complete"] = self._order == _STOP
        self._facts["stop_marks"] = tool.marks()
        self._facts["stop_pairs"] = pairs()
        self._timed("stop", tool.stop)
        self._answer.ring()

    def _wait_quiet(self, most_s: float) -> None:
        """Until no cycle has begun for a moment, or so long: writing holds Python's lock, so better while idle."""
        until = time.perf_counter() + most_s
        self._say(SAVING)
        seen = -1
        while time.perf_counter() < until and not self._why:
            now = self._seen
            if now == seen:
                return
            seen = now
            self._bell.wait(QUIET_S)

    def _save(self, tool: Tool, request: Dict[str, Any]) -> None:
        if self._why:
            raise CannotProfile(self._why)
        folder = os.path.join(self._folder, "deep")
        try:
            os.mkdir(folder, 0o700)  # not its parents: a link that was removed stays so
        except FileExistsError:  # another rank of the same server may make it in the same moment
            if not os.path.isdir(folder):
                raise
        name = os.path.join(folder, f"{self._stem()}-{self._id}")
        part = f"{name}.part"
        try:
            # Made by us first, so that it is nobody else's to read at any moment.
            os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))
            self._timed("export", lambda: tool.export(part))
            os.chmod(part, 0o600)
            os.replace(part, f"{name}.json")
        finally:
            if os.path.exists(part):
                os.unlink(part)
        report.write_report(f"{name}.meta.json", self._meta(tool, request))

    def _meta(self, tool: Tool, request: Dict[str, Any]) -> Dict[str, Any]:
        rank, world = report.rank_and_world()
        pid, host = os.getpid(), socket.gethostname()[:64]
        who = {"pid": pid, "start": start_ticks(pid), "host": host, "boot_id": boot_id(), "rank": rank}
        what = {"activity": tool.activity, "torch": tool.version, "mark_name": tool.mark_name, "world": world}
        thread = get_ident()
        window = {"first_cycle": self._first, "cycles": self._count, "wanted_start": self._start_at, "thread": thread}
        asked = {"id": self._id, "label": str(request.get("label") or "")}
        return {"format": 1, **asked, **who, **what, **window, "native_thread": get_native_id(), **self._facts}

    def _timed(self, what: str, call: Callable[[], None]) -> None:
        began = time.perf_counter_ns()
        call()
        self._facts[f"{what}_ns"] = [began, time.perf_counter_ns()]

    def _say(self, state: str) -> None:
        self.state = state
        self._news()

    def _stem(self) -> str:
        pid = os.getpid()
        return f"{pid}-{start_ticks(pid)}"
