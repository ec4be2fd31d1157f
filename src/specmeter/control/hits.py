"""How often each point was hit, counted from a process's ring."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specmeter.runtime import layout


def count_hits(ring: Path | None) -> dict[int, int]:
    """Point id -> records of it that the ring still holds (spans only). Empty without a ring."""
    if ring is None or not ring.exists():
        return {}
    raw = np.memmap(ring, dtype=np.uint8, mode="r", offset=layout.HEADER_SIZE)
    slots = raw[: len(raw) // layout.RECORD_SIZE * layout.RECORD_SIZE].reshape(-1, layout.RECORD_SIZE)
    done = np.ascontiguousarray(slots[:, 28:32]).view("<u4").ravel() > 0
    span = slots[:, 22] == layout.KIND_HOST_SPAN
    points = np.ascontiguousarray(slots[done & span][:, 20:22]).view("<u2").ravel()
    ids, counts = np.unique(points, return_counts=True)
    return {int(id): int(count) for id, count in zip(ids, counts, strict=True)}
