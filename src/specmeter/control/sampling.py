"""Which cycles have the probes in, when not all: a share drawn at random, so that the cost stays within a budget."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from specmeter.errors import SpecmeterError

DEFAULT_BUDGET_PERCENT = 1.0
# Taken for a sampled cycle's cost until it has been measured; the dearest seen is 18 % (SGLang, one H200, batch 1).
ASSUMED_PERCENT = 25.0
LEAST, MOST = 1, 900  # a tenth of the cycles always stays clean, to compare with


@dataclass(frozen=True)
class Sampling:
    """Which cycles have the probes in: for ``permille`` of 1000, by a hash of ``seed`` and the engine's own counter.

    ``why`` says what the share rests on, for people who look at the link.
    """

    seed: int
    permille: int
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        """As ``link.json`` has it."""
        return {"seed": self.seed, "permille": self.permille, "why": self.why}

    def line(self, generation: int) -> str:
        """The control line."""
        return f"mix {generation} {self.seed} {self.permille}"


def permille_for(budget_percent: float, cost_percent: float) -> int:
    """The share whose cost is the budget, both in percent of the cycle time, where one sampled cycle costs so much."""
    if cost_percent <= 0:
        return MOST
    return int(min(max(1000 * budget_percent / cost_percent, LEAST), MOST))


def assumed_sampling(budget_percent: float, reason: str) -> Sampling:
    """The share for a cost that is not known yet, with a seed of its own; ``reason`` says why it is not."""
    permille = permille_for(budget_percent, ASSUMED_PERCENT)
    return Sampling(secrets.randbelow(1 << 31), permille, sentence(permille, budget_percent, reason))


def sentence(permille: int, budget_percent: float, reason: str) -> str:
    """The share of an assumed cost in words."""
    return (
        f"{permille / 10:g} % of the cycles are sampled, within a budget of {budget_percent:g} %: "
        f"a sampled cycle is taken to cost {ASSUMED_PERCENT:g} % ({reason})"
    )


def checked_budget(percent: float) -> float:
    """The budget. Raises SpecmeterError for one that is no share of a cycle."""
    if not 0 < percent <= 100:
        raise SpecmeterError(
            f"--budget {percent:g} is out of range", "It is in percent of the cycle: above 0, at most 100."
        )
    return percent
