"""The local client of another host: its start, how long it may take to begin, and its end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

from specmeter.control.signals import TERMINATING, terminations_interrupt
from specmeter.errors import Exit, SpecmeterError
from specmeter.hosts import keeper
from specmeter.hosts.address import Host

# The first words that reach the far Python: no quotes inside, so that every login shell passes them on whole.
_BOOT = "import sys;r=sys.stdin.buffer;exec(r.read(int(r.readline())))"
# What a client may take, and print, before our first words come from the other side.
START_S = 60.0
MOST_NOISE = 1 << 20
# How long a client may outlive a process that was killed outright: the far side tidies up through it meanwhile.
ORPHAN_S = 20.0


class Held:
    """Signals that would interrupt us wait from here to ``release``, which then raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self._came: list[int] = []
        self._old: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in TERMINATING:
                if callable(signal.getsignal(number)):
                    self._old[number] = signal.signal(number, lambda number, _frame: self._came.append(number))

    def release(self) -> None:
        """Signals count as before."""
        while self._old:
            signal.signal(*self._old.popitem())
        if self._came:
            raise KeyboardInterrupt


class Client(subprocess.Popen[bytes]):
    """A local client, with the keeper that ends it should this process be killed outright."""

    _keeper: subprocess.Popen[bytes] | None = None

    def keep(self) -> None:
        """Start the keeper. Without one, where no process can be started any more, all else works as ever."""
        words = [sys.executable, "-I", "-S", str(Path(keeper.__file__)), str(self.pid)]
        words += [str(keeper.start_ticks(self.pid)), str(ORPHAN_S)]
        with contextlib.suppress(OSError):
            self._keeper = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def let_go(self) -> None:
        """The client has ended: its keeper goes too."""
        if self._keeper is not None:
            self._keeper.kill()
            self._keeper.communicate()


def start_client(host: Host, python: str) -> tuple[Client, Held]:
    """The local client that runs ``python`` there, its three streams piped. Raises SpecmeterError (exit 5).

    Signals are held until the caller has it in hand and releases them: else one could leave it behind.
    """
    held = Held()
    try:
        child = Client(
            host.command([python, "-u", "-c", _BOOT]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # an interrupt is passed on by ending the stream, so that the far side tidies up
        )
    except OSError as error:
        held.release()
        raise SpecmeterError(f"{host.name} cannot be reached.", str(error), exit=Exit.ENVIRONMENT) from None
    child.keep()
    return child, held


class NotBegun(Exception):
    """The other side has not begun: it took too long, or printed too much before it did."""


def read_in_time(stream: IO[bytes], size: int, until: float) -> bytes:
    """At most ``size`` bytes of an unread pipe, none at its end. Raises NotBegun at ``until``, of time.monotonic."""
    left = until - time.monotonic()
    if left <= 0 or not select.select([stream], [], [], left)[0]:
        raise NotBegun(f"did not begin within {START_S:g} s")
    return os.read(stream.fileno(), size)


def end_client(child: Client, within_s: float) -> int:
    """Wait so long for the client's end, then kill it and all that it has started here; gives its exit code."""
    try:
        if within_s:
            child.wait(within_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        _kill_group(child)
    code = child.wait()
    child.let_go()
    return code


def _kill_group(child: Client) -> None:
    # It leads a group of its own, and is not reaped yet: the number is no other's. A control master of ssh that stays
    # is in another one.
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)


def signals_end_it() -> contextlib.AbstractContextManager[None]:
    """The client must not outlive a command that a signal ends. Signals are the main thread's."""
    main = threading.current_thread() is threading.main_thread()
    return terminations_interrupt() if main else contextlib.nullcontext()
