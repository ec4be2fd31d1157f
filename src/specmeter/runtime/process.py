"""One process's runtime: takes the plan's modules as they are imported, arms and disarms them, tells about itself."""

from __future__ import annotations

import atexit
import hashlib
import json
import marshal
import os
import sys
import time
from _thread import RLock
from types import CodeType, ModuleType
from typing import Any, Dict, List, Optional, Set

from . import compilers, forks, layout, report
from .control import ControlLine
from .hook import ImportHook
from .mix import Mixer
from .probe import Recorder, through
from .ring import DEFAULT_CAPACITY, Ring, start_ticks
from .swap import CannotSwap, Pair, Swap, find_functions, nested_codes, put_nested, running_codes

GRACE_S = 1.0
_FORMAT = 2


class Runtime:
    """The runtime of this process for one link directory. Nothing in it may raise into the server."""

    def __init__(self, link: str) -> None:
        self.link = link
        self.swaps: List[Swap] = []
        self.armed = False
        self.generation = 0
        self.detached = False
        self.refused: List[Dict[str, Any]] = []
        self.disarmed: Dict[int, str] = {}
        self.faults: List[str] = []
        self.modules: Dict[str, str] = {}
        self._taken: Dict[str, List[Swap]] = {}
        self._pairs: Dict[int, Pair] = {}
        self._points: Dict[int, Dict[str, Any]] = {}
        self._plan: Optional[Dict[str, Any]] = None
        self._plan_hash = b""
        self._capacity = DEFAULT_CAPACITY
        self._beat_by: Optional[float] = None
        self._watchdog_s = 0.0
        self._mix: Dict[str, int] = {}
        self._in_flight: List[str] = []
        self._line: Optional[ControlLine] = None
        self._ring_failed = False
        self._lock = RLock()
        self._recorder = Recorder(self._open_ring, self._fault, self._news)
        names = [name[:-4] for name in os.listdir(os.path.join(link, "code")) if name.endswith(".bin")]
        self._hook = ImportHook(names, self.imported, self._unwatched)
        self._tracer_hook = ImportHook(compilers.TRACER_MODULES, self._tracer_loaded, lambda *_: None)

    def install(self) -> None:
        """Put the import hook in place."""
        self._hook.install()
        self._tracer_hook.install()

    # -- modules --------------------------------------------------------------------------------------------------

    def imported(self, module: ModuleType, spec: Any) -> None:
        """A module of the plan has been executed (for the first time or again)."""
        try:
            with self._lock:
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
        if self._plan is None:
            with open(os.path.join(self.link, "plan.json"), "rb") as file:
                raw = file.read()
            self._plan = json.loads(raw)
            self._plan_hash = hashlib.sha256(raw).digest()
            self._points = {point["id"]: point for point in self._plan["points"]}
            forks.follow(self)
            atexit.register(self._at_exit)
        self._open_line()

    def _at_exit(self) -> None:
        try:
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
        if document.get("device_events"):
            self._recorder.time_device()
        self.generation = int(state["generation"])
        self._watchdog_s = float(state.get("watchdog_s") or 0.0)
        self._mix = dict(state.get("mix") or {})
        if state.get("detached"):
            self.detached = True
        if bool(state["armed"]) != self.armed:
            self._set_armed(bool(state["armed"]))

    def _take(self, module: ModuleType, spec: Any) -> None:
        name = spec.name
        for swap in self._taken.pop(name, []):
            self.swaps.remove(swap)  # a reload: the functions are new ones
        content = self._load(name, spec)
        if content is None:
            return
        for id, roots in content["roots"].items():
            self._pairs[id] = self._recorder.pair(self._points[id], roots, self._plan_value_ids())
        taken: List[Swap] = []
        for entry in content["functions"]:
            try:
                functions = find_functions(module, entry["qualname"], entry["code"])
                swap = Swap(entry, functions, self._pairs)
            except CannotSwap as reason:
                self._refuse_points(name, entry["points"], f"{entry['qualname']}: {reason}")
                continue
            taken.append(swap)
        self._refuse_compiled(taken)
        for swap in taken:
            if self.armed and not swap.compiled:
                swap.put("in")
        self._taken[name] = taken
        self.swaps.extend(taken)
        self.modules[name] = "ready"

    def _load(self, name: str, spec: Any) -> Optional[Dict[str, Any]]:
        """The module's replacement code, or None after a refusal."""
        origin = spec.origin or ""
        if not origin.endswith(".py"):
            self._refuse_module(name, f"it was not imported from source but from {origin or 'nowhere'}")
            return None
        with open(os.path.join(self.link, "code", f"{name}.bin"), "rb") as file:
            raw = file.read()
        magic = (self._plan or {}).get("python", {}).get("magic")
        own = _magic()
        if magic is not None and magic != own:
            self._refuse_module(name, f"the code was made by another Python (magic {magic}, here {own})")
            return None
        content: Dict[str, Any] = marshal.loads(raw)
        with open(origin, "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
        if content["format"] != _FORMAT or digest != content["sha256"]:
            self._refuse_module(name, f"{origin} is not the file that was planned (its sha256 is {digest})")
            return None
        if content["optimize"] != sys.flags.optimize:
            self._refuse_module(name, f"Python runs with -O level {sys.flags.optimize}, the plan was made without it")
            return None
        return content

    def _plan_value_ids(self) -> Dict[str, int]:
        return dict((self._plan or {}).get("value_ids") or {})

    def _refuse_module(self, name: str, reason: str) -> None:
        self.modules[name] = "refused"
        ids = [id for id, point in self._points.items() if point["module"] == name]
        self._refuse_points(name, ids, reason)

    def _unwatched(self, name: str, reason: str) -> None:
        try:
            with self._lock:
                self._wake()
                self._refuse_module(name, reason)
                self._write_report()
        except Exception as error:
            self._note(f"module {name}", error)

    def _refuse_points(self, module: str, ids: List[int], reason: str) -> None:
        self.refused = [entry for entry in self.refused if entry["module"] != module or entry["reason"] != reason]
        self.refused.append({"module": module, "points": sorted(ids), "reason": reason})

    # -- arming ---------------------------------------------------------------------------------------------------

    def _set_armed(self, armed: bool) -> None:
        with self._lock:
            self.armed = armed
            self._recorder.on_cycle = None
            if armed:
                self._refuse_compiled(self.swaps)
                self._recorder.set_writing(True)
                if self._mix:
                    self._recorder.on_cycle = Mixer(self._live, self._recorder.write, **self._mix)
            for swap in self.swaps:
                swap.put("in" if armed and not self._dead(swap) else "out")
            put_nested([swap for swap in self.swaps if swap.state == ("in" if armed else "out")], armed)
            if not armed:
                self._recorder.set_writing(False)
                running = running_codes()
                self._in_flight = [swap.qualname for swap in self.swaps if swap.on_stack(running, True)]
            self._beat_by = time.perf_counter() + self._watchdog_s if armed and self._watchdog_s else None

    def _live(self) -> List[Swap]:
        return [swap for swap in self.swaps if not swap.reason and not self._dead(swap)]

    def _dead(self, swap: Swap) -> bool:
        return bool(swap.compiled) or all(id in self.disarmed for id in swap.points)

    # -- torch.compile --------------------------------------------------------------------------------------------

    def _refuse_compiled(self, swaps: List[Swap]) -> None:
        """Put those functions out for good that torch.compile owns by now."""
        if not compilers.loaded():
            return
        found = compilers.owned(code for swap in swaps for code in _all_originals(swap))
        self._put_compiled_out(swaps, found)

    def _put_compiled_out(self, swaps: List[Swap], reasons: Dict[int, str]) -> None:
        for swap in swaps:
            for code in _all_originals(swap) + list(nested_codes(swap.probed)):
                reason = reasons.get(id(code))
                if reason and not swap.compiled:
                    swap.compiled = reason
                    swap.put("out")
                    self._refuse_points(swap.qualname, swap.points, f"{swap.qualname}: {reason}")

    def _handed_to_compiler(self, codes: Set[int]) -> None:
        with self._lock:
            if codes and not self.detached:
                self._put_compiled_out(self.swaps, dict.fromkeys(codes, compilers.HANDED))
                self._news()

    def _tracer_loaded(self, _module: ModuleType, _spec: Any) -> None:
        """The tracer has just been imported: probed code is kept from it, and is out while it compiles."""
        try:
            compilers.follow(self._handed_to_compiler, self._compilation_begins, self._compilation_ends)
            with self._lock:
                for swap in self.swaps:
                    swap.keep_from_compilers()
        except Exception as error:
            self._note("torch.compile", error)

    def _compilation_begins(self) -> None:
        try:
            with self._lock:
                for swap in self.swaps:
                    swap.put("out")
                put_nested(self.swaps, False)
        except Exception as error:
            self._note("torch.compile", error)

    def _compilation_ends(self) -> None:
        try:
            with self._lock:
                if self.armed and not self.detached:
                    self._refuse_compiled(self.swaps)
                    for swap in self._live():
                        swap.put("in")
                    put_nested(self._live(), True)
                    self._news()
        except Exception as error:
            self._note("torch.compile", error)

    def _refuse_endless(self) -> None:
        """Put those functions out whose frame from before arming still runs: it keeps its old code."""
        until = time.perf_counter() + GRACE_S
        while True:
            running = running_codes()
            stuck = [swap for swap in self.swaps if swap.state == "in" and swap.on_stack(running, False)]
            if not stuck or time.perf_counter() > until or (self._line is not None and self._line.pausing):
                break
            time.sleep(0.02)
        for swap in stuck:
            swap.put("out")
            swap.reason = "a frame of it has been running since before arming and keeps its old code"
            self._refuse_points(swap.qualname, swap.points, f"{swap.qualname}: {swap.reason}")

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
            self._write_report()
        except Exception as error:
            self._note(f"control line {line!r}", error)
        return not self.detached

    def _read_state_safely(self, word: str, rest: List[str]) -> None:
        with self._lock:
            if word == "detach":
                return self._detach()
            with open(os.path.join(self.link, "link.json"), "rb") as file:
                state = json.loads(file.read())["state"]
            self._watchdog_s = float(state.get("watchdog_s") or 0.0)
            self._mix = {"seed": int(rest[1]), "permille": int(rest[2])} if word == "mix" else {}
            for swap in self.swaps:
                if swap.reason:
                    self.refused = [entry for entry in self.refused if entry["module"] != swap.qualname]
                swap.reason = ""
            self._set_armed(word != "disarm")
        if self.armed:
            self._refuse_endless()
        self.generation = int(rest[0])
        return None

    def _detach(self) -> None:
        self._set_armed(False)
        self._hook.remove()
        self._tracer_hook.remove()
        compilers.leave()
        self.detached = True
        for swap in self.swaps:
            swap.forget()
        line, self._line = self._line, None  # a closed handle's number may soon be the server's
        if line is not None:
            line.close()
        forks.leave(self)
        atexit.unregister(self._at_exit)
        ring, self._recorder.ring = self._recorder.ring, None
        try:
            if ring is not None:
                ring.buffer.close()  # nothing of the link stays mapped
        except BufferError:
            pass  # a record is being written at this moment

    def _late(self) -> None:
        self._note("watchdog", TimeoutError(f"no beat for {self._watchdog_s:g} s: disarmed"))
        self._set_armed(False)
        self._write_report()

    # -- faults ---------------------------------------------------------------------------------------------------

    def _fault(self, point: int, error: BaseException) -> None:
        """A probe failed: take that point out for good; a ring that cannot be made takes all of them out."""
        text = f"{type(error).__name__}: {error}"
        with self._lock:
            if point not in self.disarmed:
                self.disarmed[point] = text
                self._pairs[point] = (time.perf_counter_ns, through)
            if self._ring_failed:
                self._note("ring", error)
                return self._set_armed(False)
            for swap in self.swaps:
                if point in swap.points:
                    swap.rebind(self._pairs)
                    if self._dead(swap):
                        swap.put("out")
            self._news()
            self._recorder.write(layout.KIND_DISARMED, point, time.perf_counter_ns(), 0, 0)
        return None

    def _note(self, where: str, error: BaseException) -> None:
        try:
            if len(self.faults) < 100:
                self.faults.append(f"{where}: {type(error).__name__}: {error}")
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
        with self._lock:
            report.write_report(self._path("json"), self.describe())

    def describe(self) -> Dict[str, Any]:
        """The report: what is armed, refused, disarmed by itself, which threads write, what went wrong."""
        rank, world = report.rank_and_world()
        ring = self._recorder.ring
        armed = [id for swap in self.swaps if swap.state == "in" for id in swap.points if id not in self.disarmed]
        lanes = [
            {"lane": lane, "ident": ident, "native_id": report.native_id(ident), "name": report.thread_name(ident)}
            for ident, lane in self._recorder.lanes.items()
        ]
        return {
            "pid": os.getpid(),
            "ppid": os.getppid(),
            "start": start_ticks(os.getpid()),
            "python": sys.version.split()[0],
            "engine": (self._plan or {}).get("engine"),
            "rank": None if rank < 0 else rank,
            "world": None if world < 0 else world,
            "armed": self.armed,
            "generation": self.generation,
            "detached": self.detached,
            "modules": self.modules,
            "points": sorted(id for swap in self.swaps for id in swap.points),
            "armed_points": sorted(armed),
            "refused": self.refused,
            "disarmed": [{"point": id, "exception": text} for id, text in self.disarmed.items()],
            "refused_values": {str(id): why for id, why in self._recorder.refused_values.items()},
            "in_flight": self._in_flight,
            "lanes": lanes,
            "device_events": self._recorder.events.describe() if self._recorder.events is not None else None,
            "ring": os.path.basename(ring.path) if ring is not None else None,
            "faults": self.faults,
        }

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
            self._lock = RLock()
            self._recorder.reset()
            if self._line is not None and not self.detached:
                self._line.close(unlink=False)
                self._open_line()
                self._write_report()
        except Exception as error:
            self._note("fork", error)


def _all_originals(swap: Swap) -> List[CodeType]:
    return [code for original in swap.originals for code in nested_codes(original)]


def _magic() -> str:
    from importlib.util import MAGIC_NUMBER

    return MAGIC_NUMBER.hex()
