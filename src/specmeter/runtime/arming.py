"""Which code is in: all functions of a process that carry points, armed, disarmed, and taken out for good."""

from __future__ import annotations

import time
from _thread import RLock
from types import CodeType, ModuleType
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from . import compilers, layout
from .mix import Mixer
from .nvtx import Ranges
from .probe import Recorder
from .swap import Pair, Swap, nested_codes, put_nested, running_codes
from .writers import through

GRACE_S = 1.0


class Arming:
    """The swaps of one process by module, and the points that may not be in, each with the reason.

    ``note(where, error)`` keeps a fault for the process's report, ``news()`` has that report written. ``lock`` guards
    everything here; ``changing`` is held besides while code changes, and is all that a cycle's begin asks for: a report
    that is being written does not stop it.
    """

    def __init__(
        self, recorder: Recorder, note: Callable[[str, BaseException], None], news: Callable[[], None]
    ) -> None:
        self.lock = RLock()
        self.changing = RLock()
        self.swaps: List[Swap] = []
        self.armed = False
        self.refused: List[Dict[str, Any]] = []
        self.disarmed: Dict[int, str] = {}
        self.in_flight: List[str] = []
        self.mix: Dict[str, int] = {}
        self.mixer: Optional[Mixer] = None
        self._cycles: List[str] = []
        self.pairs: Dict[int, Pair] = {}
        self.ranges: Optional[Ranges] = None
        self._bare: Dict[int, Tuple[str, Pair]] = {}
        self._taken: Dict[str, List[Swap]] = {}
        self._recorder = recorder
        self._note = note
        self._news = news
        self.left = False
        self._unfollowed = ""
        # Points that go into graphs, which a server captures at its start; empty once it was disarmed.
        self.stamped: Set[int] = set()

    def renew_locks(self) -> None:
        """In a forked child: another thread may have held them."""
        self.lock, self.changing = RLock(), RLock()

    def plan(self, points: List[Dict[str, Any]]) -> None:
        """See which cycle points there are to draw for: without one every probe stays in."""
        self._cycles = [str(point["name"]) for point in points if point.get("role") == "cycle"]

    # -- points ---------------------------------------------------------------------------------------------------

    def know(self, point: int, name: str, pair: Pair) -> None:
        """Take a point's begin and end functions."""
        self._bare[point] = (name, pair)
        self.pairs[point] = self._with_range(point)

    def show_ranges(self, wanted: bool) -> None:
        """Have spans also push NVTX ranges, or no longer."""
        if wanted == (self.ranges is not None):
            return
        self.ranges = Ranges() if wanted else None
        for point in self._bare:
            if point not in self.disarmed:
                self.pairs[point] = self._with_range(point)
        with self.changing:
            for swap in self.swaps:
                self._rebind(swap)
            self._renew_mix()

    def _rebind(self, swap: Swap) -> None:
        """Make a swap's probed code anew; closures that live on go along."""
        put_nested([swap], False)
        swap.rebind(self.pairs)
        if swap.state == "in":
            put_nested([swap], True)

    def _put_out(self, swap: Swap) -> None:
        """Take one swap out, closures that live on too."""
        swap.put("out")
        put_nested([swap], False)

    def _with_range(self, point: int) -> Pair:
        name, pair = self._bare[point]
        return pair if self.ranges is None else self.ranges.pair(name, *pair)

    # -- modules --------------------------------------------------------------------------------------------------

    def drop(self, module: str) -> None:
        """Forget a module's functions: it is imported again, and they are new ones."""
        with self.changing:
            for swap in self._taken.pop(module, []):
                self.swaps.remove(swap)
            self._renew_mix()

    def add(self, module: str, taken: List[Swap]) -> None:
        """Take a module's functions; those that may be are armed if the process is.

        What torch.compile owns is asked at arming: that is a pass over all of the collector's objects, 70 ms of a vLLM.
        """
        if self.armed:
            self._refuse_compiled(taken)
            for swap in taken:
                if not swap.compiled:
                    swap.put("cycle" if self.mixing and self.stamped.isdisjoint(swap.points) else "in")
        else:
            self._put_stamped(taken)
        with self.changing:
            self._taken[module] = taken
            self.swaps.extend(taken)
            self._renew_mix()

    def refuse(self, module: str, ids: List[int], reason: str) -> None:
        """Note for the report that the points ``ids`` of ``module`` are not in, and why."""
        self.refused = [entry for entry in self.refused if entry["module"] != module or entry["reason"] != reason]
        self.refused.append({"module": module, "points": sorted(ids), "reason": reason})

    # -- in and out -----------------------------------------------------------------------------------------------

    def put(self, armed: bool) -> None:
        """Arm or disarm everything that may be armed; with ``mix`` set, go on as ``start_mix`` does."""
        self.armed = armed
        self._stop_mix()
        if armed:
            self._refuse_compiled(self.swaps)
            self._recorder.set_writing(True)
            if self.mixer is not None and not self.mix:
                now = time.perf_counter_ns()  # the last draw's mark would hold on
                self._recorder.write(layout.KIND_MARK, layout.POINT_SAMPLING, now, now, layout.SAMPLING_ALL)
        for swap in self.swaps:
            swap.put("in" if armed and not self._dead(swap) else "out")
        put_nested([swap for swap in self.swaps if swap.state == ("in" if armed else "out")], armed)
        if armed and self.mix:
            self.start_mix()
        if not armed:
            self._recorder.set_writing(False)
            self.stamped = set()
            running = running_codes()
            self.in_flight = [swap.qualname for swap in self.swaps if swap.on_stack(running, True)]

    def try_again(self) -> None:
        """Drop the refusals that hold for one arming only."""
        for swap in self.swaps:
            if swap.reason:
                self.refused = [entry for entry in self.refused if entry["module"] != swap.qualname]
            swap.reason = ""

    def refuse_endless(self, hurried: Callable[[], bool]) -> None:
        """Put those functions out whose frame from before arming still runs: it keeps its old code.

        Waits up to ``GRACE_S`` seconds for such frames to return, less when ``hurried()``.
        """
        until = time.perf_counter() + GRACE_S
        while True:
            running = running_codes()
            stuck = [swap for swap in self.swaps if swap.state == "in" and swap.on_stack(running, False)]
            if not stuck or time.perf_counter() > until or hurried():
                break
            time.sleep(0.02)
        for swap in stuck:
            self._put_out(swap)
            swap.reason = "a frame of it has been running since before arming and keeps its old code"
            self.refuse(swap.qualname, swap.points, f"{swap.qualname}: {swap.reason}")

    def take_out(self, point: int, text: str) -> None:
        """Take one point out for good: it failed, with the exception ``text``."""
        if point not in self.disarmed:
            self.disarmed[point] = text
            self.pairs[point] = (time.perf_counter_ns, through)
        with self.changing:
            for swap in self.swaps:
                if point in swap.points:
                    self._rebind(swap)
                    if self._dead(swap):
                        self._put_out(swap)
            self._renew_mix()

    def leave(self) -> None:
        """Let everything go, for good; torch.compile gets its own entry back."""
        compilers.leave()
        self.left = True
        self._stop_mix()
        for swap in self.swaps:
            swap.forget()

    # -- in and out at random -------------------------------------------------------------------------------------

    @property
    def mixing(self) -> bool:
        """Whether the probes go in and out at random."""
        return self._recorder.on_cycle is not None

    def start_mix(self) -> None:
        """From the next cycle on, what is in goes in and out at random as ``mix`` says; out until then."""
        if self.mixing and self.mixer is not None:
            return self.mixer.redraw(self.mix["seed"], self.mix["permille"])
        self._stop_mix()
        if not self._cycles:
            return None
        recorder = self._recorder
        self.mixer = Mixer(
            self._live, recorder.write, self.mix["seed"], self.mix["permille"], recorder.take_engine_number,
            lambda: tuple(recorder.lanes), lambda: self.changing, self._news,
            lambda: recorder.spent_ns, any(name.endswith(".core") for name in self._cycles),
        )  # fmt: skip
        self.mixer.begin()
        recorder.on_cycle = self.mixer
        return None

    def _stop_mix(self) -> None:
        self._recorder.on_cycle = None
        if self.mixer is not None:
            with self.changing:
                self.mixer.end()

    def _renew_mix(self) -> None:
        """Have the mixer see at the next cycle what has changed besides."""
        if self.mixer is not None:
            self.mixer.renew()

    def _live(self) -> List[Swap]:
        return [swap for swap in self.swaps if not swap.reason and not self._dead(swap)]

    def _put_stamped(self, swaps: List[Swap]) -> None:
        """Before arming: put in the functions whose points go into graphs. They write no records."""
        chosen = [swap for swap in swaps if not self.stamped.isdisjoint(swap.points)]
        if not chosen or self.armed or self.left:
            return
        self._refuse_compiled(chosen)
        self._recorder.set_writing(False)
        for swap in chosen:
            swap.put("out" if self._dead(swap) else "in")

    def _dead(self, swap: Swap) -> bool:
        return bool(swap.compiled) or all(id in self.disarmed for id in swap.points)

    # -- torch.compile --------------------------------------------------------------------------------------------

    def tracer_loaded(self, _module: ModuleType, _spec: Any) -> None:
        """The tracer has just been imported: probed code is kept from it, and is out while it compiles."""
        try:
            compilers.follow(self._handed_to_compiler, self._compilation_begins, self._compilation_ends)
            with self.lock:
                for swap in self.swaps:
                    swap.keep_from_compilers()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """The tracer cannot be told what is probed: nothing may be in from now on, for good."""
        self._note("torch.compile", error)
        self._unfollowed = "torch.compile cannot be followed, and must not meet a probe"
        for swap in self.swaps:
            swap.compiled = swap.compiled or self._unfollowed
            swap.put("out")
        self._stop_mix()

    def _refuse_compiled(self, swaps: List[Swap]) -> None:
        """Put those functions out for good that torch.compile owns by now."""
        if not compilers.loaded():
            return
        for swap in swaps:
            swap.compiled = swap.compiled or self._unfollowed
        found = compilers.owned(code for swap in swaps for code in _all_originals(swap))
        self._put_compiled_out(swaps, found)

    def _put_compiled_out(self, swaps: List[Swap], reasons: Dict[int, str]) -> None:
        for swap in swaps:
            for code in _all_originals(swap) + list(nested_codes(swap.probed)):
                reason = reasons.get(id(code))
                if reason and not swap.compiled:
                    with self.changing:
                        swap.compiled = reason
                        self._put_out(swap)
                        self._renew_mix()
                    self.refuse(swap.qualname, swap.points, f"{swap.qualname}: {reason}")

    def _handed_to_compiler(self, codes: Set[int]) -> None:
        with self.lock:
            if codes and not self.left:
                self._put_compiled_out(self.swaps, dict.fromkeys(codes, compilers.HANDED))
                self._news()

    def _compilation_begins(self) -> None:
        try:
            with self.lock, self.changing:
                if self.mixer is not None:
                    self.mixer.pause()
                for swap in self.swaps:
                    swap.put("out")
                put_nested(self.swaps, False)
        except Exception as error:
            self._give_up(error)

    def _compilation_ends(self) -> None:
        try:
            with self.lock:
                if self.armed and not self.left:
                    self._refuse_compiled(self.swaps)
                    for swap in self._live():
                        swap.put("in")
                    put_nested(self._live(), True)
                    self._renew_mix()
                    self._news()
                else:
                    self._put_stamped(self.swaps)
        except Exception as error:
            self._note("torch.compile", error)


def _all_originals(swap: Swap) -> List[CodeType]:
    return [code for original in swap.originals for code in nested_codes(original)]
