"""Predicted speed over draft steps, from the cost model where a run holds enough for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from specmeter.analysis.costmodel_curve import curve
from specmeter.analysis.costmodel_explain import evidence_of
from specmeter.errors import SpecmeterError
from specmeter.reporters.levers import shorter_chains
from specmeter.trace.rundir import Run

MOST_STEPS = 8


@dataclass(frozen=True)
class Prediction:
    """Predicted decode rate of a chain, tok/s, its 95 % ends (None: not known), and whether its steps were measured."""

    steps: int
    rate: float
    low: float | None
    high: float | None
    status: str


def predict(run: Run, upto: int = MOST_STEPS) -> tuple[list[Prediction], str]:
    """Predictions from one profiled run alone, and the method in words.

    The cost model's curve; where the run lacks what it needs, the shorter chains of the profile itself.
    """
    try:
        rows = curve(evidence_of([run]), range(1, upto + 1))
    except (SpecmeterError, ValueError, KeyError, ZeroDivisionError):
        chains = [
            Prediction(c.steps, c.tokens_per_s, None, None, "from the profile") for c in shorter_chains(run.analysis)
        ]
        return chains, "acceptance by position and the time of each draft step, verify as it was"
    found = []
    for row in rows:
        ends = (row.tok_s.low, row.tok_s.high)
        low, high = ends if all(math.isfinite(end) for end in ends) else (None, None)
        found.append(Prediction(row.steps, row.tok_s.point, low, high, row.status))
    return found, "the cost model of `specmeter explain`, from the profiled run alone"
