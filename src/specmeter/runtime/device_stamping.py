"""The stamp clock: stamps at points inside graph capture, at both ends of each graph, and outside graphs if asked for.

Everything here is asked for at a cycle's begin and waits for nothing. A failure of the driver or of torch turns this
clock off for good; ``reason`` says why, and the server's call goes on.
"""

from __future__ import annotations

import os
from typing import Any, Callable, Dict, List, Optional, Tuple

from . import layout
from .device_backend import Backend, of_the_clock
from .device_graphs import Graph, GraphHooks
from .device_pairs import ClockPair
from .device_spans import Joiner
from .device_stamp_cost import StampCost
from .device_stamps import END, FIRST, GRAPHS, ORDINALS, StampRing

COPY_EVERY_NS = 20_000_000
PAIR_EVERY_NS = 10_000_000_000
PAIR_AGAIN_NS = 100_000_000
MOST_CALLS = 4096
SET_UP_NS = 20_000_000
COST_NS = 20_000_000
# Graphs of our own inside a server are made only where this says so, until they have been seen to run on a card.
COST_ASKED = "SPECMETER_STAMPS_COST"
NEEDS_CUDA = "stamps need the CUDA driver"
Write = Callable[[int, int, int, int, int], None]
# A stamp that was launched in a capture: which graph, and which call of the point.
Inside = Tuple[Graph, int]


def _real_driver() -> Any:
    from .device_driver import Driver  # ctypes is not loaded for a process without a device

    return Driver()


