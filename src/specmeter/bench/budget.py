"""A load under a sampling budget: a short window to measure the probes' cost in, then the share that it allows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specmeter.analysis.sampling import Share, point_percent, sample_cost, stamps_percent
from specmeter.bench.load import as_request, raise_failure
from specmeter.bench.prompts import Prompt
from specmeter.bench.schedule import Sending, interleaved
from specmeter.bench.session import Session
from specmeter.control.processes import processes
from specmeter.control.sampling import ASSUMED_PERCENT, LEAST, Sampling, permille_for, sentence
from specmeter.engines import Setting
from specmeter.trace import RankTrace, Request, load_link

ENOUGH = 60  # sampled cycles from which the cost's interval is worth having
# More would tell the difference sooner, but leave no stretch of clean cycles to see what the cycle point alone costs.
WINDOW_PERMILLE = 250
WINDOW_REQUESTS = 4


@dataclass(frozen=True)
class Budget:
    """What probes may cost, percent of the cycle time (None: every cycle is recorded); ``nvtx``: ranges beside spans.

    ``share`` is one that was measured before: no window is needed.
    """

    percent: float | None = None
    seed: int = 0
    nvtx: bool | None = None
    share: Share | None = None

    def first(self) -> Sampling | None:
        """How to arm: at the share that is known, or at that of the window."""
        if self.percent is None:
            return None
        return self.window() if self.share is None else self.draw(self.share)

    def window(self) -> Sampling:
        """How to sample while the cost is measured."""
        return Sampling(self.seed, WINDOW_PERMILLE, "a quarter of the cycles has the probes, to measure their cost")

    def draw(self, share: Share) -> Sampling:
        """How to sample at a share."""
        return Sampling(self.seed, share.permille, share.why)

    def again(self, share: Share | None) -> Budget:
        """The same for another start."""
        return replace(self, share=share)


def assumed_share(budget_percent: float, reason: str) -> Share:
    """The share for a cost that is not known; ``reason`` says why."""
    permille = permille_for(budget_percent, ASSUMED_PERCENT)
    return Share(permille, budget_percent, None, sentence(permille, budget_percent, reason))


def share_for(
    budget_percent: float,
    rank: RankTrace,
    requests: Sequence[Request] = (),
    reports: Sequence[Mapping[str, Any]] = (),
) -> Share:
    """The share that keeps the cost measured in ``rank``'s cycles inside the budget.

    It is what the budget leaves when the cycle point's own cost, and that of stamps in graphs, is paid, over the upper
    end of a sampled cycle's cost.
    ``reports`` are the processes' own, as of the end of the measurement. Assumed where fewer than 10 cycles a side ran.
    """
    cost = sample_cost(rank, requests, reports)
    if cost is None or not math.isfinite(cost.high):
        return assumed_share(budget_percent, "too few cycles ran while it was to be measured")
    base, stamps = point_percent(rank, requests, reports), stamps_percent(rank, requests, reports)
    left = budget_percent - (base or 0.0) - (stamps or 0.0)
    permille = permille_for(left, cost.high) if left > 0 else LEAST
    why = (
        f"{permille / 10:g} % of the cycles are sampled, within a budget of {budget_percent:g} %: "
        f"a sampled cycle costs {cost.point:.2g} % (at most {cost.high:.2g} %)"
    )
    why += f", the cycle point alone {base:.2g} % of every cycle" if base is not None else ""
    why += f", stamps in graphs {stamps:.2g} %" if stamps is not None else ""
    why += ", so the budget cannot be kept: this is the least" if left <= 0 else ""
    return Share(permille, budget_percent, cost, why, base)


def measured_share(
    running: Session, budget: Budget, prompts: Sequence[Prompt], settings: Sequence[Setting | None], send: Sending
) -> Share | None:
    """The share for an armed session, which is drawn from now on; None without a budget.

    Sends up to ``WINDOW_REQUESTS`` requests that count for nothing else. Raises SpecmeterError when they fail.
    """
    if budget.percent is None or running.link is None:
        return None
    if budget.share is not None:
        return budget.share
    requests: list[Request] = []
    share = None
    for number in range(WINDOW_REQUESTS):
        calls = interleaved([prompts[number % len(prompts)]], settings, running.engine, send, f"window{number}")
        result = running.drive("measuring the probes' cost", calls)
        raise_failure(result.outcomes)
        requests += [as_request(outcome) for outcome in result.outcomes]
        running.sample(budget.window())  # has every process report
        running.place.collect(running.link)
        rank = load_link(running.link.path, requests).main
        reports = [process.report for process in processes(running.link)]
        share = share_for(budget.percent, rank, requests, reports)
        if int(np.count_nonzero(rank.cycles.drawn & (rank.cycles.probed == 1))) >= ENOUGH:
            break
    assert share is not None
    running.sample(budget.draw(share))
    return share
