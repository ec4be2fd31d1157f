"""One process's ring while it runs, and which processes form a cycle together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from specmeter.control.processes import Process
from specmeter.live.rank import Taken
from specmeter.live.seams import Gaps, Seams
from specmeter.live.tail import Tail, joined
from specmeter.runtime import layout
from specmeter.trace.build import RankTrace
from specmeter.trace.cycles import MIXTURE
from specmeter.trace.plan import CYCLE, PlanIndex
from specmeter.trace.ring import RECORD_DTYPE, Records

Identity = tuple[str, int]  # host and pid
MOST_PENDING = 200_000
# An engine that stands idle may look for requests many thousand times a second within one cycle that does not end.
MOST_OPEN = 50_000
IDLE_NS = 5_000_000_000


@dataclass
class Source:
    """One process's ring: its tail, and the records that belong to cycles not counted yet."""

    tail: Tail
    pending: Records
    drawn: bool  # its cycles are sampled, as its process says
    seen_lost: int = 0
    cut: int = 0
    seams: Seams = field(default_factory=Seams)

    @property
    def identity(self) -> Identity:
        """The process."""
        return self.tail.header.host, self.tail.header.pid

    @property
    def lost(self) -> int:
        """Records overwritten before they were read, or given up since no cycle of theirs could be counted."""
        return self.tail.lost + self.cut

    def read(self) -> tuple[bool, bool]:
        """Take what is new. Whether there was any, and whether records were lost."""
        records = self.tail.new()
        lost = self.tail.lost != self.seen_lost
        self.seen_lost = self.tail.lost
        if lost:
            self.forget()
        if len(records):
            self.pending = joined(self.pending, records)
        return bool(len(records)), lost

    def cycles(self, index: PlanIndex) -> Records:
        """The pending spans of its cycle points."""
        records = self.pending
        found: Records = records[
            (index.role_of[records["point"]] == CYCLE) & (records["kind"] == layout.KIND_HOST_SPAN)
        ]
        return found

    def gaps(self, index: PlanIndex, taken: Taken | None, until: int) -> Gaps | None:
        """The device's gaps in cycles that are complete now; None where the device is not timed."""
        own = self.cycles(index)
        found = self.seams.take(self.pending, own[own["t0"] < until], taken)
        return found if self.seams.active else None

    def overflows(self, index: PlanIndex) -> bool:
        """Whether more is pending than can be kept; it counts as lost where it holds cycles."""
        if len(self.pending) <= MOST_OPEN:
            return False
        several = len(self.cycles(index)) > 1
        if several and len(self.pending) <= MOST_PENDING:
            return False
        self.cut += len(self.pending) if several else 0
        return True

    def keep_from(self, until: int) -> None:
        """Keep the records that cycles from ``until`` on need. Device spans are in ``seams``."""
        records = self.pending
        host = (records["kind"] == layout.KIND_HOST_SPAN) | (records["kind"] == layout.KIND_MARK)
        moment = np.where(host, records["t0"], records["t1"])
        keep = (moment >= until) & ~np.isin(records["kind"], (layout.KIND_DEVICE_SPAN, layout.KIND_GRAPH_SPAN))
        # The last change of sampling before then still holds.
        marks = (records["kind"] == layout.KIND_MARK) & (records["point"] == layout.POINT_SAMPLING)
        keep[np.flatnonzero(marks & ~keep)[-1:]] = True
        self.pending = records[keep]

    def begin_unseen(self) -> None:
        """Its cycles turn out to be sampled: those before the first change that was seen count for neither side."""
        records = self.pending
        marks = (records["kind"] == layout.KIND_MARK) & (records["point"] == layout.POINT_SAMPLING)
        if not bool(marks.any()):
            self.pending = joined(unknown(), records)

    def forget(self) -> None:
        """What is pending belongs to cycles that are not whole."""
        self.pending = unknown() if self.drawn else self.pending[:0]
        self.seams.forget()


def is_drawn(process: Process) -> bool:
    """Whether a process says that its cycles are sampled."""
    return bool((process.report.get("sampling") or {}).get("on"))


def unknown() -> Records:
    """Stands for the change of sampling that was not seen: cycles before the next one count for neither side."""
    mark = np.zeros(1, RECORD_DTYPE)
    mark["kind"], mark["point"], mark["value"] = layout.KIND_MARK, layout.POINT_SAMPLING, MIXTURE
    return mark


def members(rank: RankTrace) -> frozenset[Identity]:
    """The processes whose records a rank's cycles are made of."""
    return frozenset({(rank.host, rank.pid), *((rank.host, part.pid) for part in rank.spans)})


def groups(ranks: Collection[RankTrace]) -> dict[Identity, frozenset[Identity]]:
    """For each process those that form cycles together with it: an engine core and all of its workers."""
    found: list[frozenset[Identity]] = []
    for rank in ranks:
        mine = members(rank)
        with_it = [group for group in found if group & mine]
        found = [*(group for group in found if not group & mine), mine.union(*with_it)]
    return {process: group for group in found for process in group}


def ends(group_of: Mapping[Identity, frozenset[Identity]], begun: Mapping[Identity, int]) -> dict[Identity, int]:
    """For each process the moment (ns) up to which cycles are whole: where the last one of its group began first.

    ``begun``: when each process's last cycle began. One that has stood idle beside the others for long does not hold
    them back.
    """
    found = {}
    for group in set(group_of.values()):
        starts = [begun[process] for process in group if process in begun]
        if starts:
            until = min(at for at in starts if at >= max(starts) - IDLE_NS)
            found.update(dict.fromkeys(group, until))
    return found
