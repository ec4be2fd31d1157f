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
