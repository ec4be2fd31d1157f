"""Single draft steps inside a fused graph: the sequence of kernels repeats, once a step."""

from __future__ import annotations

from typing import Any

import numpy as np

from specmeter.analysis.device_join import Joined, Mask
from specmeter.analysis.intervals import Ints
from specmeter.trace.deep_repeats import split_repeats
from specmeter.trace.plan import phase_of

# What repeats with fewer kernels than this is no draft step.
LEAST_KERNELS = 4


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
    blocks = split_repeats(joined.window.kernels["name"][same[0]])
    if not blocks or blocks[0].stop - blocks[0].start < LEAST_KERNELS:
        return []
    first, after = blocks[0].start, blocks[-1].stop
    bounds = [*([0] if first else []), *(block.start for block in blocks), *([after] if after < usual else [])]
    numbers = [*([0] if first else []), *range(1, len(blocks) + 1), *([None] if after < usual else [])]
    begins = np.array([[joined.t0[replay[i]] for i in bounds] for replay in same])
    ends = np.array([joined.end[replay].max() for replay in same])
    means = np.diff(np.concatenate([begins, ends[:, None]], axis=1), axis=1).mean(axis=0) / 1e6
    kernels = np.diff([*bounds, usual])
    return [
        {"point": name, "step": step, "ms": float(ms), "kernels": int(size), "replays": len(same)}
        for step, ms, size in zip(numbers, means, kernels, strict=True)
    ]
