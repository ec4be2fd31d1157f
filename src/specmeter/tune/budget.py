"""How long a tune may search: minutes in all, server starts, and what of both is kept back for what comes after."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from specmeter.errors import SpecmeterError


@dataclass(frozen=True)
class Budget:
    """At most so many minutes in all and so many server starts for the search; None: no such limit.

    ``confirm_starts`` starts are kept back for the proof, whose time is taken from the minutes.
    """

    minutes: float | None = None
    trials: int | None = None
    confirm_starts: int = 9

    def __post_init__(self) -> None:
        if self.minutes is not None and not 0 < self.minutes < 1e6:
            raise SpecmeterError(f"--minutes is {self.minutes}; it must be above 0.")
        if self.trials is not None and self.trials < 1:
            raise SpecmeterError(f"--trials is {self.trials}; it must be 1 or more.")

    def left(self, spent_s: float, levels: int) -> Budget:
        """The budget of the next of ``levels`` concurrency levels to come: minutes are for all, starts for each."""
        if self.minutes is None:
            return self
        return replace(self, minutes=max(self.minutes - spent_s / 60, 0.01) / levels)

    def refusal(self, spent_s: float, starts: int, start_s: float, keep: int) -> str:
        """Which limit forbids one more start of ``start_s`` seconds, in words; empty: none.

        ``keep`` of the starts, and the time of those and of the proof, are kept back.
        """
        reserve = start_s * (1 + keep + self.confirm_starts)
        if self.minutes is not None and starts and spent_s + reserve > 60 * self.minutes:
            return f"the budget of {self.minutes:g} minutes, the proof's part kept back"
        if self.trials is not None and starts + keep >= self.trials:
            return f"the budget of {self.trials} starts"
        return ""

    def trial_s(self, spent_s: float, start_s: float) -> float:
        """Seconds that one more trial may take, its loading included; infinite where no minutes are given.

        All that is left, less the proof's part, yet twice an earlier start at the least: a trial that is somewhat
        slower than the others must not be lost to the reserve.
        """
        if self.minutes is None:
            return math.inf
        left = max(60 * self.minutes - spent_s, 0.0)
        return min(left, max(left - start_s * self.confirm_starts, 2 * start_s)) if start_s else left
