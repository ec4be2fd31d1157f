"""Comparison across server starts: the start is the unit, because equal starts differ more than their blocks do.

All values are natural logarithms of rates, so differences are ratios and a start's own speed is an additive effect.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specmeter.analysis.stats import Drift, Interval
from specmeter.analysis.student import t_cdf, t_quantile

Floats = NDArray[np.float64]
START = "server start"
MIN_STARTS = 3
MOST_STARTS = 200
MOST_BLOCKS = 1000
SEPARATE = "t on log start means with a linear drift across starts (analysis of covariance)"
TOGETHER = "t on the starts' mean paired log ratios"
WITHIN = "t on paired log ratios of blocks, within one start"


@dataclass(frozen=True)
class Fit:
    """Difference of two sides' mean logs, its standard error, the drift a start, both with any leading shape."""

    difference: Floats
    error: Floats
    drift: Floats
    drift_error: Floats
    variance: Floats
    df: int


def fit_starts(logs: ArrayLike, ours: ArrayLike, order: ArrayLike) -> Fit:
    """Least squares of start means on side and place in the session: y = mean + side + drift * place.

    ``logs``, ``ours`` (1 for our side, 0 for the other) and ``order`` have the shape [..., starts]; leading axes are
    separate experiments. The drift stands in the model always, never after a test, so that the interval keeps its
    level (analysis of covariance: Cochran and Cox, Experimental Designs, 2nd edition, 3.8). ``df`` is starts - 3.
    """
    y, side, place = (np.asarray(x, float) for x in (logs, ours, order))
    count = y.shape[-1]
    # Three starts or fewer cannot tell a drift from the sides, so the difference is then that of the means.
    trend = (place - place.mean(-1, keepdims=True)) * (count > 3)
    design = np.stack([np.ones_like(y), side - 0.5, trend], axis=-1)
    normal = np.swapaxes(design, -1, -2) @ design
    inverse = np.linalg.pinv(normal)
    beta = (inverse @ (np.swapaxes(design, -1, -2) @ y[..., None]))[..., 0]
    residual = y - (design @ beta[..., None])[..., 0]
    df = count - 3
    variance = (residual**2).sum(-1) / df if df > 0 else np.full(y.shape[:-1], math.inf)
    errors = np.sqrt(variance[..., None] * np.diagonal(inverse, axis1=-2, axis2=-1)) if df > 0 else None
    endless = np.full(y.shape[:-1], math.inf)
    side_error, drift_error = (errors[..., 1], errors[..., 2]) if errors is not None else (endless, endless)
    return Fit(beta[..., 1], side_error, beta[..., 2], drift_error, variance, df)


def separate_ratio(logs: ArrayLike, ours: ArrayLike, order: ArrayLike, level: float = 0.95) -> tuple[Interval, Fit]:
    """Interval on our rate over theirs from starts of one setting each; infinite with fewer than four starts."""
    fit = fit_starts(logs, ours, order)
    n = int(min(np.sum(np.asarray(ours) == 1), np.sum(np.asarray(ours) == 0)))
    return _interval(float(fit.difference), float(fit.error), fit.df, level, SEPARATE, n, START), fit


def together_ratio(differences: ArrayLike, level: float = 0.95, unit: str = START) -> Interval:
    """Interval on our rate over theirs from the starts' (or, in one start, the blocks') mean log ratios."""
    d = np.asarray(differences, float)
    error = float(d.std(ddof=1)) / math.sqrt(len(d)) if len(d) > 1 else math.inf
    return _interval(float(d.mean()), error, len(d) - 1, level, TOGETHER if unit == START else WITHIN, len(d), unit)


def _interval(point: float, error: float, df: int, level: float, method: str, n: int, unit: str) -> Interval:
    if df < 1 or not math.isfinite(error):
        return Interval(0.0, math.exp(point), math.inf, level, method, n, unit)
    half = t_quantile(0.5 + level / 2, df) * error
    return Interval(math.exp(point - half), math.exp(point), math.exp(min(point + half, 700.0)), level, method, n, unit)


