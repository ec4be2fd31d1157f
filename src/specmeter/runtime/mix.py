"""Puts the probes in and out at random from cycle to cycle: for sampling under a budget, and to measure their cost."""

from __future__ import annotations

import sys
import time
from _thread import RLock, get_ident
from collections import deque
from typing import Any, Callable, Deque, Dict, Iterator, List, Optional, Sequence, Set, Tuple

from . import layout
from .swap import Swap, nested_codes

IN, OUT, MIXED = 1, 0, 2
# How many cycles in a row are given up to a frame that keeps old code, before it is taken to be an endless one.
MOST_WAITS = 3
# After so many clean cycles nothing of a sampled one is left to do, as reading its device events.
QUIET = 4
WARM = 8
KEPT = 4096
ENGINE, RING, CLOCK = "iteration", "cycle", "clock"
SLOT_BITS = 27  # 134 ms


def drawn(number: int, seed: int, permille: int) -> bool:
    """Whether the probes are in for ``number``: a hash of it and the seed (splitmix64), in for ``permille`` of 1000.

    Source of the mixing function: Steele, Lea and Flood, Fast splittable pseudorandom number generators, OOPSLA 2014.
    A draw that is in at some share is in at every greater one.
    """
    mask = (1 << 64) - 1
    z = (number * 0x9E3779B97F4A7C15 + seed * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & mask
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
    return (z ^ z >> 31) % 1000 < permille


def _mean(numbers: List[int]) -> Optional[float]:
    kept = sorted(numbers)[: len(numbers) - (len(numbers) + 99) // 100]
    return sum(kept) / len(kept) if kept else None


class Mixer:
    """Called at the begin of each cycle; "out" means the original code objects, the cycle point alone staying in.

    The draw is a hash of the seed and of ``counter()``: the engine's own number of the cycle before, read there, so
    that all ranks draw alike. Where it gives None, or the number of last time, the ring's cycle number is used; with
    ``by_clock`` the time in slots of 134 ms, so that processes of one host which work on the same cycles, but do not
    count alike, agree but for the cycles at a slot's edge.

    Writes a mark at each change: 1 in, 0 out, from this cycle on; the mark's length is the time that the change took.
    A frame that is on the stack at a change, of this thread or of another that writes records (``threads`` gives their
    idents), keeps its old code until it returns: such cycles are marked 2 (a mixture, to be left out) until none is
    left. ``swaps`` is asked again after ``renew``. ``known`` is called once the kind of number is known. ``lock()`` is
    held during a change; while somebody else holds it, things stay as they are for a cycle. ``spent`` is the time that
    cycle points themselves have taken so far, ns.
    """

    def __init__(
        self,
        swaps: Callable[[], List[Swap]],
        write: Callable[..., None],
        seed: int,
        permille: int,
        counter: Callable[[], Optional[int]] = lambda: None,
        threads: Callable[[], Sequence[int]] = tuple,
        lock: Callable[[], Any] = RLock,
        known: Callable[[], None] = lambda: None,
        spent: Callable[[], int] = lambda: 0,
        by_clock: bool = False,
    ) -> None:
        self._swaps = swaps
        self._write = write
        self._seed = seed
        self._permille = permille
        self._counter = counter
        self._threads = threads
        self._lock = lock
        self._known = known
        self._spent = spent
        self._spent_at = spent()
        self._quiet = 0
        self._warm = WARM
        self._took: Deque[Tuple[int, int, bool]] = deque(maxlen=KEPT)
        self._ended = False
        self._paused = False
        self._last: Optional[int] = None
        self._now = MIXED
        self._side = OUT
        self._fresh = True
        self._waits = 0
        self._own = CLOCK if by_clock else RING
        self._drawn = {ENGINE: 0, self._own: 0}
        self._entered = {IN: 0, OUT: 0, MIXED: 0}
        self._codes: Dict[int, Tuple[int, str]] = {}
        self._moves: Dict[int, List[Tuple[Any, Any]]] = {IN: [], OUT: []}
        self._members: List[Swap] = []
        self._endless: Set[str] = set()

    def __call__(self, cycle: int, now_ns: int) -> None:
        self._account()
        wanted = IN if drawn(self._number(cycle, now_ns), self._seed, self._permille) else OUT
        if self._paused:
            return None
        if self._now == MIXED and not self._fresh:
            return self._settle(now_ns)
        if wanted != self._side or self._fresh:
            self._change(wanted, now_ns)
        return None

    def begin(self) -> None:
        """Take the probes out until the first draw. The caller holds the lock."""
        self._fresh = False
        self._look()
        self._place(OUT)

    def redraw(self, seed: int, permille: int) -> None:
        """From the next cycle on, another share; the one that runs ends as it began."""
        self._seed, self._permille = seed, permille

    def pause(self) -> None:
        """Change nothing until ``renew``, as code is being compiled. The caller holds the lock."""
        if not self._ended:
            self._paused = True
            self._mark(MIXED, time.perf_counter_ns())

    def renew(self) -> None:
        """Something else has put code in or out, or the functions are others: begin anew at the next cycle."""
        self._paused, self._fresh = False, True

    def end(self) -> None:
        """Change nothing more. The caller holds the lock."""
        self._ended = True

    def describe(self) -> Dict[str, Any]:
        """For the process's report: the share asked for, what draws went by, how often each state was entered."""
        by = ENGINE if self._drawn[ENGINE] >= self._drawn[self._own] else self._own
        return {
            "seed": self._seed,
            "permille": self._permille,
            "counter": by if any(self._drawn.values()) else None,
            "drawn_by": dict(self._drawn),
            "entered": {"in": self._entered[IN], "out": self._entered[OUT], "mixed": self._entered[MIXED]},
            "points": self._points(),
            "endless": sorted(self._endless),
        }

    def _account(self) -> None:
        """Add up what the cycle point took in the cycle that ends here; apart where no sampled one was near."""
        now = self._spent()
        took, self._spent_at = now - self._spent_at, now
        if self._warm:
            self._warm -= 1  # the first ones make the ring, lanes and a report
            return
        self._quiet = self._quiet + 1 if self._now == OUT else 0
        self._took.append((took, self._now, self._quiet > QUIET))

    def _points(self) -> Dict[str, Any]:
        """What cycle points took themselves in the last cycles, ns: means without the longest hundredth.

        The operating system may have taken the processor away in one of those.
        """
        took = list(self._took)
        clean = [ns for ns, _state, quiet in took if quiet]
        return {
            "cycles": len(took),
            "sampled": sum(state == IN for _ns, state, _quiet in took),
            "mean_ns": _mean([ns for ns, _state, _quiet in took]),
            "clean": len(clean),
            "clean_ns": _mean(clean),
        }

    # -- the draw -------------------------------------------------------------------------------------------------

    def _number(self, cycle: int, now_ns: int) -> int:
        number = self._counter()
        if number is not None and number == self._last:
            number = None  # a counter that stands still would draw the same for ever
        else:
            self._last = number
        kind = self._own if number is None else ENGINE
        self._drawn[kind] += 1
        if self._drawn[kind] == 2:
            self._known()
        if number is None:
            return cycle if self._own == RING else now_ns >> SLOT_BITS
        return number

    # -- the change -----------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Make the lists that a change goes through: it lies in the server's time."""
        self._codes, self._moves = {}, {IN: [], OUT: []}
        self._members = [swap for swap in self._swaps() if swap.cycle_only is not swap.probed]
        for swap in self._members:
            for function, original in zip(swap.functions, swap.originals):  # noqa: B905 (3.9)
                out = original if swap.cycle_only is None else swap.cycle_only
                self._moves[IN].append((function, swap.probed))
                self._moves[OUT].append((function, out))
                for code in nested_codes(original):
                    self._codes[id(code)] = (OUT, swap.qualname)
                for code in nested_codes(out):
                    self._codes[id(code)] = (OUT, swap.qualname)
            for code in nested_codes(swap.probed):
                self._codes[id(code)] = (IN, swap.qualname)

    def _change(self, side: int, now_ns: int) -> None:
        lock = self._lock()
        if not lock.acquire(False):
            return
        try:
            if not (self._ended or self._paused):
                self._put(side, now_ns)
        finally:
            lock.release()

    def _put(self, side: int, now_ns: int) -> None:
        if self._fresh:
            self._fresh = False
            self._look()
        mixed = any(self._old(side))
        self._place(side)
        self._mark(MIXED if mixed else side, now_ns)

    def _place(self, side: int) -> None:
        for function, code in self._moves[side]:
            if function.__code__ is not code:
                function.__code__ = code
        state = "in" if side == IN else "cycle"
        for swap in self._members:
            swap.state = state
        self._side, self._waits = side, 0

    def _settle(self, now_ns: int) -> None:
        old = set(self._old(self._side))
        if old and self._waits < MOST_WAITS:
            self._waits += 1
            return
        self._endless |= old
        self._mark(self._side, now_ns)

    def _old(self, side: int) -> Iterator[str]:
        """The functions with a frame on the stack whose code is not that of ``side``."""
        codes, endless = self._codes, self._endless
        for at in self._stacks():
            while at is not None:
                found = codes.get(id(at.f_code))
                if found is not None and found[0] != side and found[1] not in endless:
                    yield found[1]
                at = at.f_back

    def _stacks(self) -> Iterator[Any]:
        yield sys._getframe(1)
        threads = self._threads()
        if len(threads) > 1:
            here, frames = get_ident(), sys._current_frames()
            yield from (frames[ident] for ident in threads if ident != here and ident in frames)

    def _mark(self, state: int, now_ns: int) -> None:
        self._now = state
        self._entered[state] += 1
        self._write(layout.KIND_MARK, layout.POINT_SAMPLING, now_ns, time.perf_counter_ns(), state)
