"""How long one trial may take: its own limit and what is left of the budget, from its start on and not from healthy."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from specmeter.bench.session import Session

if TYPE_CHECKING:
    from specmeter.tune.trial import Observation

LEAST_S = 0.001


class BudgetSpent(Exception):
    """The budget's minutes ended a trial half-way. ``partial`` is what its whole blocks say, for this session alone.

    Nothing of it goes into the journal, so that a later session runs the trial.
    """

    def __init__(self, partial: Sequence[Observation] = ()) -> None:
        super().__init__("the budget's minutes are over")
        self.partial = tuple(partial)


@runtime_checkable
class Limited(Protocol):
    """A runner that ends a start, with BudgetSpent, once ``left_s`` seconds are over."""

    left_s: float


@dataclass
class Limit:
    """The clock of one trial: ``seconds`` from now on, of which ``budget_s`` are those that the budget has left."""

    seconds: float
    budget_s: float = math.inf
    struck: bool = False
    _began: float = field(default_factory=time.monotonic)

    @property
    def allowed_s(self) -> float:
        """Seconds that the whole trial may take."""
        return min(self.seconds, self.budget_s)

    @property
    def left_s(self) -> float:
        """Seconds from now to the end, never 0: a timer and a wait need a number above it."""
        return max(self._began + self.allowed_s - time.monotonic(), LEAST_S)

    @property
    def over(self) -> bool:
        """Whether the time is up, or was when the server was killed."""
        return self.struck or time.monotonic() - self._began >= self.allowed_s

    @property
    def is_budgets(self) -> bool:
        """Whether it is the budget that ends the trial, and not the trial's own limit."""
        return self.budget_s < self.seconds

    def wait_s(self, own: float | None, default: float) -> float:
        """How long to wait for a healthy server: the user's or the engine's limit, never longer than the trial's."""
        return min(own or default, self.left_s)

    @contextlib.contextmanager
    def kills(self, running: Session) -> Iterator[None]:
        """Kills the server when the time is up, so that its requests fail; the guardian ends what it started."""
        process = running.server.process

        def kill() -> None:
            self.struck = True
            if process is not None:
                process.kill()

        timer = threading.Timer(min(self.left_s, threading.TIMEOUT_MAX), kill)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
