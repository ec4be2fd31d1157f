"""What a report says of deep windows: what they cost, and what took the time in each phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specmeter.trace.deep import DeepWindow
from specmeter.trace.plan import PlanIndex, phase_of

TOP = 4
_PARTS = ("prepare", "start", "stop", "export")
OUTSIDE = "outside of points"


def deep_facts(windows: Sequence[DeepWindow], index: PlanIndex) -> list[dict[str, Any]]:
    """One entry a window, for ``document["deep"]``; times in ms and seconds as the keys say."""
    return [_facts(window, index) for window in windows]


def _facts(window: DeepWindow, index: PlanIndex) -> dict[str, Any]:
    cost = window.cost
    cycles = {f"cycle_{name}_ms": in_ms(cost.get(f"{name}_ns")) for name in ("inside", "before", "after", "outside")}
    return {
        "setting": window.setting,
        "host": window.host,
        "pid": window.pid,
        "rank": window.rank,
        "device": window.device,
        "on_cpu": window.on_cpu,
        "cycles": window.cycle_count,
        "kernels": len(window.kernels["t0_ns"]),
        "clock_error_us": window.clock_error_ns / 1e3 if window.clock_error_ns < 1 << 60 else None,
        **cycles,
        "ratio": cost.get("ratio"),
        "left_ratio": cost.get("left_ratio"),
        "reason": cost.get("reason") or "",
        "seconds": {part: cost.get(f"{part}_s") for part in _PARTS},
        "lost_ms": {part: lost / 1e6 for part, lost in (cost.get("lost_ns") or {}).items()},
        "top": _top(window, index),
        "notes": list(window.notes),
    }


def in_ms(interval: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """An interval of ns in ms."""
    if interval is None:
        return None
    return {**interval, **{key: interval[key] / 1e6 for key in ("low", "point", "high")}}


def _part(name: str) -> str:
    """The phase of a point, ``glue`` for what a cycle runs outside of its other points, or the head of its own name."""
    head = name.split(".", 1)[0]
    known = {"cycle": "glue", "wiring": "prefill"}  # that mark lies in a function that a prefill runs
    return known.get(head, head if phase_of(name) == "other" else phase_of(name))


def _top(window: DeepWindow, index: PlanIndex) -> list[dict[str, Any]]:
    """What took most in each phase, as ms a cycle, calls a cycle, and percent of all that the window's cycles ran."""
    keep = window.inside()
    count = window.cycle_count
    if not count or not bool(keep.any()):
        return []
    point = window.kernels["point"][keep]
    owner = np.where(point >= 0, index.name_of[np.maximum(point, 0)], -1)
    phases = [*dict.fromkeys(_part(name) for name in index.names), OUTSIDE]
    of_name = np.array([phases.index(_part(name)) for name in index.names] + [len(phases) - 1])
    cell = of_name[owner].astype(np.int64) * len(window.names) + window.kernels["name"][keep]
    size = len(phases) * len(window.names)
    spent = np.bincount(cell, weights=window.kernels["dur_ns"][keep], minlength=size)
    calls = np.bincount(cell, minlength=size)
    total = max(float(spent.sum()), 1.0)
    rows = []
    for number, phase in enumerate(phases):
        here = np.arange(number * len(window.names), (number + 1) * len(window.names))
        for at in here[np.argsort(-spent[here], kind="stable")][:TOP].tolist():
            if spent[at] > 0:
                ms, share = float(spent[at]) / count / 1e6, 100 * float(spent[at]) / total
                name = window.names[at % len(window.names)]
                rows.append(
                    {"phase": phase, "name": name, "ms": ms, "percent": share, "calls": float(calls[at]) / count}
                )
    return rows
