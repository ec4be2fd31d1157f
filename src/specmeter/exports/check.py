"""Reads an exported Chrome trace back and adds its phases up again, without anything of the export.

Cycles that are stalls are left out as in every analysis.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from specmeter.analysis.stalls import without_stalls
from specmeter.errors import SpecmeterError
from specmeter.trace.plan import PHASES, phase_of
from specmeter.trace.spans import nest

_PHASES_OF_EVENTS = ("X", "M", "C")


def check_format(document: Any) -> list[str]:
    """What in a trace document is not as the Trace Event Format says; an empty list when it is all right."""
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        return ["no object with a list traceEvents"]
    wrong = []
    for number, event in enumerate(document["traceEvents"]):
        if event.get("ph") not in _PHASES_OF_EVENTS or not isinstance(event.get("name"), str):
            wrong.append(f"event {number}: ph {event.get('ph')!r}, name {event.get('name')!r}")
        elif not all(isinstance(event.get(key), int) for key in ("pid", "tid")):
            wrong.append(f"event {number}: pid or tid is no integer")
        elif not isinstance(event.get("ts"), int | float) or not isinstance(event.get("args", {}), dict):
            wrong.append(f"event {number}: ts or args is missing")
        elif event["ph"] == "X" and not (isinstance(event.get("dur"), int | float) and event["dur"] >= 0):
            wrong.append(f"event {number}: dur is missing or negative")
    return wrong


def phase_table(document: Mapping[str, Any], setting: str | None, nested: bool = True) -> dict[str, float]:
    """Mean milliseconds a decode cycle of each phase, from the events of the first process.

    ``setting`` None takes every cycle but the baseline's. ``nested`` finds each slice's own time from which slice
    contains which; False takes it from the argument self_ns (where a core and a worker process share a timeline, no
    lane alone holds it). Raises SpecmeterError without such a cycle.
    """
    events = [e for e in document["traceEvents"] if e["ph"] == "X"]
    pid, chosen = _chosen(events, setting)
    if not chosen:
        raise SpecmeterError("The trace holds no decode cycle of that setting")
    dur = np.array([round(e["dur"] * 1000) for e in chosen], np.int64)
    keep = without_stalls(dur, np.ones(len(chosen), bool))
    wanted = {e["args"]["cycle"] for e, kept in zip(chosen, keep.tolist(), strict=True) if kept}
    sums = dict.fromkeys(PHASES, 0.0)
    lanes: dict[int, list[Any]] = {}
    for event in events:
        if event["pid"] == pid and event["cat"] == "host":
            lanes.setdefault(event["tid"], []).append(event)
    for lane in lanes.values():
        for event, own_ns in zip(lane, _own(lane) if nested else [e["args"]["self_ns"] for e in lane], strict=True):
            args = event["args"]
            if args["role"] in ("leaf", "wait") and args["inside"] and args["cycle"] in wanted:
                sums[phase_of(event["name"])] += own_ns / 1e6
    return {phase: total / len(wanted) for phase, total in sums.items() if total}


def any_decode(document: Mapping[str, Any], setting: str | None) -> bool:
    """Whether the first process has a decode cycle that ``phase_table`` would be over."""
    return bool(_chosen([e for e in document["traceEvents"] if e["ph"] == "X"], setting)[1])


def _chosen(events: list[Any], setting: str | None) -> tuple[int, list[Any]]:
    """The first process, and its cycles that count."""
    pid = min((e["pid"] for e in events), default=-1)
    cycles = [e for e in events if e["pid"] == pid and e["cat"] == "cycles"]
    return pid, [e for e in cycles if _wanted(e["args"], setting)]


def _own(lane: list[Any]) -> list[float]:
    """Each slice's time outside of the slices it contains, ns."""
    t0 = np.array([round(e["ts"] * 1000) for e in lane], np.int64)
    dur = np.array([round(e["dur"] * 1000) for e in lane], np.int64)
    order = np.lexsort((-t0, t0 + dur))
    containers, parent = nest(t0[order])
    own = dur[order].astype(float)
    inside = np.flatnonzero(parent >= 0)
    np.subtract.at(own, containers[parent[inside]], dur[order][inside])
    found = np.empty(len(lane))
    found[order] = own
    return list(found.tolist())


def _wanted(args: Mapping[str, Any], setting: str | None) -> bool:
    if args["kind"] != "decode" or args["dropped"] or args["probed"] != 1:
        return False
    return bool(args["setting"] != "baseline" if setting is None else args["setting"] == setting)
