"""A torch.profiler trace put on the clock of a run, so that both stand in one timeline.

The profiler writes microseconds since ``baseTimeNanoseconds`` of the calendar (older ones: since 1970); the ring's
header maps the host clock of the probes to the calendar. Both are read from the same machine's clocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specmeter.errors import SpecmeterError
from specmeter.exports.timeline import Timeline
from specmeter.reporters.inert import inert
from specmeter.trace.deep_profile import MOST_BASE, MOST_BYTES, MOST_US
from specmeter.trace.strict_json import read_json

FIRST_PID = 10_000_000
_PID_STEP = 100_000
_AGAIN = "Leave --torch out, or export the trace again (of a shorter window)."


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
        ts, args = _checked(path, event)
        moved = {key: value for key, value in event.items() if key in ("cat", "ph", "dur", "tid", "args", "bp", "s")}
        moved["name"] = inert(event.get("name", ""), 400)
        pid = pids.setdefault(str(event.get("pid")), FIRST_PID + number * _PID_STEP + len(pids))
        moved["pid"] = pid
        moved["ts"] = 0 if event["ph"] == "M" else round(ts + shift_us, 3)
        if event["ph"] == "M" and event.get("name") == "process_name":
            moved["args"] = {"name": "torch.profiler: " + inert(args.get("name", ""), 200)}
        elif event["ph"] == "M" and event.get("name") == "process_sort_index":
            moved["args"] = {"sort_index": pid}
        if "id" in event:
            moved["id"] = f"{number}.{inert(event['id'], 40)}"
        yield moved


def _checked(path: Path, event: object) -> tuple[float, Mapping[str, Any]]:
    """The time of an event (us) and its arguments. Raises SpecmeterError for what is no event of the format."""
    if not isinstance(event, dict) or not isinstance(event.get("ph"), str):
        raise _damaged(path, "An event of it has no phase (ph).")
    ts, args = event.get("ts", 0), event.get("args")
    if not _is_time(ts):
        raise _damaged(path, f"An event's time (ts) is {inert(ts)}.")
    dur = event.get("dur", 0)
    if not _is_time(dur) or dur < 0:
        raise _damaged(path, f"An event's duration (dur) is {inert(dur)}.")
    if args is not None and not isinstance(args, dict):
        raise _damaged(path, f"An event's arguments (args) are no object but {type(args).__name__}.")
    return float(ts), args or {}


def _is_time(value: object) -> bool:
    """Whether this is a number of microseconds of this century, or a difference of two such."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < MOST_US


def _read(path: Path) -> dict[str, Any]:
    try:
        document = read_json(path, MOST_BYTES)
    except (OSError, ValueError) as error:
        why = inert(getattr(error, "strerror", None) or error, 300).rstrip(".")
        raise SpecmeterError(f"The torch.profiler trace {path} cannot be read", f"{why}.", _AGAIN) from error
    if not isinstance(document, dict) or not isinstance(document.get("traceEvents"), list):
        raise SpecmeterError(
            f"{path} is no torch.profiler trace",
            "It has no list of traceEvents.",
            "Name a file that torch.profiler's export_chrome_trace wrote.",
        )
    base = document.get("baseTimeNanoseconds", 0)
    if type(base) is not int or not 0 <= base < MOST_BASE:
        raise _damaged(path, f"Its baseTimeNanoseconds is {inert(base)}, which is no time.")
    return document


def _damaged(path: Path, why: str) -> SpecmeterError:
    return SpecmeterError(f"The torch.profiler trace {path} is damaged", why, _AGAIN)
