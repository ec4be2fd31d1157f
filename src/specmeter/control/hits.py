"""How often each point was hit, counted from a process's ring."""

from __future__ import annotations

from pathlib import Path

from specmeter.runtime import layout


def count_hits(ring: Path | None) -> dict[int, int]:
    """Point id -> records of it that the ring still holds (spans only). Empty without a ring."""
    if ring is None or not ring.exists():
        return {}
    try:
        import numpy as np
    except ModuleNotFoundError:
        return _count_plainly(ring)  # on a far side that has nothing but a Python
    raw = np.memmap(ring, dtype=np.uint8, mode="r", offset=layout.HEADER_SIZE)
    slots = raw[: len(raw) // layout.RECORD_SIZE * layout.RECORD_SIZE].reshape(-1, layout.RECORD_SIZE)
    done = np.ascontiguousarray(slots[:, 28:32]).view("<u4").ravel() > 0
    span = slots[:, 22] == layout.KIND_HOST_SPAN
    points = np.ascontiguousarray(slots[done & span][:, 20:22]).view("<u2").ravel()
    ids, counts = np.unique(points, return_counts=True)
    return {int(id): int(count) for id, count in zip(ids, counts)}  # noqa: B905 (3.9)


def _count_plainly(ring: Path) -> dict[int, int]:
    hits: dict[int, int] = {}
    raw = ring.read_bytes()[layout.HEADER_SIZE :]
    for record in layout.RECORD.iter_unpack(raw[: len(raw) // layout.RECORD_SIZE * layout.RECORD_SIZE]):
        if record[-1] and record[4] == layout.KIND_HOST_SPAN:
            hits[record[3]] = hits.get(record[3], 0) + 1
    return hits
