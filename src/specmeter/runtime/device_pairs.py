"""Two clocks at the same moment: the host asks for the device's time between two looks at its own."""

from __future__ import annotations

from typing import Callable, NamedTuple, Optional

TRIES = 5
PATIENCE_NS = 400_000


class ClockPair(NamedTuple):
    """A moment on both clocks: the device's time lies within ``error_ns`` of ``host_ns``."""

    host_ns: int
    device_ns: int
    error_ns: int


def bracket(
    ask: Callable[[], None],
    answer: Callable[[], Optional[int]],
    clock: Callable[[], int],
    extra_ns: int = 0,
    tries: int = TRIES,
) -> Optional[ClockPair]:
    """The tightest of ``tries`` brackets, None when the device did not answer within ``PATIENCE_NS`` each time.

    ``ask()`` launches something that takes the device's time, ``answer()`` gives that time once it is there. The device
    took it between the launch and the answer, so half the bracket bounds the error; ``extra_ns`` is added for what the
    device's clock itself may be off (its step).
    """
    best: Optional[ClockPair] = None
    for _ in range(tries):
        before = clock()
        ask()
        found = answer()
        after = clock()
        while found is None:
            if after - before > PATIENCE_NS:
                return best  # the device is busy: what was found is all there is to get now
            found = answer()
            after = clock()
        error = (after - before + 1) // 2 + extra_ns
        if best is None or error < best.error_ns:
            best = ClockPair((before + after) // 2, found, max(error, 1))
    return best
