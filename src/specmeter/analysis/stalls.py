"""Stalls of the machine: the one rule by which cycles are left out of times, in every analysis.

A cycle so many times its setting's median is a stall (another process, a page fault, a collection of garbage), not a
cost of the setting: quiet runs stay below 3 times, and a few stalls of a second would otherwise outweigh all else in a
mean. Such a cycle's tokens count all the same, and so does its time in decode rates of requests. How many there were
is part of each result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

STALL = 5.0
RULE = f"longer than {STALL:g} times the median"


def stalled(dur_ns: NDArray[np.int64], chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which of the ``chosen`` cycles (one rank's, of one setting) are longer than STALL times their median, a mask."""
    if not bool(chosen.any()):
        return np.zeros(len(dur_ns), bool)
    return np.asarray(chosen & (dur_ns > STALL * float(np.median(dur_ns[chosen]))), dtype=np.bool_)


def without_stalls(dur_ns: NDArray[np.int64], chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """``chosen`` without its stalls."""
    return np.asarray(chosen & ~stalled(dur_ns, chosen), dtype=np.bool_)


def stall_facts(dur_ns: NDArray[np.int64], chosen: NDArray[np.bool_]) -> dict[str, Any]:
    """``cycles`` left out as stalls, ``percent_of_time`` of the chosen cycles that they took, ``limit_ms``.

    Without cycles the limit is None.
    """
    if not bool(chosen.any()):
        return {"cycles": 0, "percent_of_time": 0.0, "limit_ms": None}
    out = stalled(dur_ns, chosen)
    total = float(dur_ns[chosen].sum())
    return {
        "cycles": int(np.count_nonzero(out)),
        "percent_of_time": 100 * float(dur_ns[out].sum()) / total if total else 0.0,
        "limit_ms": STALL * float(np.median(dur_ns[chosen])) / 1e6,
    }
