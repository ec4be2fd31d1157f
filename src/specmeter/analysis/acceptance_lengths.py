"""Accept lengths at any step count, from the chains that were recorded."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from specmeter.analysis.acceptance_model import Length, conditional_acceptance, expected_length
from specmeter.analysis.costmodel import unit_weights
from specmeter.analysis.costmodel_data import Floats
from specmeter.analysis.costmodel_evidence import Assumed, Evidence
from specmeter.errors import SpecmeterError


class Lengths:
    """Accept lengths at any step count.

    Every shorter chain follows from the longest; where shorter ones were measured too, what they differ by (cycles then
    begin at other places of the text) is carried over to the step counts between, in a straight line.
    """

    def __init__(self, evidence: Evidence, weights: Mapping[str, float] | None, change: Assumed) -> None:
        measured = self._measured(evidence, weights)
        longest = max(measured, default=0)
        if longest:
            self.rates = conditional_acceptance(measured[longest])
        elif evidence.acceptance:
            self.rates = np.asarray(evidence.acceptance)
        elif change.acceptance:
            self.rates = np.asarray(change.acceptance)
        else:
            raise SpecmeterError(
                "No acceptance was recorded in this run.",
                "The accepted counts of its cycles were not read, so that no accept length can be predicted.",
                "Profile again with a recipe that reads them, or give them: --acceptance 0.7,0.5,0.4",
            )
        own = {k: 1 + float(kept[1:].sum() / kept[0]) for k, kept in measured.items()}
        self._offsets = [(0.0, 0.0), *((float(k), own[k] - self._plain(k).tokens) for k in sorted(own))]
        if change.acceptance:
            self.rates, self._offsets = np.asarray(change.acceptance), [(0.0, 0.0)]
        # Positions that no draft reached have no rate; a chain as long as a measured one is measured all the same.
        self._longest = max(longest, len(self.rates))
        if change.length is not None:
            self._bend(evidence.now, change.length)

    @staticmethod
    def _measured(evidence: Evidence, weights: Mapping[str, float] | None) -> dict[int, Floats]:
        found: dict[int, Floats] = {}
        for s in evidence.chains:
            kept = unit_weights(s, weights) @ s.kept
            if kept[0] > 0:
                found[s.steps] = found.get(s.steps, np.zeros(s.steps + 1)) + kept
        return found

    def _plain(self, steps: int) -> Length:
        return expected_length(self.rates, steps)

    def at(self, steps: int) -> Length:
        """The accept length of a chain of ``steps``."""
        found = self._plain(steps)
        off = float(np.interp(steps, [k for k, _ in self._offsets], [v for _, v in self._offsets]))
        floor = 1.0
        return Length(
            max(floor, found.tokens + off), max(floor, found.low + off), max(floor, found.high + off),
            found.extrapolated and steps > self._longest,
        )  # fmt: skip

    def _bend(self, now: int, length: float) -> None:
        """All rates to one power, so that the present chain has ``length``: the shape over positions is kept."""
        self._offsets = [(0.0, 0.0)]
        if not 1 <= length < now + 1:
            raise SpecmeterError(
                f"An accept length of {length} cannot be had with {now} draft steps.",
                f"It lies between 1 and {now + 1}: the drafts and the target's own token.",
            )
        rates, low, high = np.clip(self.rates, 1e-6, 1 - 1e-6), 0.0, 60.0
        for _ in range(80):
            power = (low + high) / 2
            if expected_length(rates**power, now).tokens > length:
                low = power
            else:
                high = power
        self.rates = rates**power


def recorded_acceptance(evidence: Evidence) -> tuple[float, ...]:
    """Acceptance by position of the longest chain recorded: c1, c2, ... as shares of those that kept the one before."""
    return tuple(float(c) for c in Lengths(evidence, None, Assumed()).rates)
