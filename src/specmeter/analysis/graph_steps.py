"""Single draft steps inside a fused graph: the sequence of kernels repeats, once a step."""

from __future__ import annotations

from typing import Any

import numpy as np

from specmeter.analysis.device_join import Joined, Mask
from specmeter.analysis.intervals import Ints
from specmeter.trace.plan import phase_of

LEAST_KERNELS = 4


def period_of(names: Ints) -> tuple[int, int, int] | None:
    """(first kernel, kernels a repetition, repetitions) of what repeats in a sequence of names; None without a
    repetition.

    Of all periods the one whose repetitions hold most kernels wins, of equal ones the shortest: layers that repeat
    within a step hold fewer than the steps do.
    """
    best: tuple[int, int, int, int] | None = None
    for period in range(LEAST_KERNELS, len(names) // 2 + 1):
        same = np.concatenate([[False], names[period:] == names[:-period], [False]])
        edges = np.flatnonzero(np.diff(same.astype(np.int8)))
        begins, lengths = edges[0::2], edges[1::2] - edges[0::2]
        if not len(lengths):
            continue
        at = int(np.argmax(lengths))
        repeats = int(lengths[at]) // period + 1
        if repeats >= 2 and (best is None or repeats * period > best[0]):
            best = (repeats * period, int(begins[at]), period, repeats)
    return best[1:] if best is not None else None


def graph_steps(joined: Joined, cycles: Mask) -> list[dict[str, Any]]:
    """The steps inside the graphs of draft points: ``{point, step, ms, kernels, replays}``, means over the replays.

    ``step`` 0 is what runs before the repetition, null what runs after it. The time of a step goes from its first
    kernel's begin to the next step's (of the last one to the graph's end). Replays of another length than the most
    frequent one are left out.
    """
    kernels = joined.window.kernels
    graph = kernels["graph"]
    rows: list[dict[str, Any]] = []
    for number, name in enumerate(joined.index.names):
        if phase_of(name) != "draft":
            continue
        mine = (joined.name == number) & (graph >= 0) & (joined.cycle >= 0) & cycles[np.maximum(joined.cycle, 0)]
        at = np.flatnonzero(mine)
        at = at[np.argsort(graph[at], kind="stable")]
        replays = np.split(at, np.flatnonzero(np.diff(graph[at])) + 1) if len(at) else []
        rows += _steps(joined, name, replays)
    return rows


def _steps(joined: Joined, name: str, replays: list[Ints]) -> list[dict[str, Any]]:
    lengths = [len(replay) for replay in replays]
    if not lengths:
        return []
    usual = max(set(lengths), key=lengths.count)
    same = [replay for replay in replays if len(replay) == usual]
    found = period_of(joined.window.kernels["name"][same[0]])
    if found is None:
        return []
    first, period, repeats = found
    after = first + repeats * period
    bounds = [*([0] if first else []), *range(first, after, period), *([after] if after < usual else [])]
    numbers = [*([0] if first else []), *range(1, repeats + 1), *([None] if after < usual else [])]
    begins = np.array([[joined.t0[replay[i]] for i in bounds] for replay in same])
    ends = np.array([joined.end[replay].max() for replay in same])
    means = np.diff(np.concatenate([begins, ends[:, None]], axis=1), axis=1).mean(axis=0) / 1e6
    kernels = np.diff([*bounds, usual])
    return [
        {"point": name, "step": step, "ms": float(ms), "kernels": int(size), "replays": len(same)}
        for step, ms, size in zip(numbers, means, kernels, strict=True)
    ]
