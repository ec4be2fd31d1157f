"""What a change that is drawn at random from cycle to cycle does to their length, in a machine that drifts.

Log lengths are a slow course of the machine and of the context, plus the effect where the change was in, plus noise
with heavy tails. The course is taken out of both the lengths and the draws by means over each cycle's neighbours,
itself left out (Robinson, Root-N-consistent semiparametric regression, Econometrica 56, 1988), which leaves the effect
unbiased although neighbours of both sides are used; the effect is then Huber's M-estimate (Huber, Robust Statistics,
1981, chapter 7). Its standard error is that of sums over blocks of cycles, which may depend on their neighbours.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specmeter.analysis.student import t_quantile

Floats = NDArray[np.float64]
NEAR = 8  # neighbours on each side
WIDE = 41  # cycles whose median says what a length beside the others is
HUBER = 1.5  # in standard deviations of the middle of the distribution
BLOCKS = 60
ROUNDS = 12
METHOD = "Huber's M-estimate beside neighbouring cycles, errors over blocks"


def drawn_effect(length: Floats, inside: NDArray[np.bool_], level: float = 0.95) -> tuple[float, float, float] | None:
    """(low, point, high) of the change's effect on log ``length`` (any unit, in order of time); ``inside``: it was in.

    None with fewer than 10 cycles a side, or where the draws leave nothing to compare.
    """
    if min(int(inside.sum()), int((~inside).sum())) < 10:
        return None
    y, z = np.log(length), inside.astype(np.float64)
    beside = _Neighbours(len(y))
    own = z - beside.mean(z)
    flat = y - _middle(y)
    effect = float(np.median(flat[inside]) - np.median(flat[~inside]))
    for _ in range(ROUNDS):
        rest = y - effect * z
        rest -= beside.mean(_winsorized(rest))
        rest -= np.median(rest)
        bound = HUBER * _spread(rest)
        held, free = np.clip(rest, -bound, bound), np.abs(rest) <= bound
        held -= held.mean()
        weight = float((own * own * free).sum())
        if weight <= 0:
            return None
        step = float((own * held).sum()) / weight
        effect += step
        if abs(step) < 1e-7:
            break
    blocks = max(4, min(BLOCKS, len(y) // 8))
    sums = np.array([part.sum() for part in np.array_split(own * held, blocks)])
    sums -= sums.mean()
    half = t_quantile(0.5 + level / 2, blocks - 1) * float(np.sqrt(blocks / (blocks - 1) * (sums @ sums))) / weight
    return effect - half, effect, effect + half


class _Neighbours:
    """Means over the nearest cycles on both sides, nearer ones with more weight (tricube), itself left out."""

    def __init__(self, count: int) -> None:
        near = min(NEAR, max(1, (count - 1) // 2))
        self._weights = (1 - (np.abs(np.arange(-near, near + 1)) / (near + 1)) ** 3) ** 3
        self._weights[near] = 0.0
        self._total = np.convolve(np.ones(count), self._weights, "same")

    def mean(self, values: Floats) -> Floats:
        found: Floats = np.convolve(values, self._weights, "same") / self._total
        return found


def _winsorized(values: Floats) -> Floats:
    """Values no further from the median of the cycles around them than the middle of the distribution reaches."""
    middle = _middle(values)
    off = values - middle
    bound = HUBER * _spread(off)
    found: Floats = middle + np.clip(off, -bound, bound)
    return found


def _middle(values: Floats) -> Floats:
    """The median of the cycles around each."""
    width = min(WIDE, len(values) - 1 + len(values) % 2)
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(values, width // 2, mode="edge"), width)
    found: Floats = np.median(windows, axis=1)
    return found


def _spread(values: Floats) -> float:
    """The standard deviation that the median of absolute deviations stands for under a normal distribution."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values))))
