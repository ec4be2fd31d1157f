"""A torch.profiler trace put on the clock of a run, so that both stand in one timeline.

The profiler writes microseconds since ``baseTimeNanoseconds`` of the calendar (older ones: since 1970); the ring's
header maps the host clock of the probes to the calendar. Both are read from the same machine's clocks.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmeter.errors import SpecmeterError
from specmeter.exports.timeline import Timeline
from specmeter.reporters.inert import inert

FIRST_PID = 10_000_000
_PID_STEP = 100_000
_MAX_BYTES = 4 << 30


@dataclass(frozen=True)
class Joined:
    """A profiler's events on the timeline's clock; ``inside`` of them have their time in the timeline's window."""

    events: list[dict[str, Any]]
    inside: int
    warnings: tuple[str, ...]


def join_torch(path: Path, timeline: Timeline, number: int = 0) -> Joined:
    """Read a torch.profiler JSON trace (also .gz) as the ``number``-th one that is joined.

    Raises SpecmeterError when it is none, or when the run does not say how its clock maps to the calendar.
    """
    document = _read(path)
    if timeline.unix_offset_ns is None:
        raise SpecmeterError(
            f"{path} cannot be put on the run's clock",
            "The run's rings, which map its clock to the calendar, are not in its directory.",
            "Join with a run directory that still has its rings/.",
        )
    shift_us = (document.get("baseTimeNanoseconds", 0) - timeline.unix_offset_ns - timeline.begin_ns) / 1000
    pids: dict[Any, int] = {}
    events = list(_events(path, document, shift_us, pids, number))
    length_us = (timeline.end_ns - timeline.begin_ns) / 1000
    timed = [e for e in events if e["ph"] != "M"]
    inside = sum(1 for e in timed if 0 <= e["ts"] <= length_us)
    warnings = []
    if timed and not inside:
        away = min((-e["ts"] if e["ts"] < 0 else e["ts"] - length_us) for e in timed) / 1e6
        warnings.append(f"{inert(path.name)} lies {away:.3f} s away from the exported window: another run, or machine?")
    return Joined(events, inside, tuple(warnings))


def _events(
    path: Path, document: Mapping[str, Any], shift_us: float, pids: dict[Any, int], number: int
) -> Iterator[dict[str, Any]]:
    for event in document["traceEvents"]:
        if not isinstance(event, dict) or not isinstance(event.get("ph"), str):
            raise SpecmeterError(f"{path} is damaged", "An event of it has no phase (ph).")
        ts = event.get("ts", 0)
        if not isinstance(ts, int | float) or not math.isfinite(ts):
            raise SpecmeterError(f"{path} is damaged", f"An event's time is {inert(ts)}.")
        moved = {
            key: value for key, value in event.items() if key in ("name", "cat", "ph", "dur", "tid", "args", "bp", "s")
        }
        moved["name"] = inert(event.get("name", ""), 400)
        pid = pids.setdefault(str(event.get("pid")), FIRST_PID + number * _PID_STEP + len(pids))
        moved["pid"] = pid
        moved["ts"] = 0 if event["ph"] == "M" else round(ts + shift_us, 3)
        if event["ph"] == "M" and event.get("name") == "process_name":
            moved["args"] = {"name": "torch.profiler: " + inert((event.get("args") or {}).get("name", ""), 200)}
        elif event["ph"] == "M" and event.get("name") == "process_sort_index":
            moved["args"] = {"sort_index": pid}
        if "id" in event:
            moved["id"] = f"{number}.{inert(event['id'], 40)}"
        yield moved


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise SpecmeterError(f"{path} is larger than 4 GiB", next_step="Record a shorter window.")
        opened = gzip.open if path.suffix == ".gz" else open
        with opened(path, "rt", encoding="utf-8") as file:
            document = json.load(file)
    except (OSError, EOFError, ValueError) as error:
        raise SpecmeterError(f"The torch.profiler trace {path} cannot be read", str(error)) from error
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise SpecmeterError(f"{path} is no torch.profiler trace", "It has no list of traceEvents.")
    base = document.get("baseTimeNanoseconds", 0)
    if not isinstance(base, int) or isinstance(base, bool):
        raise SpecmeterError(f"{path} is damaged", "Its baseTimeNanoseconds is no integer.")
    return document
