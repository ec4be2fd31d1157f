"""The cost of a cycle as a function of draft steps, verify width and batch: each point modelled by itself.

A straight line through whole cycles under-predicted longer chains by 4 to 9 % on a real engine. So nothing is fitted to
totals: a draft step costs what it cost (times steps - 1: the first comes from the extend phase), the verify forward
runs along measured widths, what depends on the tokens gained has a slope in them, and the rest stays as it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specmeter.analysis.costmodel_data import Floats, Sample
from specmeter.analysis.costmodel_device import DeviceStep
from specmeter.analysis.moe import Experts, verify_work
from specmeter.errors import SpecmeterError
from specmeter.trace.plan import phase_of

# What a verify forward at a width that was not measured may differ from the line between measured ones. A choice, not
# a law: benchmarks/costmodel.py compares predictions with measurements.
VERIFY_SLACK = 0.03
# The name under which a predicted cycle holds what its draft steps take more on the device than those measured.
ON_DEVICE = "draft steps on the device"
# The name under which a predicted cycle holds what a what-if takes off it as a whole.
SAVED = "saved"
# A slope in the tokens gained is used only if it stands this many standard errors off zero.
SLOPE_T = 4.0


@dataclass(frozen=True)
class Knots:
    """Measured (x, ms) in order of x; straight between them, and beyond the last along the last segment, never falling.

    Work does not get cheaper by growing, so a falling last segment is noise.
    """

    x: tuple[float, ...]
    ms: tuple[float, ...]

    def at(self, x: float) -> float:
        """The value at ``x``, at least 0."""
        if len(self.x) == 1:
            return self.ms[0]
        if x <= self.x[0]:
            return max(0.0, self._along(0, x))
        if x >= self.x[-1]:
            return max(self.ms[-1], self._along(len(self.x) - 2, x))
        return self._along(bisect_right(self.x, x) - 1, x)

    def slack(self, x: float, floor: float) -> float:
        """How far off the value may be for not being measured, ms: 0 at a knot.

        Between knots up to half their difference (in the middle), beyond the ends all of the extrapolated change, and
        ``floor`` of the value besides; with one knot alone from flat to in proportion to ``x``, if ``floor`` is not 0.
        """
        if any(abs(x - knot) < 1e-5 for knot in self.x):
            return 0.0
        value = self.at(x)
        if len(self.x) == 1:
            # Nothing is known of the slope: from flat to in proportion, where it is known to depend on x at all.
            return value * abs(x / self.x[0] - 1) if floor else 0.0
        inside = self.x[0] < x < self.x[-1]
        if not inside:
            end = self.ms[0] if x < self.x[0] else self.ms[-1]
            return abs(value - end) + floor * value
        right = int(np.searchsorted(self.x, x))
        part = (x - self.x[right - 1]) / (self.x[right] - self.x[right - 1])
        return abs(self.ms[right] - self.ms[right - 1]) * min(part, 1 - part) + floor * value

    def of_first(self, x: float) -> float:
        """What share of the first knot's error the value has: 1 there, 0 at the second, beyond two along the line."""
        if len(self.x) == 1 or (len(self.x) > 2 and x > self.x[1]):
            return 0.0
        return abs(self.x[1] - x) / (self.x[1] - self.x[0])

    def _along(self, segment: int, x: float) -> float:
        (a, b), (u, v) = self.x[segment : segment + 2], self.ms[segment : segment + 2]
        return u + (v - u) * (x - a) / (b - a)


@dataclass(frozen=True)
class PointModel:
    """One named point: ``once`` ms a cycle along the verify work, ``per_token`` ms a token gained, ``step`` ms a draft
    step along the batch (None where the loop does not call it)."""

    name: str
    phase: str
    once: Knots
    per_token: float
    step: Knots | None

    def ms(self, work: float, tokens: float, steps: int, batch: float) -> float:
        """Milliseconds of a cycle."""
        loop = self.step.at(batch) * max(0, steps - 1) if self.step else 0.0
        return max(0.0, self.once.at(work) + self.per_token * tokens) + loop


