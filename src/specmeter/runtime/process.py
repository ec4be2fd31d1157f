"""One process's runtime: takes the plan's modules as they are imported, arms and disarms them, tells about itself."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import time
from types import ModuleType
from typing import Any, Dict, List, Optional

from . import compilers, forks, layout, report
from .arming import Arming
from .control import ControlLine
from .deep import Deep
from .device import device_asked
from .hook import ImportHook
from .knobs import Knobs
from .loading import CannotLoad, load_code
from .probe import Recorder
from .ring import DEFAULT_CAPACITY, Ring, start_ticks
from .swap import CannotSwap, Swap, find_functions


class Runtime:
    """The runtime of this process for one link directory. Nothing in it may raise into the server."""

    def __init__(self, link: str) -> None:
        self.link = link
        self.generation = 0
        self.detached = False
        self.faults: List[str] = []
        self.modules: Dict[str, str] = {}
        self._points: Dict[int, Dict[str, Any]] = {}
        self.plan: Optional[Dict[str, Any]] = None
        self._plan_hash = b""
        self._capacity = DEFAULT_CAPACITY
        self._beat_by: Optional[float] = None
        self._watchdog_s = 0.0
        self._line: Optional[ControlLine] = None
        self._ring_failed = False
        self.recorder = Recorder(self._open_ring, self._fault, self._news)
        self.arming = Arming(self.recorder, self._note, self._news)
        self.knobs = Knobs({}, self.recorder.write, self._news)
        self.deep = Deep(link, self.recorder, self._news)
        names = [name[:-4] for name in os.listdir(os.path.join(link, "code")) if name.endswith(".bin")]
        self._hook = ImportHook(names, self.imported, self._unwatched)
        self._tracer_hook = ImportHook(compilers.TRACER_MODULES, self.arming.tracer_loaded, lambda *_: None)

    def install(self) -> None:
        """Put the import hook in place."""
        self._tracer_hook.install()  # first: without it nothing may be probed
        self._hook.install()

    # -- modules --------------------------------------------------------------------------------------------------

    def imported(self, module: ModuleType, spec: Any) -> None:
        """A module of the plan has been executed (for the first time or again)."""
        try:
            with self.arming.lock:
                if self.detached:
                    return
                self._wake()
                self._take(module, spec)
                self._write_report()
        except Exception as error:
            self._note(f"module {spec.name}", error)

    def _wake(self) -> None:
        """Read the plan and open the control line, once a process."""
        if self._line is not None:
            return
        if self.plan is None:
            with open(os.path.join(self.link, "plan.json"), "rb") as file:
                raw = file.read()
            self.plan = json.loads(raw)
            self._plan_hash = hashlib.sha256(raw).digest()
            self._points = {point["id"]: point for point in self.plan["points"]}
            self.arming.plan(self.plan["points"])
            self.knobs = Knobs(self.plan, self.recorder.write, self._news)
            forks.follow(self)
            atexit.register(self._at_exit)
        self._open_line()

    def _at_exit(self) -> None:
        try:
            self.deep.end("the process ends")
            self.deep.wait_ended()
            if not self.detached:
                self._write_report()
        except Exception:
            pass  # the link was taken away before

    def _open_line(self) -> None:
        self._line = ControlLine(self._path("fifo"), self._command, lambda: self._beat_by, self._late)
        # After the FIFO is there: a change of state made meanwhile comes through one or the other.
        self._read_state()
        self._line.start()

    def _read_state(self) -> None:
        with open(os.path.join(self.link, "link.json"), "rb") as file:
            document = json.loads(file.read())
        state = document["state"]
        self._capacity = int(document.get("capacity") or DEFAULT_CAPACITY)
        outside, inside = device_asked(document)
        if (outside or inside) and self.recorder.events is None:
            self.recorder.time_device(outside, inside)
            self.arming.stamped = {id for id, point in self._points.items() if inside and point.get("stamp")}
        self.generation = int(state["generation"])
        self._watchdog_s = float(state.get("watchdog_s") or 0.0)
        self.arming.mix = dict(state.get("mix") or {})
        self.arming.show_ranges(bool(state.get("nvtx")))
        if state.get("detached"):
            self.detached = self.arming.left = True
        if bool(state["armed"]) != self.arming.armed:
            self._set_armed(bool(state["armed"]))
        if self.arming.armed:
            self.knobs.want(state.get("knobs") or {})

    def _take(self, module: ModuleType, spec: Any) -> None:
        name = spec.name
        self.arming.drop(name)  # a reload: the functions are new ones
        if self.recorder.events is not None:
            self.recorder.events.follow_graphs()
        try:
            content = load_code(self.link, name, spec.origin or "", self.plan or {})
        except CannotLoad as reason:
            return self._refuse_module(name, str(reason))
        value_ids = dict((self.plan or {}).get("value_ids") or {})
        for id, roots in content["roots"].items():
            pair = self.recorder.pair(self._points[id], roots, value_ids)
            self.arming.know(id, str(self._points[id]["name"]), self.knobs.wrapped(self._points[id], roots, pair))
        taken: List[Swap] = []
        for entry in content["functions"]:
            try:
                functions = find_functions(module, entry["qualname"], entry["code"])
                taken.append(Swap(entry, functions, self.arming.pairs))
            except CannotSwap as reason:
                self.arming.refuse(name, entry["points"], f"{entry['qualname']}: {reason}")
        self.arming.add(name, taken)
        self.modules[name] = "ready"
        return None

    def _refuse_module(self, name: str, reason: str) -> None:
        self.modules[name] = "refused"
        ids = [id for id, point in self._points.items() if point["module"] == name]
        self.arming.refuse(name, ids, reason)

    def _unwatched(self, name: str, reason: str) -> None:
        try:
            with self.arming.lock:
                self._wake()
                self._refuse_module(name, reason)
                self._write_report()
        except Exception as error:
            self._note(f"module {name}", error)

    # -- control --------------------------------------------------------------------------------------------------

    def _set_armed(self, armed: bool) -> None:
        with self.arming.lock:
            self.arming.put(armed)
            if not armed:
                self.knobs.want({})
                self.deep.end("the probes were taken out")
            self._beat_by = self._next_beat() if armed else None

    def _next_beat(self) -> Optional[float]:
        """When the probes go out unless somebody is heard before, perf_counter seconds; None: never."""
        return time.perf_counter() + self._watchdog_s if self._watchdog_s else None

    def _hurried(self) -> bool:
        """Whether a fork waits for the control thread."""
        return self._line is not None and self._line.pausing

    def _command(self, line: str) -> bool:
        """One control line. Returns False when the thread is to end."""
        try:
            word, *rest = line.split()
            if word == "beat":
                if self._beat_by is not None:
                    self._beat_by = time.perf_counter() + self._watchdog_s
                return True
            if word in ("arm", "disarm", "mix", "detach"):
                self._read_state_safely(word, rest)
            elif word == "set":
                self._set_knobs(int(rest[0]))
            elif word == "deep":
                self.generation = self.deep.command(self.arming.armed)
            self._write_report()
        except Exception as error:
            # A report that cannot be written is no news for the report.
            self._note(f"control line {line!r}", error, tell=line.strip() != "report")
            if not os.path.isdir(self.link):
                self._go()
        return not self.detached

    def _go(self) -> None:
        """The link is gone, so nobody can reach this process any more: the probes go out, for good."""
        try:
            with self.arming.lock:
                self._detach()
        except Exception:
            pass  # the server comes first

    def _read_state_safely(self, word: str, rest: List[str]) -> None:
        with self.arming.lock:
            if word == "detach":
                return self._detach()
            with open(os.path.join(self.link, "link.json"), "rb") as file:
                state = json.loads(file.read())["state"]
            self._watchdog_s = float(state.get("watchdog_s") or 0.0)
            self.arming.show_ranges(bool(state.get("nvtx")))
            again = word == "mix" and self.arming.armed and self.arming.mixing
            self.arming.mix = {}
            if again:
                self._beat_by = self._next_beat()
            else:
                self.arming.try_again()
                self._set_armed(word != "disarm")
        if self.arming.armed and not again:
            self.arming.refuse_endless(self._hurried)
        if word == "mix":
            self._start_mix(int(rest[1]), int(rest[2]))
        self.generation = int(rest[0])
        return None

    def _start_mix(self, seed: int, permille: int) -> None:
        with self.arming.lock:
            if self.arming.armed:
                self.arming.mix = {"seed": seed, "permille": permille}
                self.arming.start_mix()

    def _set_knobs(self, generation: int) -> None:
        with open(os.path.join(self.link, "link.json"), "rb") as file:
            wanted = json.loads(file.read())["state"].get("knobs") or {}
        with self.arming.lock:
            self.knobs.want(wanted if self.arming.armed else {})
        self.generation = generation

    def _detach(self) -> None:
        self._set_armed(False)
        self._hook.remove()
        self._tracer_hook.remove()
        if self.recorder.events is not None:
            self.recorder.events.leave()
        self.detached = True
        self.arming.leave()
        line, self._line = self._line, None  # a closed handle's number may soon be the server's
        if line is not None:
            line.close()
        forks.leave(self)
        atexit.unregister(self._at_exit)
        ring, self.recorder.ring = self.recorder.ring, None
        try:
            if ring is not None:
                ring.close()  # nothing of the link stays mapped
        except BufferError:
            pass  # a record is being written at this moment

    def _late(self) -> None:
        self._note("watchdog", TimeoutError(f"no beat for {self._watchdog_s:g} s: disarmed"))
        self._set_armed(False)
        self._write_report()

    # -- faults ---------------------------------------------------------------------------------------------------

    def _fault(self, point: int, error: BaseException) -> None:
        """A probe failed: take that point out for good; a ring that cannot be made takes all of them out."""
        with self.arming.lock:
            self.arming.take_out(point, f"{type(error).__name__}: {error}")
            if self._ring_failed:
                self._note("ring", error)
                return self._set_armed(False)
            self._news()
            self.recorder.write(layout.KIND_DISARMED, point, time.perf_counter_ns(), 0, 0)
        return None

    def _note(self, where: str, error: BaseException, tell: bool = True) -> None:
        try:
            if len(self.faults) < 100:
                self.faults.append(f"{where}: {type(error).__name__}: {error}")
            if tell:
                self._news()
        except Exception:
            pass

    def _news(self) -> None:
        """Something for the report: the control thread writes it, not the server's thread."""
        if self._line is not None:
            self._line.poke("report")

    # -- files ----------------------------------------------------------------------------------------------------

    def _path(self, kind: str) -> str:
        pid = os.getpid()
        return os.path.join(self.link, f"{pid}-{start_ticks(pid)}.{kind}")

    def _open_ring(self) -> Ring:
        self._ring_failed = True
        rank, world = report.rank_and_world()
        ring = Ring(self._path("ring"), self._capacity, self._plan_hash, rank, world)
        self._ring_failed = False
        return ring

    def _write_report(self) -> None:
        with self.arming.lock:
            report.write_report(self._path("json"), report.describe(self))

    # -- fork -----------------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """End the control thread until the fork is over."""
        if self._line is not None and not self.detached:
            self._line.pause()

    def after_fork(self) -> None:
        """Start the control thread again, in the parent."""
        if self._line is not None and not self.detached:
            try:
                self._line.start()
            except Exception as error:
                self._note("fork", error)

    def in_child(self) -> None:
        """The child writes to its own ring and listens on its own line; what was armed stays armed."""
        try:
            self.arming.renew_locks()
            self.recorder.reset()
            self.knobs.renew()
            self.deep.forked()
            line, self._line = self._line, None  # a closed handle's number may soon be the server's
            if line is not None and not self.detached:
                line.close(unlink=False)
                self._open_line()
                self._write_report()
        except Exception as error:
            self._note("fork", error)
