"""A ring's device times on its host's clock, and the launches of its stamped graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specmeter.runtime import layout
from specmeter.trace.ring import Records


@dataclass(frozen=True)
class GraphSpans:
    """Launches of captured graphs that carry stamps, in order of begin; one entry each.

    ``key`` is the graph's number in the order of capture, ``point`` the plan id of the device point that launched it
    (0: none), ``cycle`` the ring's cycle of that launch; ``begin`` and ``end`` (ns, the device's clock) are its first
    and last node: what the device waited before the graph is not in it.
    """

    key: NDArray[np.int64]
    point: NDArray[np.int64]
    cycle: NDArray[np.int64]
    begin: NDArray[np.int64]
    end: NDArray[np.int64]


def graph_spans(records: Records) -> GraphSpans:
    """The graph launches that a ring holds; empty without stamps (``specmeter run --stamps``)."""
    spans = records[records["kind"] == layout.KIND_GRAPH_SPAN]
    spans = spans[np.argsort(spans["t0"], kind="stable")]
    value, number = spans["value"].astype(np.int64), spans["cycle"].astype(np.int64)
    back = value & (1 << layout.GRAPH_KEY_SHIFT) - 1
    times = spans["t0"].astype(np.int64), spans["t1"].astype(np.int64)
    return GraphSpans(value >> layout.GRAPH_KEY_SHIFT, spans["point"].astype(np.int64), number - back, *times)


@dataclass(frozen=True)
class DeviceClock:
    """From a ring's device times to its host's perf_counter_ns. ``how`` says where it comes from, for the reader.

    ``device_ns`` and ``offset_ns`` are the pairs (host minus device at a device time); ``error_ns`` bounds what each is
    off, None where that is not known.
    """

    device_ns: NDArray[np.int64]
    offset_ns: NDArray[np.int64]
    error_ns: int | None
    how: str

    def to_host(self, times: NDArray[np.int64]) -> NDArray[np.int64]:
        """The host's time of each device time, ns: between pairs the drift is taken as even, and so beyond them."""
        base, offset = int(self.device_ns[0]), int(self.offset_ns[0])
        at = np.asarray(times, np.int64) - base  # small numbers: the device's own have 61 bits
        pairs, drift = self.device_ns - base, self.offset_ns - offset
        more = np.interp(at, pairs, drift)
        if len(pairs) > 1:
            slope = drift[-1] / pairs[-1]
            more += slope * (np.minimum(at, 0) + np.maximum(at - pairs[-1], 0))
        moved: NDArray[np.int64] = at + base + offset + np.round(more).astype(np.int64)
        return moved


def device_clock(records: Records) -> DeviceClock | None:
    """How a ring's device times lie on its host's clock: by its clock pairs, else fitted to the host's calls.

    None where neither is there.
    """
    pairs = records[(records["kind"] == layout.KIND_CLOCK_PAIR) & (records["value"] > 0)]
    if len(pairs):
        device, first = np.unique(pairs["t1"].astype(np.int64), return_index=True)
        offset = pairs["t0"].astype(np.int64)[first] - device
        error = int(pairs["value"].max())
        return DeviceClock(device, offset, error, f"clock paired with the host's within {error / 1e3:.0f} us")
    fitted = device_offset_ns(records)
    if fitted is None:
        return None
    return DeviceClock(np.zeros(1, np.int64), np.array([fitted]), None, "clock fitted to the host's calls")


def device_offset_ns(records: Records) -> int | None:
    """What to add to a ring's device times to get its host clock; None without device spans that have a host span.

    A call's first device event cannot lie before the call began on the host, so every pair bounds the offset from
    below; the largest bound comes from the call that the device picked up fastest. Off by that call's launch latency.
    """
    device = records[records["kind"] == layout.KIND_DEVICE_SPAN]
    host = records[records["kind"] == layout.KIND_HOST_SPAN]
    host = host[np.isin(host["point"], np.unique(device["point"]))]
    if not len(device) or not len(host):
        return None
    # A device span was written ``value`` cycles after its own.
    ours = _keyed(device["point"], device["cycle"].astype(np.int64) - device["value"])
    theirs = _keyed(host["point"], host["cycle"].astype(np.int64))
    order = np.argsort(theirs, kind="stable")
    at = np.minimum(np.searchsorted(theirs[order], ours), len(order) - 1)
    match = theirs[order][at] == ours
    if not match.any():
        return None
    return int((host["t0"][order[at[match]]] - device["t0"][match]).max())


def _keyed(point: NDArray[Any], cycle: NDArray[np.int64]) -> NDArray[np.int64]:
    """One number for (point, cycle, which call of it in the cycle), for entries in order of time."""
    key: NDArray[np.int64] = (point.astype(np.int64) << 34) + (cycle << 12)
    order = np.argsort(key, kind="stable")
    place = np.arange(len(key))
    first = np.ones(len(key), bool)
    first[1:] = key[order][1:] != key[order][:-1]
    within = np.empty(len(key), np.int64)
    within[order] = place - np.maximum.accumulate(np.where(first, place, 0))
    keyed: NDArray[np.int64] = key + np.minimum(within, 4095)
    return keyed