@dataclass(frozen=True)
class Spread:
    """How much equal starts and equal blocks differ, as variances of logs.

    ``start`` is the variance between starts beyond what their blocks explain, ``block`` that of one block.
    """

    start: float
    block: float
    starts: int

    @property
    def start_percent(self) -> float:
        """The standard deviation of equal starts, in percent of the rate."""
        return 100 * math.expm1(math.sqrt(self.start))

    @property
    def block_percent(self) -> float:
        """The standard deviation of equal blocks of one start, in percent of the rate."""
        return 100 * math.expm1(math.sqrt(self.block))


def spread(arms: list[list[Floats]]) -> Spread | None:
    """A/A variance components: starts of the same arm are equal starts. None without two starts of any arm.

    ``arms[i][j]`` holds the block logs of start j of arm i. One-way random effects by the method of moments (Searle,
    Casella and McCulloch, Variance Components, 3.6): variance of start means less the part that their blocks explain.
    """
    means = [[float(blocks.mean()) for blocks in starts] for starts in arms]
    free = sum(len(m) - 1 for m in means if m)
    if free < 1:
        return None
    total = sum(float(np.sum((np.asarray(m) - np.mean(m)) ** 2)) for m in means if m) / free
    several = [blocks for starts in arms for blocks in starts if len(blocks) > 1]
    block = float(np.mean([blocks.var(ddof=1) for blocks in several])) if several else 0.0
    share = float(np.mean([1 / len(blocks) for starts in arms for blocks in starts]))
    return Spread(max(0.0, total - block * share), block, sum(len(m) for m in means))


def margin(log_ratio: float, threshold: float) -> float:
    """How far the point lies beyond the threshold, in logs; negative within it."""
    return log_ratio - math.log1p(threshold) if log_ratio > 0 else math.log1p(-threshold) - log_ratio


def starts_to_decide(log_ratio: float, variance: float, now: int, threshold: float, paired: bool) -> int | None:
    """The fewest starts a side that would settle it if the point and the variance of a start stay as they are.

    None if the point lies within the threshold, or if it takes more than MOST_STARTS.
    """
    beyond = margin(log_ratio, threshold)
    if beyond <= 0:
        return None
    for n in range(max(MIN_STARTS, now + 1), MOST_STARTS + 1):
        df, sides = (n - 1, 1) if paired else (2 * n - 3, 2)
        if t_quantile(0.975, df) * math.sqrt(sides * variance / n) < beyond:
            return n
    return None


def blocks_to_decide(log_ratio: float, parts: Spread, starts: int, threshold: float, paired: bool) -> int | None:
    """The fewest counted blocks a start that would settle it with as many starts as now; None if none would."""
    beyond = margin(log_ratio, threshold)
    df, sides = (starts - 1, 1) if paired else (2 * starts - 3, 2)
    if beyond <= 0 or starts < MIN_STARTS:
        return None
    allowed = (beyond / t_quantile(0.975, df)) ** 2 * starts / sides - parts.start
    if allowed <= 0 or parts.block / allowed > MOST_BLOCKS:
        return None
    return max(1, math.ceil(parts.block / allowed))


def drift_in_starts(starts: list[Floats]) -> Drift | None:
    """One slope of log rate over the blocks for all starts, each with its own mean; t test on the slope.

    ``percent`` is the change over the longest start. None for fewer than four blocks more than starts.
    """
    places = [np.arange(len(blocks)) - (len(blocks) - 1) / 2 for blocks in starts if len(blocks) > 1]
    values = [blocks - blocks.mean() for blocks in starts if len(blocks) > 1]
    if not values:
        return None
    x, y = cast(Floats, np.concatenate(places)), cast(Floats, np.concatenate(values))
    df = len(y) - len(values) - 1
    if df < 3:
        return None
    slope = float(x @ y / (x @ x))
    residual = y - slope * x
    error = math.sqrt(float(residual @ residual) / df / float(x @ x))
    p = 2 * (1 - t_cdf(abs(slope) / error, df)) if error > 0 else float(slope == 0)
    return Drift(100 * math.expm1(slope * (max(map(len, values)) - 1)), p, len(y))
