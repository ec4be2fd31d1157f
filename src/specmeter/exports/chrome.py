"""Chrome's JSON trace ("Trace Event Format"), which Perfetto's page and chrome://tracing open.

Complete events ("X") with times in microseconds, counters ("C") and metadata ("M"), as the format's document by
Google describes them: an object with ``traceEvents``; other keys of it are kept by viewers as the trace's metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any

import numpy as np

from specmeter.exports.nesting import rows
from specmeter.exports.timeline import Lane, Timeline
from specmeter.reporters.inert import inert

# Above every process id of Linux (4,194,304 at most), so that a profiler's own processes stay apart.
FIRST_PID = 5_000_000
SCHEMA = "specmeter/timeline/1"
Event = dict[str, Any]


def write_chrome(timeline: Timeline, file: IO[str], joined: Sequence[Event] = ()) -> int:
    """Write the timeline, and events of other traces already on its clock; returns the number of events."""
    file.write('{"displayTimeUnit":"ms","otherData":')
    file.write(_dump(metadata(timeline)))
    file.write(',"traceEvents":[\n')
    count = 0
    for event in (*events(timeline), *joined):
        file.write((",\n" if count else "") + _dump(event))
        count += 1
    file.write("\n]}\n")
    return count


def metadata(timeline: Timeline) -> dict[str, Any]:
    """What the trace is about; ``origin_perf_counter_ns`` is the moment of ts 0 on the server's clock."""
    return {
        "schema": SCHEMA,
        **timeline.about,
        "origin_perf_counter_ns": str(timeline.begin_ns),
        "unix_offset_ns": None if timeline.unix_offset_ns is None else str(timeline.unix_offset_ns),
        "cycles": timeline.cycles,
        "cycles_in_run": timeline.cycles_total,
    }


def events(timeline: Timeline) -> Iterator[Event]:
    """All events; processes are ranks, threads are lanes. ts and dur are microseconds since the window's begin."""
    for number, title in enumerate(timeline.processes):
        yield _meta("process_name", number, 0, name=title)
        yield _meta("process_sort_index", number, 0, sort_index=number)
    next_tid = dict.fromkeys(range(len(timeline.processes)), 1)
    for lane in timeline.lanes:
        for index, part in enumerate(rows(lane.t0_ns, lane.dur_ns)):
            tid = next_tid[lane.process]
            next_tid[lane.process] = tid + 1
            yield _meta("thread_name", lane.process, tid, name=lane.title + (f" ({index + 1})" if index else ""))
            yield _meta("thread_sort_index", lane.process, tid, sort_index=tid)
            yield from _slices(lane, part, tid, timeline.begin_ns)
        if lane.kind == "cycles":
            yield from _counters(lane, timeline.begin_ns)


def _slices(lane: Lane, part: Any, tid: int, origin: int) -> Iterator[Event]:
    names = [inert(name, 120) for name in lane.name[part].tolist()]
    keys = list(lane.args)
    columns = [lane.args[key][part].tolist() for key in keys]
    values = zip(*columns, strict=True) if columns else [()] * len(names)
    starts, lengths = (lane.t0_ns[part] - origin).tolist(), lane.dur_ns[part].tolist()
    for name, start, length, row in zip(names, starts, lengths, values, strict=True):
        args = {key: inert(v, 200) if isinstance(v, str) else v for key, v in zip(keys, row, strict=True)}
        yield {
            "name": name, "cat": lane.kind, "ph": "X", "ts": start / 1000, "dur": length / 1000,
            "pid": FIRST_PID + lane.process, "tid": tid, "args": args,
        }  # fmt: skip


def _counters(lane: Lane, origin: int) -> Iterator[Event]:
    """Tokens a cycle and the batch over time, where they are known."""
    for key, title in (("sampled", "tokens a cycle"), ("batch", "batch")):
        if key not in lane.args:
            continue
        known = np.flatnonzero(lane.args[key] >= 0)
        times, values = (lane.t0_ns[known] - origin).tolist(), lane.args[key][known].tolist()
        for time, value in zip(times, values, strict=True):
            yield {
                "name": title, "cat": "cycles", "ph": "C", "ts": time / 1000,
                "pid": FIRST_PID + lane.process, "tid": 0, "args": {key: value},
            }  # fmt: skip


def _meta(kind: str, process: int, tid: int, **args: Any) -> Event:
    return {"name": kind, "ph": "M", "ts": 0, "pid": FIRST_PID + process, "tid": tid, "args": args}


def _dump(value: Mapping[str, Any]) -> str:
    # No "<" in the file: a page that puts the trace into a script element cannot be left through a name.
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
