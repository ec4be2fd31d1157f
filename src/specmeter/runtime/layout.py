"""The ring file's layout, shared by the writer in the server and the reader outside.

A ring is a 4096-byte header and ``capacity`` records of 32 bytes, little endian. The record's last field is written
last and marks the record as complete: it is the slot number (counted from 0 over the ring's whole life) plus 1.
"""

from __future__ import annotations

import struct

MAGIC = b"SPECMTR1"
LAYOUT_VERSION = 1
HEADER_SIZE = 4096

# magic, layout, record_size, capacity, pid, start_ticks, boot_id, host, rank, world, plan_sha256,
# perf_counter_ns and time_ns taken together at creation.
HEADER = struct.Struct("<8sIIQQQ36s64sii32sqq")

# t0_ns, t1_ns, cycle, point, kind, lane, value, seq
RECORD = struct.Struct("<qqIHBBiI")
RECORD_SIZE = RECORD.size
# The same as four words of 64 bits, the way the writer stores it: t0, t1, then cycle, point, kind and lane from the low
# bits up, then value and seq.
RECORD_WORDS = RECORD_SIZE // 8
POINT_SHIFT, KIND_SHIFT, LANE_SHIFT, SEQ_SHIFT = 32, 48, 56, 32

KIND_HOST_SPAN = 0
KIND_MARK = 1
KIND_VALUE = 2
KIND_DEVICE_SPAN = 3
KIND_CLOCK_PAIR = 4
KIND_DISARMED = 5
KIND_COLLECTIVE = 6
KIND_DROPPED = 7
# From a captured graph's first node to its last, on the device's clock; point: the device point that launched it, 0 if
# none did; value: the graph's key << GRAPH_KEY_SHIFT | how many cycles before the record's own it was launched.
KIND_GRAPH_SPAN = 8
GRAPH_KEY_SHIFT = 12

# Point ids 1..0xFFEF belong to the plan; these are the runtime's own.
POINT_NONE = 0
# KIND_MARK, value 1: probes are in from this cycle on, 0: out (the original code objects), 2: a mixture, as frames from
# before the change still run, 3: in, and no longer drawn at random. t1 - t0 is what the change took.
POINT_SAMPLING = 0xFFF0
SAMPLING_ALL = 3
POINT_KNOB = 0xFFF1  # KIND_MARK, value: the number that a knob of the engine was set to, from the step that begins here

VALUE_MIN = -(2**31)
VALUE_MAX = 2**31 - 1
