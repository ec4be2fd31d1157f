"""Sampling under a budget: what a sampled cycle costs, and what sampling came to in a run.

A sampled cycle has every probe in, an unsampled one the cycle point alone; which is which is drawn at random, so their
difference is what the probes cost. The cost of putting code in and out is part of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.analysis.overhead import comparable, drawn_overhead, near_prefill
from specmeter.analysis.stats import Interval, mean_interval
from specmeter.trace.build import RankTrace
from specmeter.trace.cycles import KEPT, PARTLY_PROBED
from specmeter.trace.requests import Request

_QUIET_ENOUGH = 10


@dataclass(frozen=True)
class Share:
    """The share of cycles to sample, in 1000, under a budget in percent of the cycle time.

    ``cost`` is what one sampled cycle costs, in percent of a clean cycle, changes of code included; None where it is
    only assumed, and ``why`` says the whole in words. ``point_percent``: what the cycle point alone costs every cycle.
    """

    permille: int
    budget_percent: float
    cost: Interval | None
    why: str
    point_percent: float | None = None

    def as_json(self) -> dict[str, Any]:
        """For a document."""
        return {**asdict(self), "cost": self.cost.as_json() if self.cost else None}


@dataclass(frozen=True)
class PointCost:
    """What cycle points took themselves, us: in a clean cycle with no sampled one near, and more for a sampled one.

    The second is spent in other cycles too: changes of code, and reading what a sampled cycle left on the device.
    """

    clean_us: float
    sampled_us: float


def point_cost(reports: Sequence[Mapping[str, Any]]) -> PointCost | None:
    """The dearest process's, as it added it up; None where none has."""
    found = [cost for report in reports if (cost := _point_cost(report.get("sampling"))) is not None]
    if not found:
        return None
    return PointCost(max(cost.clean_us for cost in found), max(cost.sampled_us for cost in found))


def _point_cost(said: object) -> PointCost | None:
    found = said.get("points") if isinstance(said, Mapping) else None
    if not isinstance(found, Mapping) or found.get("mean_ns") is None:
        return None
    mean, cycles = float(found["mean_ns"]), int(found["cycles"])
    if int(found["clean"]) < _QUIET_ENOUGH:
        return PointCost(mean / 1e3, 0.0)
    clean = float(found["clean_ns"])
    return PointCost(clean / 1e3, max(0.0, (mean - clean) * cycles / max(int(found["sampled"]), 1) / 1e3))


def point_percent(rank: RankTrace, requests: Sequence[Request], reports: Sequence[Mapping[str, Any]]) -> float | None:
    """What the cycle point alone costs every cycle, percent of a clean one; None where that is not known."""
    cost, clean = point_cost(reports), comparable(rank, requests) & (rank.cycles.probed == 0)
    if cost is None or not clean.any():
        return None
    return 100 * 1e3 * cost.clean_us / float(np.median(rank.cycles.dur_ns[clean]))


def sample_cost(
    rank: RankTrace, requests: Sequence[Request] = (), reports: Sequence[Mapping[str, Any]] = ()
) -> Interval | None:
    """What one sampled cycle costs, percent of a clean cycle; None where too few ran to tell.

    The difference of sampled and clean cycles, and what the sampled one costs its neighbours: the change of
    code that puts the probes in, and, where the processes' ``reports`` tell, reading what it left on the device. Cycles
    with a mixture of code, which come with the sampled ones, are counted as dear.
    """
    found = drawn_overhead(rank, requests)
    if found is None:
        return None
    partly, inside = _counts(rank, requests, np.ones(len(rank.cycles), bool))
    dear = 1 + partly / max(inside, 1)
    clean = comparable(rank, requests) & (rank.cycles.probed == 0)
    points = point_cost(reports)
    beside_us = max(rank.change_us, points.sampled_us if points is not None else 0.0)
    change = 100 * 1e3 * beside_us / float(np.median(rank.cycles.dur_ns[clean]))
    each = found.percent
    return replace(each, low=each.low + change, point=each.point * dear + change, high=each.high * dear + change)


