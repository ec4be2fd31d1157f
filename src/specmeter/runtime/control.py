"""The process's control line: one thread, blocked on a FIFO. It does not poll, and imports nothing."""

from __future__ import annotations

import _thread
import os
import select
import time
from typing import Callable, Optional

PAUSE = "pause"


class ControlLine:
    """Reads lines from the FIFO ``path`` and hands each to ``command``; ``command`` may return False to end the thread.

    ``deadline()`` gives the perf_counter second at which ``late()`` is to be called, or None. The thread is no
    ``threading.Thread``, so that the server's own counts of its threads stay as they are.
    """

    def __init__(
        self,
        path: str,
        command: Callable[[str], bool],
        deadline: Callable[[], Optional[float]],
        late: Callable[[], None],
    ) -> None:
        self.path = path
        self._command = command
        self._deadline = deadline
        self._late = late
        self._waiting = b""
        self._ended = _thread.allocate_lock()
        self._pausing = False
        os.mkfifo(path, 0o600)
        # Opened for both directions, so that a controller that closes it does not end the stream.
        self._handle = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def start(self) -> None:
        """Start the thread, unless one still runs (it did not end in time for a fork, or died without a word)."""
        self._pausing = False
        if not self._ended.acquire(False):
            return
        _thread.start_new_thread(self._run, ())

    def poke(self, line: str) -> None:
        """Put a line into the own FIFO, from any thread, without waiting."""
        try:
            os.write(self._handle, line.encode() + b"\n")
        except OSError:
            pass  # full: something else will wake the thread

    def pause(self) -> None:
        """End the thread before a fork (CPython warns of forking with threads), and wait for that at most a second."""
        self._pausing = True
        self.poke(PAUSE)
        if self._ended.acquire(timeout=1.0):
            self._ended.release()

    @property
    def pausing(self) -> bool:
        """Whether a fork waits for this thread: long work must stop."""
        return self._pausing

    def close(self, unlink: bool = True) -> None:
        """Give the FIFO back."""
        os.close(self._handle)
        if unlink:
            try:
                os.unlink(self.path)
            except FileNotFoundError:
                pass

    def _run(self) -> None:
        try:
            while True:
                line = self._next()
                if line == PAUSE:
                    if self._pausing:
                        return
                elif line is None:
                    self._late()
                elif not self._command(line):
                    return
        except Exception:
            pass  # the link is gone: nobody is left to tell
        finally:
            self._ended.release()

    def _next(self) -> Optional[str]:
        """The next line, or None when the deadline has passed."""
        while b"\n" not in self._waiting:
            at = self._deadline()
            left = None if at is None else max(0.0, at - time.perf_counter())
            if not select.select([self._handle], [], [], left)[0]:
                return None
            self._waiting += os.read(self._handle, 4096)
        line, self._waiting = self._waiting.split(b"\n", 1)
        return line.decode("ascii", "replace").strip()
