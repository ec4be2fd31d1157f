"""Speed against draft steps: cycle, accept length, tokens a second, break-even and the value of one more step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from specmeter.analysis.acceptance_lengths import Lengths
from specmeter.analysis.acceptance_model import Length
from specmeter.analysis.costmodel import Cost, CostModel, fit, unit_weights
from specmeter.analysis.costmodel_data import Floats
from specmeter.analysis.costmodel_evidence import Assumed, Evidence
from specmeter.analysis.stats import Interval
from specmeter.analysis.student import t_quantile
from specmeter.errors import SpecmeterError

DRAWS = 200
LEVEL = 0.95
METHOD = "bootstrap over prompts with Student's t, and the model's slack added"


@dataclass(frozen=True)
class Row:
    """One step count. ``status``: measured, interpolated (between measured ones) or extrapolated.

    ``cycle_ms``, ``tokens`` (accept length), ``tok_s`` (a sequence), ``break_even`` (tokens; None without a baseline)
    and ``speedup`` (over the baseline) are intervals; ``gain`` is tok/s over that of the steps at present. ``more_ms``
    and ``more_tokens`` are what the last draft step of the chain costs and brings.
    """

    steps: int
    status: str
    cycle_ms: Interval
    tokens: Interval
    tok_s: Interval
    break_even: Interval | None
    speedup: Interval | None
    gain: Interval
    phases_ms: Mapping[str, float]
    more_ms: float | None
    more_tokens: float | None


@dataclass(frozen=True)
class Point:
    """A predicted cycle with what it gains, the baseline step (ms) and how far off the cycle may be (ms)."""

    cost: Cost
    length: Length
    base: float | None
    slack_ms: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second of a sequence."""
        return 1000 * self.length.tokens / self.cost.ms

    @property
    def beyond(self) -> tuple[float, float, float]:
        """What is not in the bootstrap, as changes of logarithms: the cycle's slack, accept length down and up."""
        slack = math.log1p(self.slack_ms / self.cost.ms) if self.cost.ms else 0.0
        length = self.length
        return slack, math.log(length.tokens / length.low), math.log(length.high / length.tokens)


def drawn_weights(evidence: Evidence, seed: int) -> Iterator[dict[str, float]]:
    """How often each prompt counts in each draw of the bootstrap; none of them with one prompt alone."""
    units = sorted({unit for s in evidence.samples for unit in s.units})
    rng = np.random.default_rng(seed)
    for _ in range(DRAWS if len(units) > 1 else 0):
        yield dict(zip(units, rng.multinomial(len(units), [1 / len(units)] * len(units)).tolist(), strict=True))


def curve(evidence: Evidence, steps: Sequence[int], assumed: Assumed | None = None, seed: int = 0) -> tuple[Row, ...]:
    """A row for each step count; ``assumed`` holds for all of them, ``gain`` is over the present as it is now.

    Intervals: prompts are drawn with replacement, the same for every setting, the model fitted anew each time
    (Efron and Tibshirani, An Introduction to the Bootstrap, chapter 6; standard error times Student's t over prompts).
    """
    change = assumed or Assumed()
    wanted = sorted({k for k in steps if k > 0} | {evidence.now})
    shown = sorted({*wanted, *(k - 1 for k in wanted if k > 1)})
    centre, present = Draw(evidence, None).points(shown, change, slack=True)
    units = len({unit for s in evidence.samples for unit in s.units})
    draws: dict[int, list[tuple[float, ...]]] = {k: [] for k in wanted}
    for weights in drawn_weights(evidence, seed):
        try:
            found, rate = Draw(evidence, weights).points(wanted, change)
        except (SpecmeterError, ZeroDivisionError):
            continue  # a draw that holds no cycle of a setting says nothing
        for k, point in found.items():
            draws[k].append(logs_of(point, rate))
    rows = [
        row_of(k, evidence, centre[k], present, np.array(draws[k]), units, centre.get(k - 1), assumed) for k in wanted
    ]
    return tuple(row for row in rows if row.steps in steps or row.steps == evidence.now)


class Draw:
    """The model fitted to one draw of prompts (``weights`` None: all of them, once)."""

    def __init__(self, evidence: Evidence, weights: Mapping[str, float] | None) -> None:
        self.evidence = evidence
        self.weights = weights
        self.model = replace(fit(evidence.samples, evidence.experts, weights), device=evidence.device_step)
        self._ratios: dict[int, float] = {}

    def points(self, steps: Sequence[int], change: Assumed, slack: bool = False) -> tuple[dict[int, Point], float]:
        """A point for each of ``steps`` under ``change``, and tokens a second of the present as it is."""
        evidence = self.evidence
        model = self.model.scaled(change.factors) if change.factors else self.model
        lengths = Lengths(evidence, self.weights, change)
        found = {
            k: self._point(model, lengths.at(k), k, change.batch, slack, change.saved_at(k, evidence.now))
            for k in steps
        }
        if change == Assumed() and evidence.now in found:
            return found, found[evidence.now].rate
        plain = Lengths(evidence, self.weights, Assumed(acceptance=None))
        return found, self._point(self.model, plain.at(evidence.now), evidence.now, None, False).rate

    def _point(
        self, model: CostModel, length: Length, steps: int, batch: float | None, slack: bool, saved_ms: float = 0.0
    ) -> Point:
        ratio = self._ratios.get(steps)
        if ratio is None:
            ratio = self._ratios[steps] = calibration(self.evidence, self.model, steps, self.weights)
        cost = model.cycle(steps, length.tokens, batch).times(ratio).less(saved_ms)
        base = baseline_ms(self.evidence, self.weights, batch)
        return Point(cost, length, base, ratio * model.slack_ms(steps, batch, self.evidence.apart) if slack else 0.0)


