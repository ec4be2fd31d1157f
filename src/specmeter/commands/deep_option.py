"""``--deep N``: after the normal window, N decode cycles of each setting under torch's profiler."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Sequence
from typing import Any

from specmeter.analysis.deep_facts import deep_facts
from specmeter.bench.load import as_request, raise_failure
from specmeter.bench.place import Place
from specmeter.bench.prompts import Prompt
from specmeter.bench.schedule import Sending, interleaved
from specmeter.bench.session import Session
from specmeter.control.deep import DEADLINE_S, MOST_CYCLES, DeepAsked
from specmeter.control.link import Link
from specmeter.engines import Setting
from specmeter.errors import Exit, SpecmeterError
from specmeter.trace import Request, Trace
from specmeter.trace.deep import load_deep, save_deep
from specmeter.trace.plan import index_plan
from specmeter.trace.rundir import RunWriter, load

_EACH_S = 0.5  # a cycle of a large model on a slow machine
_END_S = 5.0
_A_LOAD = 2  # prompts sent at once before it is looked whether the window is over


def add_deep_argument(parser: argparse.ArgumentParser) -> None:
    """Add ``--deep``."""
    parser.add_argument(
        "--deep", type=int, metavar="N", help="afterwards N cycles under torch's profiler (CUPTI), never more"
    )


def deep_cycles(args: argparse.Namespace, place: Place) -> int:
    """How many cycles, 0 for no window. Raises SpecmeterError before anything is started."""
    cycles = getattr(args, "deep", None)
    if cycles is None:
        return 0
    if not 1 <= cycles <= MOST_CYCLES:
        raise SpecmeterError(f"--deep is {cycles}; it must be 1 to {MOST_CYCLES} cycles.")
    if len(place.names) > 1:
        raise SpecmeterError(
            "--deep works with one --on.",
            "The profiler's times of one host are not put on another one's clock.",
            "Run `specmeter profile --deep N --on HOST` for each of them.",
            Exit.REFUSED,
        )
    return int(cycles)


def take_windows(
    running: Session,
    settings: Sequence[Setting | None],
    prompts: Sequence[Prompt],
    send: Sending,
    cycles: int,
    writer: RunWriter,
) -> list[str]:
    """A window of each setting while its requests run, saved into the run; gives what the user has to know.

    A window that cannot be had is one of those sentences: the normal window stands. Raises SpecmeterError where the
    server fails.
    """
    if not cycles or running.link is None:
        return []
    notes: list[str] = []
    requests: list[Request] = []
    for setting in settings:
        asking = _Asking(running.place, running.link, cycles, "" if setting is None else setting.label)
        try:
            with running.armed():
                asking.start()
                while asking.is_alive():
                    requests += _drive(running, setting, prompts, send)
                requests += _drive(running, setting, prompts, send)  # cycles without it, just after
        finally:
            # Cut short, no cycle would end it; the probes are out by now, which does.
            if asking.ident is not None:
                asking.join(_END_S)
        notes += asking.notes()
    with writer.postponing():
        save_deep(running.link.path, writer.path, requests)
    return notes


def deep_document(writer: RunWriter, trace: Trace, warnings: list[str]) -> list[dict[str, Any]] | None:
    """``document["deep"]`` of the windows that a run and its baseline hold, None without any.

    A damaged window is a warning.
    """
    found: list[dict[str, Any]] = []
    for folder in (writer.path, writer.path / "children" / "baseline"):
        try:
            windows = load_deep(folder, trace if folder == writer.path else None)
            found += deep_facts(windows, index_plan(load(folder).plan)) if windows else []
        except SpecmeterError as error:
            warnings.append(f"{error.what}: {error.why}")
    return found or None


def _drive(running: Session, setting: Setting | None, prompts: Sequence[Prompt], send: Sending) -> list[Request]:
    calls = interleaved(prompts[:_A_LOAD], [setting], running.engine, send, tag="deep")
    outcomes = running.drive("deep window", calls).outcomes
    raise_failure(outcomes)
    return [as_request(outcome) for outcome in outcomes]


class _Asking(threading.Thread):
    """Asks for the window while the main thread sends requests."""

    def __init__(self, place: Place, link: Link, cycles: int, label: str) -> None:
        super().__init__(daemon=True)
        self._place = place
        self._arguments = (link, cycles, label, DEADLINE_S + _EACH_S * cycles)
        self._asked: DeepAsked | None = None
        self._error: SpecmeterError | None = None

    def run(self) -> None:
        """Ask, and keep what came of it."""
        try:
            self._asked = self._place.deep(*self._arguments)
        except SpecmeterError as error:
            self._error = error
        except OSError as error:
            self._error = SpecmeterError("There is no deep window.", str(error))

    def notes(self) -> list[str]:
        """What the user has to know of it."""
        if self._error is not None:
            return [f"{self._error.what} {self._error.why}"]
        if self._asked is None:
            return ["the deep window did not end"]
        lost = {**self._asked.failed, **self._asked.left_out}
        return [*self._asked.notes, *(f"no deep window of process {pid}: {reason}" for pid, reason in lost.items())]