class StampClock:
    """``backend()`` gives the accelerator or None, ``now_in()`` the cycle and device point of a replay to follow."""

    def __init__(
        self,
        write: Write,
        cycle: Callable[[], int],
        clock: Callable[[], int],
        backend: Callable[[], Optional[Backend]],
        now_in: Callable[[], Optional[Tuple[int, int]]],
        make_driver: Callable[[], Any] = _real_driver,
    ) -> None:
        self.reason = "no graph has been captured"
        self.off = False
        self.ready = False
        self.ring: Optional[StampRing] = None
        self.pairs = 0
        self.last_pair: Optional[ClockPair] = None
        self.error_ns: Optional[int] = None
        self.beside_ns = 0  # how far events that lie on this clock may be off it
        self._write, self._cycle, self._clock = write, cycle, clock
        self._backend, self._make_driver = backend, make_driver
        self._raw: Callable[[], int] = int
        self._calls: Dict[int, Tuple[int, int]] = {}
        self._number = 0
        self._copied_ns = self._paired_ns = 0
        self.cost: Optional[StampCost] = None
        self._no_cost = "no graph has been captured"
        self._cost_tried = False
        self._armed_at = (0, 0)
        self.hooks = GraphHooks(self._before_capture, self._begun, self._ending, now_in, self.stop, GRAPHS)
        self._joiner = Joiner(self.hooks.graphs, self._calls, self._give, self._give_graph)

    # -- set-up ---------------------------------------------------------------------------------------------------

    def follow(self, torch: Any) -> None:
        """Wrap the graph class of ``torch``, which the process has imported."""
        graph_class = getattr(getattr(torch, "cuda", None), "CUDAGraph", None)
        if self.off or self.hooks.installed or graph_class is None:
            return
        if getattr(getattr(torch, "version", None), "hip", None):
            self._end(f"graphs of ROCm take no stamps: {NEEDS_CUDA}")
        else:
            self.hooks.install(graph_class)

    def set_up(self) -> bool:
        """Make the ring if it is not there yet; whether stamps can be launched in this thread. Not in a capture.

        The device has to have emptied the ring, which is given 20 ms here once, and is asked about again later.
        """
        if self.off:
            return False
        try:
            backend = self._backend()
            if backend is None:
                return False
            if self.ring is None:
                if backend.name != "cuda" or backend.raw is None:
                    known = backend.name == "cuda"
                    self._end("this torch does not tell the current stream's handle" if known else NEEDS_CUDA)
                    return False
                self._raw = backend.raw
                self.ring = StampRing(self._make_driver())
                self.reason = ""
                until = self._clock() + SET_UP_NS
                while not self.ring.ready() and self._clock() < until:
                    pass
            self.ready = self.ring.ready()
            return self.ready and self.ring.ours()
        except Exception as error:
            self.stop(error)
            return False

    def _before_capture(self) -> bool:
        """``set_up``, and once, before the first capture, what a stamp costs if that was asked for.

        Without that cost stamps go on.
        """
        ready = self.set_up()
        if os.environ.get(COST_ASKED) != "1":
            self._no_cost = f"it was not asked for ({COST_ASKED}=1 in the server's environment)"
        elif ready and not self._cost_tried and self.ring is not None:
            self._cost_tried = True
            try:
                self.cost = self.ring.cost()
                until = self._clock() + COST_NS
                while not self.cost.read() and self._clock() < until:
                    pass
            except Exception as error:
                self._lose_cost(error)
        return ready

    def _lose_cost(self, error: BaseException) -> None:
        if not of_the_clock(error):
            raise error
        self.cost, self._no_cost = None, f"{type(error).__name__}: {error}"

    def pair_soon(self) -> None:
        """Tie this clock to the host's at the next cycle, not after ten seconds."""
        self._paired_ns = 0

    def stop(self, error: BaseException) -> None:
        """Turn this clock off because of ``error``, unless a signal handler of the server raised it: that goes on."""
        if not of_the_clock(error):
            raise error
        self._end(f"{type(error).__name__}: {error}")

    def _end(self, reason: str) -> None:
        self.off, self.reason = True, reason

    # -- in captures ----------------------------------------------------------------------------------------------

    def _begun(self, graph: Graph) -> None:
        self._stamp_graph(graph, FIRST)

    def _ending(self, graph: Graph) -> None:
        self._stamp_graph(graph, END)

    def _stamp_graph(self, graph: Graph, what: int) -> None:
        if self.off or self.ring is None or graph.astray:
            return
        try:
            self.ring.stamp(self._raw(), what, graph.key, 0)
            graph.stamps += 1
        except Exception as error:
            graph.astray = True
            self.stop(error)

    def open_inside(self, point: int) -> Optional[Inside]:
        """The stamp before a point's call while a graph is captured; None where none was launched."""
        graph = self.hooks.current
        if self.off or self.ring is None or graph is None or graph.astray:
            return None
        ordinal = graph.next_ordinal(point)
        if ordinal >= ORDINALS:
            return None
        try:
            self.ring.stamp(self._raw(), point, graph.key, ordinal)
        except Exception as error:
            graph.astray = True
            self.stop(error)
            return None
        graph.stamps += 1
        return graph, ordinal

    def close_inside(self, point: int, opened: Inside) -> None:
        """The stamp after it, if the same capture still goes on."""
        graph, ordinal = opened
        if self.off or self.ring is None or graph is not self.hooks.current:
            return
        try:
            self.ring.stamp(self._raw(), point | END, graph.key, ordinal)
            graph.stamps += 1
        except Exception as error:
            graph.astray = True
            self.stop(error)

    # -- outside graphs -------------------------------------------------------------------------------------------

    def open_call(self, point: int) -> Optional[int]:
        """A single stamp before a call; its number, None where it failed."""
        number = self._number = self._number % 0xFFFFFFFF + 1
        return number if self._stamp_call(point, number) else None

    def close_call(self, point: int, number: int) -> None:
        """The stamp after it."""
        if len(self._calls) >= MOST_CALLS:
            self._calls.clear()  # their rows were lapped
        self._calls[number] = (point, self._cycle())
        self._stamp_call(point | END, number)

    def _stamp_call(self, what: int, number: int) -> bool:
        if self.off or self.ring is None:
            return False
        try:
            self.ring.stamp(self._raw(), what, 0, 0, number)
        except Exception as error:
            self.stop(error)
            return False
        return True

    # -- out ------------------------------------------------------------------------------------------------------

    def armed(self) -> None:
        """Records are written from now on: calls and replays from before are followed no more."""
        self._copied_ns = self._paired_ns = 0
        self._joiner.forget()
        for graph in self.hooks.graphs.values():
            graph.followed.clear()
        self._armed_at = (self._stamps_run(), self._cycle())
        if self.ring is not None:
            self.ring.skip()

    def drain(self) -> None:
        """Write what has come."""
        ring = self.ring
        if self.off or ring is None or not self.ready:
            return
        try:
            if ring.in_flight:
                self._joiner.take(ring.rows())
                return
            now = self._clock()
            if now - self._copied_ns < COPY_EVERY_NS:
                return
            if now >= self._paired_ns and ring.tick_ns:
                self._pair(ring, now)
            else:
                self._copied_ns = now
                ring.start_copy()
        except Exception as error:
            self.stop(error)
        self._read_cost()

    def _read_cost(self) -> None:
        try:
            if self.cost is not None and self.cost.waiting:
                self.cost.read()
        except Exception as error:
            self._lose_cost(error)

    def _pair(self, ring: StampRing, now: int) -> None:
        found = ring.pair(self._clock)
        if found is not None:
            found = found._replace(error_ns=found.error_ns + self.beside_ns)
        self._paired_ns = now + (PAIR_AGAIN_NS if found is None else PAIR_EVERY_NS)
        if found is not None:
            self.pairs += 1
            self.last_pair = found
            self.error_ns = found.error_ns
            self._write(layout.KIND_CLOCK_PAIR, layout.POINT_NONE, *found)

    def _give(self, point: int, cycle: int, begin_ns: int, end_ns: int) -> None:
        self._write(layout.KIND_DEVICE_SPAN, point, begin_ns, end_ns, self._cycle() - cycle)

    def _give_graph(self, key: int, point: int, cycle: int, begin_ns: int, end_ns: int) -> None:
        back = min(self._cycle() - cycle, (1 << layout.GRAPH_KEY_SHIFT) - 1)
        self._write(layout.KIND_GRAPH_SPAN, point, begin_ns, end_ns, key << layout.GRAPH_KEY_SHIFT | back)

    def _stamps_run(self) -> int:
        """How many stamps the replays of all graphs have launched so far."""
        return sum(graph.stamps * graph.replays for graph in list(self.hooks.graphs.values()))

    def describe_cost(self) -> Dict[str, Any]:
        """What stamps in graphs cost: one's ns on the device, and how many a cycle has had since arming."""
        found = self.cost.describe() if self.cost is not None else None
        run, cycles = self._stamps_run() - self._armed_at[0], self._cycle() - self._armed_at[1]
        return {
            **(found or {"stamp_ns": None, "upper_ns": None, "reason": self._no_cost}),
            "stamps_a_cycle": run / cycles if cycles > 0 else None,
        }

    def describe(self) -> Dict[str, Any]:
        """For the process's report: why there are no stamps (empty: there are), what is stamped, what was lost."""
        ring, graphs = self.ring, list(self.hooks.graphs.values())
        astray: List[int] = [graph.key for graph in graphs if graph.astray]
        return {
            "reason": self.reason,
            "compiler": ring.compiler if ring is not None else None,
            "graphs": len(graphs),
            "graphs_left_out": self.hooks.left_out,
            "graphs_astray": astray,
            "stamps_in_graphs": {str(graph.key): graph.stamps for graph in graphs},
            "rows_read": ring.read if ring is not None else 0,
            "rows_lapped": ring.lapped if ring is not None else 0,
            "spans_lost": self._joiner.lost,
            "tick_ns": ring.tick_ns if ring is not None else None,
            "pairs": self.pairs,
            "pair_error_ns": self.error_ns,
        }
