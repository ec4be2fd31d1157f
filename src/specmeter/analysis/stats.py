"""Intervals, verdicts and tests. A claim names its unit: what was drawn independently of the rest.

Cycles of one request are alike, so means over cycles take the request (or block) as the unit; settings inside one
server start are compared block by block; across starts the start is the unit.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmeter.analysis.student import t_cdf, t_quantile

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval.

    ``low`` and ``high`` are infinite where too few units allow no interval; ``n`` counts units.
    """

    low: float
    point: float
    high: float
    level: float
    method: str
    n: int
    unit: str

    def as_json(self) -> dict[str, Any]:
        """All fields; an infinite end becomes null."""
        fields = asdict(self)
        for end in ("low", "point", "high"):
            fields[end] = fields[end] if math.isfinite(fields[end]) else None
        return fields


@dataclass(frozen=True)
class Drift:
    """A straight line through the logarithms over time: the change from first to last in percent, and its p-value."""

    percent: float
    p_value: float
    n: int


def mean_interval(values: ArrayLike, unit: str, level: float = 0.95) -> Interval:
    """Student's t interval on the mean of independent units."""
    x = np.asarray(values, float)
    return _t_interval(float(x.mean()), _se(x), len(x) - 1, level, "t on the mean", len(x), unit)


def cluster_ratio(numerator: ArrayLike, denominator: ArrayLike, unit: str, level: float = 0.95) -> Interval:
    """Interval on sum(numerator) / sum(denominator) with one entry a cluster (request, block).

    Linearized variance of a ratio estimator over clusters (Cochran, Sampling Techniques, 3rd edition, 6.3 and 9A.2).
    """
    num, den = np.asarray(numerator, float), np.asarray(denominator, float)
    point = float(num.sum() / den.sum())
    count = len(num)
    residual = num - point * den
    se = math.sqrt(count / (count - 1) * float(residual @ residual)) / float(den.sum()) if count > 1 else math.inf
    return _t_interval(point, se, count - 1, level, "ratio over clusters, t", count, unit)


def paired_ratio(a: ArrayLike, b: ArrayLike, unit: str, level: float = 0.95) -> Interval:
    """Interval on a/b for pairs measured together: Student's t on the logarithms of the pairs' ratios."""
    logs = np.log(np.asarray(a, float)) - np.log(np.asarray(b, float))
    return _exp(
        _t_interval(float(logs.mean()), _se(logs), len(logs) - 1, level, "t on paired log ratios", len(logs), unit)
    )


def ratio_interval(a: ArrayLike, b: ArrayLike, unit: str, level: float = 0.95) -> Interval:
    """Interval on the ratio of two independent groups' geometric means: Welch's t on the logarithms.

    The point is exp(mean log a - mean log b). Fewer than two units on a side give no interval.
    """
    x, y = np.log(np.asarray(a, float)), np.log(np.asarray(b, float))
    point = float(x.mean() - y.mean())
    n = min(len(x), len(y))
    if n < 2:
        return _exp(_t_interval(point, math.inf, 0, level, "Welch's t on logs", n, unit))
    u, v = float(x.var(ddof=1)) / len(x), float(y.var(ddof=1)) / len(y)
    se = math.sqrt(u + v)
    # Welch-Satterthwaite degrees of freedom.
    df = (u + v) ** 2 / (u**2 / (len(x) - 1) + v**2 / (len(y) - 1)) if se > 0 else float(n - 1)
    return _exp(_t_interval(point, se, df, level, "Welch's t on logs", n, unit))


def verdict(ratio: Interval | None, threshold: float = 0.0) -> str:
    """``faster`` or ``slower`` if the whole interval on the speed ratio lies beyond 1 +- threshold.

    Otherwise ``inconclusive``, also without an interval.
    """
    if ratio is None:
        return "inconclusive"
    if ratio.low > 1 + threshold:
        return "faster"
    return "slower" if ratio.high < 1 - threshold else "inconclusive"


def drift_test(times: ArrayLike, values: ArrayLike) -> Drift | None:
    """Least squares of log value on time, t test on the slope. None for fewer than four points."""
    t, y = np.asarray(times, float), np.log(np.asarray(values, float))
    if len(t) < 4 or float(np.ptp(t)) == 0:
        return None
    x = t - t.mean()
    slope = float(x @ y / (x @ x))
    residual = y - y.mean() - slope * x
    se = math.sqrt(float(residual @ residual) / (len(t) - 2) / float(x @ x))
    p = 2 * (1 - t_cdf(abs(slope) / se, len(t) - 2)) if se > 0 else float(slope == 0)
    return Drift(100 * math.expm1(slope * float(np.ptp(t))), p, len(t))


def trimmed_mean(values: ArrayLike, trim: float = 0.1) -> float:
    """The mean without the lowest and highest ``trim`` part."""
    x = np.sort(np.asarray(values, float))
    cut = int(trim * len(x))
    return float(x[cut : len(x) - cut].mean())


def _se(x: Floats) -> float:
    return float(x.std(ddof=1)) / math.sqrt(len(x)) if len(x) > 1 else math.inf


def _t_interval(point: float, se: float, df: float, level: float, method: str, n: int, unit: str) -> Interval:
    if df < 1 or not math.isfinite(se):
        return Interval(-math.inf, point, math.inf, level, method, n, unit)
    half = t_quantile(0.5 + level / 2, round(df, 3)) * se
    return Interval(point - half, point, point + half, level, method, n, unit)


def _exp(log: Interval) -> Interval:
    high = math.exp(log.high) if log.high < 700 else math.inf
    return Interval(math.exp(log.low), math.exp(log.point), high, log.level, log.method, log.n, log.unit)