@dataclass(frozen=True)
class Cost:
    """A predicted cycle: ms by point and by phase."""

    points: Mapping[str, float]
    phases: Mapping[str, float]

    @property
    def ms(self) -> float:
        """The whole cycle."""
        return float(sum(self.points.values()))

    def times(self, factor: float) -> Cost:
        """All of it times a factor."""
        return Cost(
            {name: factor * ms for name, ms in self.points.items()},
            {name: factor * ms for name, ms in self.phases.items()},
        )

    def less(self, ms: float) -> Cost:
        """The same without ``ms`` of it, wherever they were: device time has no place among points of the host."""
        if not ms:
            return self
        ms = min(ms, 0.99 * self.ms)
        return Cost({**self.points, SAVED: -ms}, {**self.phases, SAVED: -ms})


@dataclass(frozen=True)
class CostModel:
    """Models of all points, the target's experts (None: dense), and the batch that is meant where none is given.

    ``device`` is a draft step on the device, where that is what a cycle waits for.
    """

    models: tuple[PointModel, ...]
    batch: float
    experts: Experts | None
    device: DeviceStep | None = None

    def cycle(self, steps: int, tokens: float, batch: float | None = None, width: float | None = None) -> Cost:
        """The cycle of ``steps`` draft steps that gains ``tokens`` a sequence; ``width`` None: a chain's, steps + 1."""
        batch = self.batch if batch is None else batch
        work = verify_work((steps + 1 if width is None else width) * batch, self.experts)
        points = {m.name: m.ms(work, tokens, steps, batch) for m in self.models}
        phases: dict[str, float] = {}
        for model in self.models:
            phases[model.phase] = phases.get(model.phase, 0.0) + points[model.name]
        if self.device is not None and round(batch) == self.device.batch:
            points[ON_DEVICE], phases = self.device.more_ms(steps), self.device.into(phases, steps)
        return Cost(points, phases)

    def slack_ms(self, steps: int, batch: float | None = None, apart: float = 0.0, width: float | None = None) -> float:
        """How far off the cycle may be for what was not measured, ms, over all points; ``width`` as ``cycle`` has it.

        ``apart``: the narrowest verify comes from another start of the server, which may be off by that share.
        """
        batch = self.batch if batch is None else batch
        work = verify_work((steps + 1 if width is None else width) * batch, self.experts)
        slack = 0.0
        for model in self.models:
            slack += model.once.slack(work, VERIFY_SLACK if model.phase == "verify" else 0.0)
            if model.phase == "verify":
                slack += apart * model.once.ms[0] * model.once.of_first(work)
            if model.step is not None and steps > 1:
                slack += model.step.slack(batch, 0.0) * (steps - 1)
        return slack + (self.device.slack_ms(steps) if self.device is not None else 0.0)

    def scaled(self, factors: Mapping[str, float]) -> CostModel:
        """The same with points, or whole phases, times a factor (0: gone). Names match a point or a phase."""
        models = []
        for m in self.models:
            f = factors.get(m.name, factors.get(m.phase, 1.0))
            step = replace(m.step, ms=tuple(f * ms for ms in m.step.ms)) if m.step else None
            once = replace(m.once, ms=tuple(f * ms for ms in m.once.ms))
            models.append(replace(m, once=once, per_token=f * m.per_token, step=step))
        device = self.device and replace(self.device, factor=factors.get("draft", 1.0))
        return replace(self, models=tuple(models), device=device)

    def verify_parts(self, steps: int, batch: float | None = None) -> dict[str, float]:
        """The verify phase split by what it grows with, ms.

        ``once``: weights read once and launches, which a forward of one token costs too; ``width``: attention,
        arithmetic and, for a mixture, the further experts of a wider forward.

        A host clock sees no kernels, so that attention and experts apart need a device profile; they are not guessed.
        """
        batch = self.batch if batch is None else batch
        one, wide = verify_work(batch, self.experts), verify_work((steps + 1) * batch, self.experts)
        verify = [m for m in self.models if m.phase == "verify"]
        least = sum(m.once.at(one) for m in verify)
        total = sum(m.once.at(wide) for m in verify)
        return {"once": min(least, total), "width": max(0.0, total - least)}


