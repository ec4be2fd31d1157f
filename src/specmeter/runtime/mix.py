"""Puts the probes in and out at random from cycle to cycle, so that their cost can be measured inside one run."""

from __future__ import annotations

from typing import Callable, List

from . import layout
from .swap import Swap, stack_codes

IN, OUT, MIXED = 1, 0, 2


def drawn(cycle: int, seed: int, permille: int) -> bool:
    """Whether the probes are in during ``cycle``: a hash of both (splitmix64), in for ``permille`` of 1000."""
    mask = (1 << 64) - 1
    z = (cycle * 0x9E3779B97F4A7C15 + seed * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & mask
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
    return (z ^ z >> 31) % 1000 < permille


class Mixer:
    """Called at the begin of each cycle; "out" means the original code objects, the cycle point alone staying in.

    Writes a mark at each change: 1 in, 0 out, from this cycle on. A frame that is on the stack at a change keeps its
    old code until it returns, so such a cycle is marked 2 (a mixture, to be left out), and the next one is clean.
    """

    def __init__(self, swaps: Callable[[], List[Swap]], write: Callable[..., None], seed: int, permille: int) -> None:
        self._swaps = swaps
        self._write = write
        self._seed = seed
        self._permille = permille
        self._now = MIXED
        self._settle = IN

    def __call__(self, cycle: int, now_ns: int) -> None:
        if self._now == MIXED:
            return self._mark(self._settle, now_ns)
        wanted = IN if drawn(cycle, self._seed, self._permille) else OUT
        if wanted == self._now:
            return None
        running = stack_codes()
        mixed = False
        for swap in self._swaps():
            if swap.cycle_only is swap.probed:
                continue
            mixed = mixed or swap.on_stack(running, True) or swap.on_stack(running, False)
            swap.put("in" if wanted == IN else "cycle")
        self._settle = wanted
        return self._mark(MIXED if mixed else wanted, now_ns)

    def _mark(self, state: int, now_ns: int) -> None:
        self._now = state
        self._write(layout.KIND_MARK, layout.POINT_SAMPLING, now_ns, now_ns, state)