def baseline_ms(evidence: Evidence, weights: Mapping[str, float] | None, batch: float | None) -> float | None:
    """The baseline step, ms; that of another batch than the usual one only where it was measured."""
    plain = evidence.plain(batch)
    if plain is None:
        return evidence.baseline_ms.point if evidence.baseline_ms and batch is None else None
    w = unit_weights(plain, weights)
    return float(w @ plain.cycle_ms) / float(w @ plain.count)


def calibration(evidence: Evidence, model: CostModel, steps: int, weights: Mapping[str, float] | None) -> float:
    """The measured cycle over the model's where this chain was measured, so that the curve meets it; else 1."""
    of = [s for s in evidence.chains if s.steps == steps and round(s.batch) == round(evidence.batch)]
    count = sum(float(unit_weights(s, weights) @ s.count) for s in of)
    if not count:
        return 1.0
    measured = sum(float(unit_weights(s, weights) @ s.cycle_ms) for s in of) / count
    modelled = 0.0
    for s in of:
        w = unit_weights(s, weights)
        own = float(w @ s.count)
        if own:
            modelled += model.cycle(steps, float(w @ s.tokens) / own, s.batch).ms * own / count
    return measured / modelled


def logs_of(point: Point, present: float) -> tuple[float, ...]:
    """What the bootstrap draws of a point, as logarithms; ``present`` tokens a second of the present steps."""
    base = point.base or 1.0
    ms, rate = point.cost.ms, point.rate
    return tuple(math.log(v) for v in (ms, point.length.tokens, rate, ms / base, rate * base, rate / present))


def row_of(
    k: int,
    evidence: Evidence,
    point: Point,
    present: float,
    draws: Floats,
    units: int,
    before: Point | None,
    assumed: Assumed | None,
) -> Row:
    """The row of a point with its intervals; ``draws`` [draws, 6] are the bootstrap's ``logs_of``."""
    slack, down, up = point.beyond
    if len(draws) >= DRAWS // 2:
        se = draws.std(axis=0, ddof=1) * math.sqrt(units / (units - 1))
        half = se * t_quantile(0.5 + LEVEL / 2, units - 1)
    else:
        half = np.full(6, math.inf)

    def interval(value: float, at: int, lower: float, upper: float) -> Interval:
        low = value * math.exp(-half[at] - lower) if math.isfinite(half[at]) else -math.inf
        high = value * math.exp(half[at] + upper) if math.isfinite(half[at]) else math.inf
        return Interval(low, value, high, LEVEL, METHOD, units, "prompt")

    cycle, base = point.cost.ms, point.base
    own = 0.0
    if base is not None and evidence.baseline_ms and evidence.plain() is None:
        own = _half(evidence.baseline_ms)
    own += math.log1p(evidence.apart)
    first = Length(1.0, 1.0, 1.0, False)
    return Row(
        k,
        _status(k, evidence, point, assumed),
        interval(cycle, 0, slack, slack),
        interval(point.length.tokens, 1, down, up),
        interval(point.rate, 2, slack + down, slack + up),
        interval(cycle / base, 3, slack + own, slack + own) if base else None,
        interval(point.rate * base / 1000, 4, slack + down + own, slack + up + own) if base else None,
        interval(point.rate / present, 5, slack + down, slack + up),
        point.cost.phases,
        cycle - before.cost.ms if before else None,
        point.length.tokens - (before.length if before else first).tokens,
    )


def _half(interval: Interval) -> float:
    """Half width of an interval as a change of the logarithm; 0 where it has none."""
    if not (math.isfinite(interval.low) and math.isfinite(interval.high)) or interval.low <= 0:
        return 0.0
    return math.log(interval.high / interval.low) / 2


def _status(k: int, evidence: Evidence, point: Point, assumed: Assumed | None) -> str:
    known = sorted(s.steps for s in evidence.chains)
    if assumed is not None and assumed != Assumed():
        return "what if"
    if k in known:
        return "measured"
    # Below the shortest chain the verify forward still lies between the baseline's and that chain's.
    if k < known[-1] and not point.length.extrapolated:
        return "interpolated" if k > known[0] or any(s.steps == 0 for s in evidence.samples) else "extrapolated"
    return "extrapolated"


def best(rows: Sequence[Row]) -> Row:
    """The row with the most tokens a second."""
    return max(rows, key=lambda row: row.tok_s.point)
