"""Writes rings with known contents, for tests and for the reading benchmark; nothing of a measurement uses it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specmeter.runtime import layout
from specmeter.trace.ring import RECORD_DTYPE, Records


def make_plan(points: Sequence[tuple[str, str, str]], values: Sequence[str] = ()) -> dict[str, Any]:
    """A plan whose points are (name, role, step) with ids from 1 on, and whose values ("POINT.NAME") follow them."""
    listed = [
        {"id": i + 1, "name": name, "role": role, "step": step, "kind": "call", "clock": "host"}
        for i, (name, role, step) in enumerate(points)
    ]
    ids = {key: len(points) + 1 + i for i, key in enumerate(values)}
    return {"engine": "synthetic", "engine_version": "0", "points": listed, "refused": [], "value_ids": ids}


def make_records(rows: Sequence[tuple[int, int, int, int, int, int, int]]) -> Records:
    """Records from rows (t0, t1, cycle, point, kind, lane, value); commit marks are set by write_ring."""
    records = np.zeros(len(rows), RECORD_DTYPE)
    for i, name in enumerate(("t0", "t1", "cycle", "point", "kind", "lane", "value")):
        records[name] = [row[i] for row in rows]
    return records


def write_ring(
    path: Path,
    records: Records,
    capacity: int | None = None,
    *,
    pid: int = 1,
    rank: int = -1,
    host: str = "host",
    boot_id: str = "boot",
    perf_counter_ns: int = 0,
    time_ns: int = 0,
    world: int = 1,
) -> Path:
    """Write ``records`` as the runtime would have, wrapping around when there are more than ``capacity``."""
    capacity = capacity or max(1, len(records))
    slots = np.zeros(capacity, RECORD_DTYPE)
    position = np.arange(len(records))[-capacity:]
    kept = records[position]
    kept["seq"] = position + 1
    slots[position % capacity] = kept
    header = layout.HEADER.pack(
        layout.MAGIC, layout.LAYOUT_VERSION, layout.RECORD_SIZE, capacity, pid, 1, boot_id.encode(), host.encode(),
        rank, world, bytes(32), perf_counter_ns, time_ns,
    )  # fmt: skip
    with path.open("wb") as file:
        path.chmod(0o600)
        file.write(header.ljust(layout.HEADER_SIZE, b"\0"))
        slots.tofile(file)
    return path


def repeat_cycle(pattern: Records, count: int, period_ns: int, jitter_ns: int = 0, seed: int = 0) -> Records:
    """``count`` copies of one cycle's records, each later than the one before by ``period_ns`` and a random part.

    Values keep their numbers; spans and marks move in time.
    """
    shift = np.arange(count, dtype=np.int64) * period_ns
    if jitter_ns:
        shift += np.cumsum(np.random.default_rng(seed).integers(0, jitter_ns, count))
    records = np.tile(pattern, count)
    moved = np.repeat(shift, len(pattern))
    records["t1"] += moved
    spans = records["kind"] != layout.KIND_VALUE
    records["t0"][spans] += moved[spans]
    records["cycle"] = np.repeat(np.arange(1, count + 1), len(pattern))
    return records
