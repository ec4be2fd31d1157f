"""Signals that end a command: turned into Ctrl-C's exception, and held back while things are put away."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

TERMINATING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def terminations_interrupt() -> Iterator[None]:
    """SIGTERM and SIGHUP end us like Ctrl-C, so that servers are stopped and probes taken out.

    One that is ignored stays so (``nohup``).
    """

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    numbers = [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is not signal.SIG_IGN]
    old = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@contextmanager
def terminations_wait() -> Iterator[None]:
    """Terminating signals that come while inside take effect at the end of it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, TERMINATING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