def fit(
    samples: Sequence[Sample], experts: Experts | None = None, weights: Mapping[str, float] | None = None
) -> CostModel:
    """The model of the chains among ``samples`` (baseline cycles give the verify forward at width 1).

    ``weights`` counts each unit (prompt) so often: for the bootstrap. Raises SpecmeterError without a chain of drafts.
    """
    chains = [s for s in samples if s.steps > 0 and s.topk == 1]
    if not chains:
        raise SpecmeterError(
            "No chain of draft steps was recorded.",
            "Recorded: " + (", ".join(sorted({s.setting for s in samples})) or "nothing") + ".",
            "Profile with speculation on, top-k 1: what trees would bring follows from a chain too.",
        )
    plain = [s for s in samples if s.steps == 0]
    means = {id(s): _means(s, weights) for s in [*chains, *plain]}
    slopes = _token_slopes(chains, weights)
    models = []
    for at, name in enumerate(chains[0].names):
        phase = phase_of(name)
        rows = [(s, means[id(s)]) for s in chains + (plain if phase == "verify" else [])]
        slope = 0.0 if phase == "verify" else float(slopes[at])
        once = _knots(
            [(verify_work(s.width * s.batch, experts), m.once[at] - slope * m.tokens, m.count) for s, m in rows]
        )
        looped = [(s, means[id(s)]) for s in chains if s.steps > 1]
        step = [(s.batch, m.loop[at] / (s.steps - 1), m.count * (s.steps - 1)) for s, m in looped]
        used = any(ms > 0 for _, ms, _ in step)
        if used or any(ms != 0 for ms in once.ms):
            models.append(PointModel(name, phase, once, slope, _knots(step) if used else None))
    return CostModel(tuple(models), max(chains, key=lambda s: s.cycles).batch, experts)


@dataclass(frozen=True)
class _Means:
    count: float
    once: Floats
    loop: Floats
    tokens: float


def _means(sample: Sample, weights: Mapping[str, float] | None) -> _Means:
    w = unit_weights(sample, weights)
    count = max(float(w @ sample.count), 1e-9)
    return _Means(count, w @ sample.once_ms / count, w @ sample.loop_ms / count, float(w @ sample.tokens) / count)


def unit_weights(sample: Sample, weights: Mapping[str, float] | None) -> Floats:
    """How often each unit of ``sample`` counts; 1 each where None."""
    if weights is None:
        return np.ones(len(sample.units))
    return np.array([weights.get(unit, 0.0) for unit in sample.units])


def _token_slopes(chains: Sequence[Sample], weights: Mapping[str, float] | None) -> Floats:
    """ms a token gained for every point: least squares within the settings, pooled over them; 0 where it is noise.

    The extend phase runs over the tokens that were kept, and the server turns them into text, so their cost follows
    the accept length and not the step count. Noise is judged by the spread of the settings' own slopes.
    """
    cross = np.zeros(len(chains[0].names))
    square = 0.0
    own: list[NDArray[np.float64]] = []
    for s in chains:
        w = unit_weights(s, weights)
        count = float(w @ s.count)
        if count < 2:
            continue
        mean = float(w @ s.tokens) / count
        sq = float(w @ s.tokens_sq) - count * mean**2
        xy = w @ s.tokens_once - mean * (w @ s.once_ms)
        if sq > 1e-9:
            own.append(xy / sq)
            cross, square = cross + xy, square + sq
    if square == 0:
        return cross
    pooled = cross / square
    if len(own) < 3:
        # Too few settings to judge by: only the phases that are known to depend on it.
        known = np.array([phase_of(name) in ("extend", "schedule", "kv") for name in chains[0].names])
        return np.where(known & (pooled > 0), pooled, 0.0)
    error = np.std(np.array(own), axis=0, ddof=1) / np.sqrt(len(own))
    return np.where((pooled > SLOPE_T * error) & (pooled > 0), pooled, 0.0)


def _knots(points: Sequence[tuple[float, float, float]]) -> Knots:
    """Knots from (x, ms, weight), equal x joined by weight."""
    grouped: dict[float, list[tuple[float, float]]] = {}
    for x, ms, weight in points:
        grouped.setdefault(round(x, 6), []).append((ms, weight))
    xs = sorted(grouped)
    values = [sum(m * w for m, w in grouped[x]) / sum(w for _, w in grouped[x]) for x in xs]
    return Knots(tuple(xs), tuple(float(v) for v in values))
