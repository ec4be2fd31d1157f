"""Gaps between a device's timed points, summed by cycle, while the ring is still being written."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specmeter.live.rank import Taken
from specmeter.runtime import layout
from specmeter.trace.ring import Records

Gaps = tuple[NDArray[np.int64], NDArray[np.int64]]
_MOST_SPANS = 50_000
_MOST_KNOWN = 4096
_NUMBER, _T0, _T1 = range(3)
_OF, _PLACE, _IDLES, _SECOND = range(4)
_NOTHING = np.zeros((0, 3), np.int64)
_NOBODY = np.zeros((0, 4), np.int64)


class Seams:
    """One process's device spans whose cycles are not counted yet, and what is known of the newest cycles.

    A device span is written in a later cycle than its own: a cycle is counted, once and as a whole, when it has ended
    on the host and spans of a later one have come.
    """

    def __init__(self) -> None:
        self.active = False
        self.forget()

    def forget(self) -> None:
        """Records are missing, or cycles were not counted: what comes next has no span before it."""
        self._spans, self._known = _NOTHING, _NOBODY
        self._done = -1
        self._end_ns = 0
        self._before: NDArray[np.int64] | None = None

    def take(self, records: Records, own: Records, taken: Taken | None) -> Gaps:
        """The second and the gaps (ns) of each speculative cycle that is now complete.

        ``records`` are new ones, ``own`` the spans of the process's cycle point, ``taken`` the rank's cycles that were
        counted just now.
        """
        spans = records[records["kind"] == layout.KIND_DEVICE_SPAN]
        self.active = self.active or bool(len(spans))
        if not self.active:
            return _NOTHING[:, 0], _NOTHING[:, 0]
        number = spans["cycle"].astype(np.int64) - spans["value"]
        fresh = np.stack([number, spans["t0"], spans["t1"]], axis=1)[number > self._done]
        self._spans = np.concatenate([self._spans, fresh])
        if len(self._spans) > _MOST_SPANS:
            self.forget()
        if taken is not None:
            self._learn(own, taken)
        return self._due()

    def _learn(self, own: Records, taken: Taken) -> None:
        """Remember which of the rank's cycles each of the process's own is: a worker's begins within the core's."""
        at = np.searchsorted(taken.t0_ns, own["t0"], side="right") - 1
        own, at = own[at >= 0], at[at >= 0]
        rows = [own["cycle"].astype(np.int64), taken.number[at], taken.idles[at], taken.second[at]]
        known = np.concatenate([self._known, np.stack(rows, axis=1)])
        _, newest = np.unique(known[::-1, _OF], return_index=True)
        self._known = known[::-1][newest][-_MOST_KNOWN:]

    def _due(self) -> Gaps:
        if not len(self._spans) or not len(self._known):
            return _NOTHING[:, 0], _NOTHING[:, 0]
        limit = min(int(self._spans[:, _NUMBER].max()), int(self._known[-1, _OF]) + 1)
        due = self._spans[:, _NUMBER] < limit
        spans, self._spans = self._spans[due], self._spans[~due]
        if not len(spans):
            return _NOTHING[:, 0], _NOTHING[:, 0]
        self._done = limit - 1
        # Stamps inside graphs come later than events, and lie inside the spans of those.
        spans = spans[np.argsort(spans[:, _T0], kind="stable")]
        place = np.minimum(np.searchsorted(self._known[:, _OF], spans[:, _NUMBER]), len(self._known) - 1)
        mine = self._known[place]
        mine[mine[:, _OF] != spans[:, _NUMBER]] = -1
        gaps = self._gaps(spans, mine)
        counted = mine[:, _SECOND] >= 0
        _, first, group = np.unique(mine[counted, _OF], return_index=True, return_inverse=True)
        return mine[counted, _SECOND][first], np.bincount(group, weights=gaps[counted]).astype(np.int64)

    def _gaps(self, spans: NDArray[np.int64], mine: NDArray[np.int64]) -> NDArray[np.int64]:
        """The time between each span's begin and the latest end before it, ns; 0 where it is nobody's seam.

        From one cycle to the next is a seam too. Where the engine waited for work between them, or ran cycles whose
        device time was not taken, it is none.
        """
        begin = int(spans[0, _T0])
        ends = np.maximum.accumulate(np.concatenate([[self._end_ns if self._before is not None else begin],
                                                     spans[:-1, _T1]]))  # fmt: skip
        first = self._before if self._before is not None else np.full(4, -1, np.int64)
        of = np.concatenate([first[None], mine[:-1]])
        apart = mine - of
        near = np.minimum(apart[:, _OF], apart[:, _PLACE]) <= 1
        seam = (of[:, _OF] >= 0) & (mine[:, _OF] >= 0) & near & (apart[:, _IDLES] == 0)
        self._before, self._end_ns = mine[-1].copy(), max(int(ends[-1]), int(spans[-1, _T1]))
        return np.where(seam, np.maximum(spans[:, _T0] - ends, 0), 0)
