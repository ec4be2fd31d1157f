"""Progress of long work on standard error: one changing line on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import sys
import time

from specmeter.reporters.inert import inert, inert_lines

PLAIN_EVERY_S = 10.0


class Progress:
    """Says what is going on, how far it is, and how long it will take; nothing if ``quiet``."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._live = sys.stderr.isatty()
        self._open = False
        self._title = ""
        self._total = 0
        self._done = 0
        self._began = 0.0
        self._said = 0.0

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._quiet:
            return
        self.clear()
        print(inert_lines(text), file=sys.stderr, flush=True)

    def waiting(self, text: str) -> None:
        """What is being waited for; shown on a terminal only, or every ten seconds."""
        self._show(text)

    def start(self, title: str, total: int) -> None:
        """Begin counting to ``total``."""
        self._title, self._total, self._done, self._began = title, total, 0, time.monotonic()
        self._said = self._began
        self._show(f"{title}: 0 of {total}")

    def step(self, note: str = "") -> None:
        """One more is done."""
        self._done += 1
        spent = time.monotonic() - self._began
        left = spent / self._done * (self._total - self._done)
        tail = f", {note}" if note else ""
        self._show(f"{self._title}: {self._done} of {self._total}, {left:.0f} s left{tail}")

    def clear(self) -> None:
        """End the changing line."""
        if self._open:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
            self._open = False

    def _show(self, text: str) -> None:
        if self._quiet:
            return
        now = time.monotonic()
        if self._live:
            print(f"\r{inert(text[:118], 118)}\x1b[K", end="", file=sys.stderr, flush=True)
            self._open = True
        elif now - self._said >= PLAIN_EVERY_S:
            self._said = now
            print(inert_lines(text), file=sys.stderr, flush=True)
