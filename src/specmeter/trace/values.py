"""Numbers that the engine's own variables held: batch size, steps, drafted and accepted tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specmeter.runtime import layout
from specmeter.trace.plan import PlanIndex
from specmeter.trace.ring import Records, Ring


@dataclass(frozen=True)
class Values:
    """Value records; the arrays have one entry a record.

    ``name`` is an index in ``names``, ``owner`` the point that read it (an index in the plan's names), ``time_ns`` the
    moment of reading (right after the span the value belongs to),
    ``index`` the place in a list (0 for a single number).
    """

    names: tuple[str, ...]
    name: NDArray[np.int16]
    time_ns: NDArray[np.int64]
    index: NDArray[np.int32]
    number: NDArray[np.int64]
    owner: NDArray[np.int16]

    def pick(self, name: str) -> NDArray[np.int64]:
        """The positions of all values called ``name``."""
        if name not in self.names:
            return np.zeros(0, np.int64)
        return np.flatnonzero(self.name == self.names.index(name))


def read_values(rings: Sequence[Ring], index: PlanIndex, skip_after_first: Collection[str] = ()) -> Values:
    """The value records of some rings that the plan knows; ``skip_after_first`` are taken from the first ring only."""
    names = tuple(sorted({name for _owner, name in index.values.values()}))
    name_of, owner_of = np.full(1 << 16, -1, np.int16), np.full(1 << 16, -1, np.int16)
    for identity, (owner, name) in index.values.items():
        name_of[identity], owner_of[identity] = names.index(name), owner
    parts: list[Records] = []
    skipped = [names.index(name) for name in skip_after_first]
    for ring in rings:
        found = ring.records[ring.records["kind"] == layout.KIND_VALUE]
        name = name_of[found["point"]]
        keep = name >= 0
        if parts and skipped:
            keep &= ~np.isin(name, skipped)
        parts.append(found[keep])
    if not parts:
        empty = np.zeros(0, np.int64)
        none = empty.astype(np.int16)
        return Values(names, none, empty, empty.astype(np.int32), empty, none)
    all_ = np.concatenate(parts)
    return Values(
        names,
        name_of[all_["point"]],
        np.ascontiguousarray(all_["t1"]),
        np.ascontiguousarray(all_["value"]),
        np.ascontiguousarray(all_["t0"]),
        owner_of[all_["point"]],
    )