def sampling_facts(
    rank: RankTrace,
    chosen: NDArray[np.bool_],
    requests: Sequence[Request],
    share: Share,
    reports: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """What a run from sampled cycles says of its sampling: shares, both kinds' cycle times, what it cost the run.

    ``chosen`` are the cycles that the profile is of, ``reports`` what the processes said of themselves last.
    """
    cycles = rank.cycles
    usable = clean_cycles(rank, chosen, requests)
    inside, outside = usable & (cycles.probed == 1), usable & (cycles.probed == 0)
    partly, entered = _counts(rank, requests, np.isin(cycles.request, np.unique(cycles.request[chosen])))
    total = int(np.count_nonzero(usable)) + partly
    cost, base = sample_cost(rank, requests, reports), point_percent(rank, requests, reports)
    part = entered / total if total else 0.0
    every = (base or 0.0) + (stamps_percent(rank, requests, reports) or 0.0)
    overall = None if cost is None else replace(
        cost, low=every + cost.low * part, point=every + cost.point * part, high=every + cost.high * part,
        method=f"{cost.method}, times the share of sampled cycles, and the cycle point's own time",
    )  # fmt: skip
    return {
        **share.as_json(),
        **_told(reports),
        "change_us": rank.change_us,
        "point_percent": base,
        "sampled": int(np.count_nonzero(inside)),
        "clean": int(np.count_nonzero(outside)),
        "mixtures": partly,
        "share_percent": 100 * part,
        "sampled_ms": _mean(rank, inside),
        "clean_ms": _mean(rank, outside),
        "sample_cost_percent": cost.as_json() if cost else None,
        "overall_percent": overall.as_json() if overall else None,
        "stamps": stamps_facts(rank, requests, reports),
    }


def cycle_times(rank: RankTrace, chosen: NDArray[np.bool_]) -> dict[str, Any]:
    """p50, p95 and count over cycles of either kind, sampled and clean."""
    p50, p95 = np.percentile(rank.cycles.dur_ns[chosen] / 1e6, [50, 95]).tolist()
    return {"p50_ms": p50, "p95_ms": p95, "count": int(np.count_nonzero(chosen))}


def clean_cycles(rank: RankTrace, chosen: NDArray[np.bool_], requests: Sequence[Request]) -> NDArray[np.bool_]:
    """Of ``chosen``, the cycles of either kind whose times can be set side by side; all of them if none was drawn."""
    usable = chosen & comparable(rank, requests)
    return usable if usable.any() else chosen


def _counts(rank: RankTrace, requests: Sequence[Request], among: NDArray[np.bool_]) -> tuple[int, int]:
    """How many cycles were a mixture of code, and how many sampled, ``among`` those away from prefill."""
    cycles, prefill = rank.cycles, near_prefill(rank, requests)
    drawn = cycles.drawn & ~prefill & among
    partly = drawn & (cycles.drop == PARTLY_PROBED)
    return int(np.count_nonzero(partly)), int(np.count_nonzero(drawn & (cycles.drop == KEPT) & (cycles.probed == 1)))


def _mean(rank: RankTrace, at: NDArray[np.bool_]) -> dict[str, Any] | None:
    return mean_interval(rank.cycles.dur_ns[at] / 1e6, "cycle").as_json() if int(np.count_nonzero(at)) > 1 else None


def _told(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the processes said: the number that draws went by, and functions that stayed as they were."""
    said = [report["sampling"] for report in reports if isinstance(report.get("sampling"), Mapping)]
    kinds = sorted({str(each["counter"]) for each in said if each.get("counter")})
    return {
        "counter": kinds[0] if len(kinds) == 1 else ("differs between processes" if kinds else None),
        "endless": sorted({str(name) for each in said for name in each.get("endless") or ()}),
    }


def stamps_percent(rank: RankTrace, requests: Sequence[Request], reports: Sequence[Mapping[str, Any]]) -> float | None:
    """What stamps in graphs cost every cycle, percent of a clean one, at its upper end; None where not measured."""
    percent: float | None = stamps_facts(rank, requests, reports)["upper_percent"]
    return percent


def stamps_facts(rank: RankTrace, requests: Sequence[Request], reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the stamps inside captured graphs cost, in the process where they cost most.

    ``stamp_us`` is one stamp's time on the device, as the process measured it with a clean graph against a stamped one,
    ``a_cycle`` how many a cycle had since arming. Their product, in ``percent`` of a clean cycle, is more than a
    host-bound cycle loses. None where it was not measured, and ``reason`` says why.
    """
    facts: dict[str, Any] = dict.fromkeys(("stamp_us", "a_cycle", "percent", "upper_percent"))
    costs = [cost for report in reports if (cost := _stamps_cost(report)) is not None]
    clean = comparable(rank, requests) & (rank.cycles.probed == 0)
    known = [cost for cost in costs if not isinstance(cost, str)]
    if not known or not clean.any():
        reason = next((cost for cost in costs if isinstance(cost, str) and cost), "")
        reason = "no clean cycle ran" if known else reason
        return {**facts, "reason": "Stamps in graphs: not measured in this run" + (reason and f": {reason}")}
    stamp_ns, upper_ns, number = max(known, key=lambda cost: cost[1] * cost[2])
    cycle_ns = float(np.median(rank.cycles.dur_ns[clean]))
    percents = {"percent": 100 * stamp_ns * number / cycle_ns, "upper_percent": 100 * upper_ns * number / cycle_ns}
    return {"stamp_us": stamp_ns / 1e3, "a_cycle": number, **percents, "reason": ""}


def _stamps_cost(report: Mapping[str, Any]) -> tuple[float, float, float] | str | None:
    """One process's: a stamp's ns and its upper end, and how many a cycle; else why not, as it says; None: nothing."""
    events = report.get("device_events")
    found = events.get("stamps_cost") if isinstance(events, Mapping) else None
    if not isinstance(found, Mapping):
        return None
    numbers = [found.get(name) for name in ("stamp_ns", "upper_ns", "stamps_a_cycle")]
    known = [float(number) for number in numbers if isinstance(number, int | float) and 0 <= number < math.inf]
    if len(known) < len(numbers):
        return str(found.get("reason") or "")
    stamp_ns, upper_ns, number = known
    return stamp_ns, max(stamp_ns, upper_ns), number
