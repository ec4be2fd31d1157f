"""Perfetto's own trace format (protobuf, TracePacket), written and read with the ``perfetto`` package's messages."""

from __future__ import annotations

from typing import Any

import numpy as np

from specmeter.errors import needs_extra
from specmeter.exports.chrome import FIRST_PID
from specmeter.exports.nesting import begin_end, rows
from specmeter.exports.timeline import Lane, Timeline
from specmeter.reporters.inert import inert

_SEQUENCE = 1
_CLOCKS = {"realtime": 1, "monotonic": 3, "boottime": 6}


def perfetto_trace(timeline: Timeline) -> bytes:
    """The timeline as a serialized Trace message: a process track for each rank, a track for each lane.

    Timestamps are perf_counter_ns of the leading rank's machine, which Linux takes from CLOCK_MONOTONIC. Raises
    SpecmeterError without the ``perfetto`` package.
    """
    trace = _messages().Trace()
    _clocks(trace, timeline)
    for number, title in enumerate(timeline.processes):
        packet = _packet(trace)
        packet.track_descriptor.uuid = number + 1
        packet.track_descriptor.process.pid = FIRST_PID + number
        packet.track_descriptor.process.process_name = title
    track = len(timeline.processes) + 1
    for lane in timeline.lanes:
        for index, part in enumerate(rows(lane.t0_ns, lane.dur_ns)):
            descriptor = _packet(trace).track_descriptor
            descriptor.uuid, descriptor.parent_uuid = track, lane.process + 1
            descriptor.name = lane.title + (f" ({index + 1})" if index else "")
            _lane(trace, lane, part, track)
            track += 1
    data: bytes = trace.SerializeToString()
    return data


def _lane(trace: Any, lane: Lane, part: Any, track: int) -> None:
    begin, end = _messages().TrackEvent.TYPE_SLICE_BEGIN, _messages().TrackEvent.TYPE_SLICE_END
    args = {key: column.tolist() for key, column in lane.args.items()}
    for time, at in begin_end(lane.t0_ns, lane.dur_ns, part):
        packet = _packet(trace)
        packet.timestamp = time
        event = packet.track_event
        event.track_uuid = track
        event.type = begin if at >= 0 else end
        if at < 0:
            continue
        event.name = inert(lane.name[at], 120)
        event.categories.append(lane.kind)
        for key, column in args.items():
            _annotate(event.debug_annotations.add(), key, column[at])


def _annotate(annotation: Any, key: str, value: Any) -> None:
    annotation.name = key
    if isinstance(value, bool):
        annotation.bool_value = value
    elif isinstance(value, int | np.integer):
        annotation.int_value = int(value)
    else:
        annotation.string_value = inert(value, 200)


def _clocks(trace: Any, timeline: Timeline) -> None:
    """One moment on each clock. Timestamps count as BOOTTIME (differs after a suspend)."""
    packet = _packet(trace)
    packet.sequence_flags = 1  # SEQ_INCREMENTAL_STATE_CLEARED
    packet.timestamp = timeline.begin_ns
    moments = {"monotonic": timeline.begin_ns, "boottime": timeline.begin_ns}
    if timeline.unix_offset_ns is not None:
        moments["realtime"] = timeline.begin_ns + timeline.unix_offset_ns
    for name, time in moments.items():
        clock = packet.clock_snapshot.clocks.add()
        clock.clock_id, clock.timestamp = _CLOCKS[name], time


def _packet(trace: Any) -> Any:
    packet = trace.packet.add()
    packet.trusted_packet_sequence_id = _SEQUENCE
    return packet


def _messages() -> Any:
    try:
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2
    except ImportError as error:
        raise needs_extra(
            "The Perfetto format needs the perfetto package",
            "It is not installed here.",
            "perfetto",
            ", or export with --format chrome, which Perfetto opens too",
        ) from error
    return perfetto_trace_pb2
