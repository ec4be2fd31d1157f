"""Which candidates can be dropped early: a race over blocks that all of them run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from specmeter.analysis.student import t_quantile

MIN_BLOCKS = 3
ERROR = 0.05


def losers(logs: Mapping[str, Sequence[float]], error: float = ERROR, slack: float = 0.0) -> dict[str, float]:
    """Candidates shown to be slower than the present leader, with the upper bound of their ratio to it.

    ``logs[name]`` are log rates of the same blocks in the same order; the leader has the highest mean over the blocks
    that all of the compared pair ran. A candidate is dropped when the one-sided bound on its mean paired difference,
    ``error`` shared out among candidates (Bonferroni), lies below -``slack``. Racing by paired blocks: Birattari et
    al., GECCO 2002; here with t bounds in place of ranks, since rates of blocks are near log-normal.
    """
    ready = {name: np.asarray(values, float) for name, values in logs.items() if len(values) >= MIN_BLOCKS}
    if len(ready) < 2:
        return {}
    leader = max(ready, key=lambda name: float(ready[name].mean()))
    found: dict[str, float] = {}
    for name, values in ready.items():
        n = min(len(values), len(ready[leader]))
        if name == leader or n < MIN_BLOCKS:
            continue
        d = values[:n] - ready[leader][:n]
        bound = t_quantile(1 - error / (len(ready) - 1), n - 1) * float(d.std(ddof=1)) / math.sqrt(n)
        if float(d.mean()) + bound < -slack:
            found[name] = math.exp(float(d.mean()) + bound)
    return found


def contenders(logs: Mapping[str, Sequence[float]], start_sd: float, width: float = 2.0) -> list[str]:
    """Across starts: names whose mean could still be the best, best first.

    ``logs[name]`` holds one mean log rate a start; two means of n and m starts differ by chance with standard deviation
    ``start_sd`` sqrt(1/n + 1/m), and a name stays while it lies within ``width`` of those of the leader.
    """
    means = {name: (float(np.mean(values)), len(values)) for name, values in logs.items() if len(values)}
    if not means:
        return []
    order = sorted(means, key=lambda name: -means[name][0])
    top, count = means[order[0]]
    return [n for n in order if means[n][0] >= top - width * start_sd * math.sqrt(1 / count + 1 / means[n][1])]


def smoothed(means: Mapping[int, tuple[float, int]], start_sd: float, misfit: float = 0.01) -> dict[int, float]:
    """Mean log rates by chain length, each drawn towards a curve a + b log k + c k through all of them.

    ``means[k]`` is the mean log rate of ``k`` draft steps and its number of starts. The log of gain over cost is smooth
    in k, so neighbours tell of each other; the curve is off by about ``misfit`` (a choice), a mean by ``start_sd`` over
    the root of its starts, and the two are weighted by these (Morris, JASA 78, 1983). Fewer than four lengths: the
    means as they are.
    """
    if len(means) < 4:
        return {k: mean for k, (mean, _) in means.items()}
    k = np.array(sorted(means), float)
    y = np.array([means[int(x)][0] for x in k])
    n = np.array([means[int(x)][1] for x in k], float)
    variance = start_sd**2 / n
    weight = 1 / np.sqrt(variance + misfit**2)
    basis = np.stack([np.ones_like(k), np.log(k), k], axis=1)
    line = basis @ np.linalg.lstsq(basis * weight[:, None], y * weight, rcond=None)[0]
    own = misfit**2 / (misfit**2 + variance)
    return {int(x): float(o * a + (1 - o) * b) for x, o, a, b in zip(k, own, y, line, strict=True)}
