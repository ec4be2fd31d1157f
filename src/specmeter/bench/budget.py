"""A load under a sampling budget: a short window to measure the probes' cost in, then the share that it allows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from specmeter.analysis.sampling import Share, sample_cost
from specmeter.bench.load import as_request, raise_failure
from specmeter.bench.prompts import Prompt
from specmeter.bench.schedule import Sending, interleaved
from specmeter.bench.session import Session
from specmeter.control.sampling import ASSUMED_PERCENT, Sampling, permille_for, sentence
from specmeter.engines import Setting
from specmeter.trace import RankTrace, Request, load_link

ENOUGH = 60  # sampled cycles from which the cost's interval is worth having
WINDOW_PERMILLE = 500  # as many cycles with probes as without tell their difference soonest
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
        """How to arm."""
        if self.percent is None:
            return None
        if self.share is not None:
            return self.draw(self.share)
        return Sampling(self.seed, WINDOW_PERMILLE, "half of the cycles have the probes, to measure their cost")

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


def share_for(budget_percent: float, rank: RankTrace, requests: Sequence[Request] = ()) -> Share:
    """The share that keeps the cost measured in ``rank``'s cycles inside the budget: budget over the cost's upper end.

    Assumed where fewer than 10 cycles a side ran.
    """
    cost = sample_cost(rank, requests)
    if cost is None or not math.isfinite(cost.high):
        return assumed_share(budget_percent, "too few cycles ran while it was to be measured")
    permille = permille_for(budget_percent, cost.high)
    why = (
        f"{permille / 10:g} % of the cycles are sampled, within a budget of {budget_percent:g} %: "
        f"a sampled cycle costs {cost.point:.2g} % (at most {cost.high:.2g} %)"
    )
    return Share(permille, budget_percent, cost, why)


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
        running.place.collect(running.link)
        rank = load_link(running.link.path, requests).main
        share = share_for(budget.percent, rank, requests)
        if int(np.count_nonzero(rank.cycles.drawn & (rank.cycles.probed == 1))) >= ENOUGH:
            break
    assert share is not None
    running.sample(budget.draw(share))
    return share
