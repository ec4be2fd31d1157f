"""What seams cost: the time of a cycle in which the device waits for the host, from what the run saw of the device."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from specmeter.analysis.costmodel_data import Sample
from specmeter.analysis.device_idle import CAUSES, LATENCY, WAITING, WORK
from specmeter.trace.rundir import Run


@dataclass(frozen=True)
class Seams:
    """``ms`` of a cycle at the present steps, and in ``words`` where that comes from."""

    ms: float
    words: str


def saved_seams(
    runs: Sequence[Run], windows: Sequence[Mapping[str, Any]], samples: Sequence[Sample], now: int
) -> Seams | None:
    """The seams at ``now`` draft steps: of one of the runs' deep ``windows`` if any is, else of their timed points.

    Kernels take as long under a profiler as without it, Python takes longer: so no more is taken than a cycle without
    it has left beside the window's busy time. None where the run saw nothing of a device.
    """
    chains = [s for s in samples if s.steps == now and s.topk == 1 and s.cycles]
    if not chains:
        return None
    batch = round(max(chains, key=lambda s: s.cycles).batch)
    of = [s for s in chains if round(s.batch) == batch]
    cycle_ms = sum(float(s.cycle_ms.sum()) for s in of) / sum(s.cycles for s in of)
    asked = [partial(_of_window, window, now, batch, cycle_ms) for window in windows]
    for ask in [*asked, *(partial(_of_points, run, now, cycle_ms) for run in runs)]:
        # A document that somebody else wrote, or that is damaged, is no word on seams.
        with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
            seams = ask()
            if seams is not None and math.isfinite(seams.ms) and seams.ms >= 0:
                return seams
    return None


def _of_points(run: Run, now: int, cycle_ms: float) -> Seams | None:
    """Of the device's timed points."""
    idle = ((run.analysis.get("device") or {}).get("idle_ms") or {}).get("point")
    if run.analysis.get("steps") not in (now, None) or idle is None:
        return None
    words = "time in which no timed point ran on the device; work outside of them is in it, so that it is the most"
    return Seams(min(float(idle), cycle_ms), words)


def _of_window(window: Mapping[str, Any], now: int, batch: int, cycle_ms: float) -> Seams | None:
    """Of a deep window, if it is at these steps and this batch."""
    cycles = window.get("cycles") or {}
    if cycles.get("steps") != now or cycles.get("batch") != batch or not window.get("idle"):
        return None
    causes = window["idle"]["causes_ms"]
    idle = sum(float(causes.get(CAUSES[cause], 0.0)) for cause in (WORK, WAITING, LATENCY))
    busy = (window.get("busy_ms") or {}).get("point")
    left = cycle_ms if busy is None else max(0.0, cycle_ms - float(busy))
    words = f"the deep window saw {idle:.3f} ms of the device waiting for the host"
    if left < idle:
        return Seams(left, f"{words}, of which {left:.3f} fit into a cycle without the profiler")
    return Seams(idle, words)
