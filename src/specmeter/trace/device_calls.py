"""A ring's device spans by the cycle that launched them, as rows of the cycle table."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specmeter.runtime import layout
from specmeter.trace.cycles import cycle_at
from specmeter.trace.plan import CYCLE, PlanIndex
from specmeter.trace.ring import Ring

Ints = NDArray[np.int64]


def device_calls(ring: Ring, index: PlanIndex, starts: Ints, graphs: bool = False) -> tuple[Ints, Ints, Ints, Ints]:
    """Cycle row, point id, begin and end (ns of the device's clock) of each device span.

    With ``graphs`` of each replay of a captured graph instead, from its first node to its last. ``starts`` are the
    begins of the rank's cycles on the host's clock. Spans of cycles that the ring no longer holds are left out.
    """
    records = ring.records
    spans = records[records["kind"] == (layout.KIND_GRAPH_SPAN if graphs else layout.KIND_DEVICE_SPAN)]
    host = records[(records["kind"] == layout.KIND_HOST_SPAN) & (index.role_of[records["point"]] == CYCLE)]
    if not len(spans) or not len(host):
        none = np.zeros(0, np.int64)
        return none, none, none, none
    numbers, first = np.unique(host["cycle"].astype(np.int64), return_index=True)
    rows = cycle_at(starts, host["t0"][first])
    # A span was written so many cycles after its own.
    lag = spans["value"] & ((1 << layout.GRAPH_KEY_SHIFT) - 1) if graphs else spans["value"]
    own = spans["cycle"].astype(np.int64) - lag
    at = np.minimum(np.searchsorted(numbers, own), len(numbers) - 1)
    row = np.where(numbers[at] == own, rows[at], -1)
    keep = row >= 0
    point, begin, end = (spans[name][keep].astype(np.int64) for name in ("point", "t0", "t1"))
    return row[keep], point, begin, end
