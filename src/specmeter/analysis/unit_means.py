"""Two runs' means over cycles, their difference and ratio, with intervals over the units that the cycles come in.

Cycles of one prompt (or server start) are alike, so the unit is the prompt (or start) and a mean over cycles is a ratio
of sums over units. Its sampling error follows from each unit's share of the deviation, w (y - mean) / sum of w, the
usual linearization of a ratio estimator (Cochran, Sampling Techniques, 3rd ed., sections 6.3 and 6.5). So the
difference is exactly that of the two means, and the ratio theirs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specmeter.analysis.stats import Interval
from specmeter.analysis.student import t_quantile

Floats = NDArray[np.float64]
LEVEL = 0.95


@dataclass(frozen=True)
class Units:
    """One side: the mean of each unit and its ``weights`` (cycles), arrays of one length above 0."""

    values: Floats
    weights: Floats

    @property
    def mean(self) -> float:
        """The mean over cycles."""
        return float(self.values @ self.weights / self.weights.sum())

    @property
    def parts(self) -> Floats:
        """Each unit's part in the mean's deviation; they add up to 0."""
        found: Floats = self.weights * (self.values - self.mean) / self.weights.sum()
        return found


def difference(a: Units, b: Units, paired: bool, unit: str) -> Interval:
    """B's mean less A's. ``paired``: the units are the same ones in the same order. No ends with fewer than two."""
    point, n = b.mean - a.mean, min(len(a.values), len(b.values))
    half = _half_width(a.parts, b.parts, paired)
    return Interval(point - half, point, point + half, LEVEL, _method(paired, "difference"), n, unit)


def ratio(a: Units, b: Units, paired: bool, unit: str) -> Interval:
    """B's mean over A's (both above 0), symmetric in the logarithm; no ends with fewer than two units."""
    point, n = b.mean / a.mean, min(len(a.values), len(b.values))
    half = _half_width(a.parts / a.mean, b.parts / b.mean, paired)
    method = _method(paired, "ratio")
    if not math.isfinite(half):
        return Interval(-math.inf, point, math.inf, LEVEL, method, n, unit)
    return Interval(point * math.exp(-half), point, point * math.exp(half), LEVEL, method, n, unit)


def _half_width(x: Floats, y: Floats, paired: bool) -> float:
    if min(len(x), len(y)) < 2:
        return math.inf
    if paired:
        n = len(x)
        return t_quantile(0.975, n - 1) * math.sqrt(n / (n - 1) * float(((y - x) ** 2).sum()))
    u, v = (len(z) / (len(z) - 1) * float((z**2).sum()) for z in (x, y))
    # Welch-Satterthwaite degrees of freedom.
    df = (u + v) ** 2 / (u**2 / (len(x) - 1) + v**2 / (len(y) - 1)) if u + v > 0 else float(len(x) + len(y) - 2)
    return t_quantile(0.975, round(max(df, 1.0), 3)) * math.sqrt(u + v)


def _method(paired: bool, what: str) -> str:
    return f"{'paired t' if paired else 'Welch t'} on the {what} of means over cycles"
