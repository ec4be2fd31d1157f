"""One link's server while it runs: its rings are tailed, new cycles folded into each rank's figures."""

from __future__ import annotations

import math
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from specmeter.control.link import Link
from specmeter.control.processes import Process, processes
from specmeter.errors import SpecmeterError
from specmeter.exports.figures import Figures
from specmeter.live.rank import RankStats
from specmeter.live.tail import Tail, joined
from specmeter.runtime import layout
from specmeter.trace.build import RankTrace, build_trace
from specmeter.trace.cycles import MIXTURE
from specmeter.trace.plan import CYCLE, index_plan
from specmeter.trace.ring import RECORD_DTYPE, Records, Ring

LOOK_S = 1.0
# All that is shown is sums over whole seconds: they are made once in each, this long after it ended, by when the cycles
# that ended in it have been written.
FOLD_S = 1.0
BEHIND_S = 0.25
_MOST_PENDING = 200_000


def beat(now_s: float) -> int:
    """The number of the second of perf_counter whose figures are due at ``now_s``."""
    return math.floor(now_s - BEHIND_S)


@dataclass
class _Source:
    """One process's ring: its tail, and the records that belong to cycles not counted yet."""

    tail: Tail
    pending: Records
    drawn: bool  # its cycles are sampled, as its process says
    lost: int = 0
    device_end: tuple[int, int] | None = None


@dataclass
class LiveRank:
    """One rank: its figures, and the trace that was seen last (its host, pid and rank)."""

    stats: RankStats
    last: RankTrace


@dataclass
class LiveServer:
    """Reads one link. ``fault`` says why a ring cannot be read (empty: all can); ``version`` rises with changes.

    ``held``: what the rings hold already counts too, not only what is new from now on. A ring that is made after the
    first look counts from its begin: its process makes it with the first record.
    """

    link: Link
    histograms: bool = False
    held: bool = False
    ranks: dict[tuple[str, int, int], LiveRank] = field(default_factory=dict)
    found: list[Process] = field(default_factory=list)
    fault: str = ""

    def __post_init__(self) -> None:
        self._plan = self.link.plan()
        self._index = index_plan(self._plan)
        self._sources: dict[Path, _Source] = {}
        self._looked = 0.0
        self._seen = False
        self._since_s = None if self.held else time.perf_counter()
        self._beat = -1
        self.version = 0
        self._fresh = False

    @property
    def engine(self) -> str:
        """The engine's name and version, as planned."""
        return f"{self._plan.get('engine') or ''} {self._plan.get('engine_version') or ''}".strip()

    @property
    def armed(self) -> bool:
        """Whether every living process has the probes in."""
        alive = [p for p in self.found if p.alive]
        return bool(alive) and all(p.armed for p in alive)

    @property
    def lost(self) -> int:
        """Records overwritten before they were read."""
        return sum(source.tail.lost for source in self._sources.values())

    def poll(self) -> None:
        """Look at every ring, and take its new records once a second, or as soon as an eighth of it is full of them.

        Between, one slot of each ring is looked at. Never raises for a ring's fault.
        """
        now = time.perf_counter()
        if now - self._looked >= LOOK_S:
            self._looked = now
            self.look()
        if beat(now) != self._beat or not FOLD_S:
            self._beat = beat(now)
            self._update()
            return
        for source in self._sources.values():
            if source.tail.filling():
                self._read(source)

    def _update(self) -> None:
        """Take all new records, and make the figures anew."""
        for source in self._sources.values():
            self._read(source)
        if self._fresh:
            self._fresh, self.version = False, self.version + 1
            try:
                self._fold()
            except SpecmeterError as error:
                self.fault = error.why or error.what
                self._forget()

    def _read(self, source: _Source) -> None:
        records = source.tail.new()
        if source.tail.lost != source.lost:
            source.lost = source.tail.lost
            self._forget()
        if len(records):
            source.pending = joined(source.pending, records)[-_MOST_PENDING:]
            self._fresh = True

    def look(self) -> None:
        """See which processes and rings there are now."""
        found = processes(self.link)
        if found != self.found:
            self.found, self.version = found, self.version + 1
        self._sources = {path: source for path, source in self._sources.items() if path.exists()}
        for source in self._sources.values():
            source.tail.pass_hole()
        for process in self.found:
            if process.ring in self._sources:
                source, before = self._sources[process.ring], self._sources[process.ring].drawn
                source.drawn = _drawn(process)
                if before and not source.drawn:
                    self._forget()
            if process.ring is None or process.ring in self._sources or not process.alive:
                continue
            try:
                tail = Tail(process.ring, self.held or self._seen)
            except (SpecmeterError, OSError, ValueError) as error:
                self.fault = str(getattr(error, "why", "") or error)
                continue
            drawn = _drawn(process)
            pending = _unknown() if drawn and tail.next_position else tail.poll(0)
            self._sources[process.ring] = _Source(tail, pending, drawn)
        self._seen = True

    def figures(self) -> list[Figures]:
        """What metrics show, a rank each, up to the last cycle that ended; before the first, whether it is armed."""
        self._update()
        if not self.ranks:
            return self._waiting()
        second = beat(time.perf_counter())
        found = []
        for number, key in enumerate(sorted(self.ranks)):
            rank = self.ranks[key]
            lost = self.lost if number == 0 else 0
            found.append(rank.stats.figures(self.link.id, rank.last, second, lost, self.armed))
        return found

    def _waiting(self) -> list[Figures]:
        """A link's living processes that have had no cycle yet: that they are there, and whether the probes are in."""
        ranks = sorted({-1 if p.rank is None else p.rank for p in self.found if p.alive})
        return [Figures(self.link.id, socket.gethostname(), rank, armed=self.armed) for rank in ranks]

    def _fold(self) -> None:
        """Count the cycles whose end is known, and keep the records from the last cycle's begin on."""
        role = self._index.role_of
        starts = []
        for source in self._sources.values():
            records = source.pending
            began = records["t0"][(role[records["point"]] == CYCLE) & (records["kind"] == layout.KIND_HOST_SPAN)]
            if len(began):
                starts.append(int(began.max()))
        if not starts:
            return
        until = min(starts)
        rings = [Ring(s.tail.header, s.pending, 0, 0, 0) for s in self._sources.values() if len(s.pending)]
        trace = build_trace(rings, self._plan, (), self._index)
        for rank in trace.ranks:
            key = (rank.host, rank.rank, rank.pid)
            if key not in self.ranks:
                self.ranks[key] = LiveRank(RankStats(self._index, self.histograms, self._since_s), rank)
            self.ranks[key].last = rank
            self.ranks[key].stats.take(rank, until)
        for source in self._sources.values():
            self._device(source)
            source.pending = _from(source.pending, until)

    def _device(self, source: _Source) -> None:
        """Gaps between the device's timed points, within a cycle, of the pending device spans."""
        spans = source.pending[source.pending["kind"] == layout.KIND_DEVICE_SPAN]
        if not len(spans):
            return
        # Stamps inside graphs come later than events, and lie inside the spans of those.
        spans = spans[np.argsort(spans["t0"], kind="stable")]
        cycle = spans["cycle"].astype(np.int64) - spans["value"]
        before = source.device_end or (int(cycle[0]), int(spans["t0"][0]))
        ends = np.maximum.accumulate(np.concatenate([[before[1]], spans["t1"][:-1]]))
        of = np.concatenate([[before[0]], cycle[:-1]])
        # From one cycle to the next is a seam too; beyond that the server had nothing to do, or probes were out.
        gap = np.where(cycle - of <= 1, np.maximum(spans["t0"] - ends, 0), 0)
        source.device_end = (int(cycle[-1]), max(int(ends[-1]), int(spans["t1"][-1])))
        mine = [rank for key, rank in self.ranks.items() if key[2] == source.tail.header.pid] or list(
            self.ranks.values()
        )
        for rank in mine[:1]:
            _, group = np.unique(cycle, return_inverse=True)
            rank.stats.take_device(np.bincount(group, weights=gap).astype(np.int64))

    def _forget(self) -> None:
        """Records are missing: what is pending belongs to cycles that are not whole."""
        for source in self._sources.values():
            source.pending = _unknown() if source.drawn else source.pending[:0]
        for rank in self.ranks.values():
            rank.stats.interrupt()


def _drawn(process: Process) -> bool:
    return bool((process.report.get("sampling") or {}).get("on"))


def _unknown() -> Records:
    """Stands for the change of sampling that was not seen: cycles before the next one count for neither side."""
    mark = np.zeros(1, RECORD_DTYPE)
    mark["kind"], mark["point"], mark["value"] = layout.KIND_MARK, layout.POINT_SAMPLING, MIXTURE
    return mark


def _from(records: Records, until: int) -> Records:
    """The records that cycles from ``until`` on need. Device spans are counted at once, so they are over."""
    host = (records["kind"] == layout.KIND_HOST_SPAN) | (records["kind"] == layout.KIND_MARK)
    moment = np.where(host, records["t0"], records["t1"])
    keep = (moment >= until) & ~np.isin(records["kind"], (layout.KIND_DEVICE_SPAN, layout.KIND_GRAPH_SPAN))
    # The last change of sampling before then still holds.
    marks = (records["kind"] == layout.KIND_MARK) & (records["point"] == layout.POINT_SAMPLING)
    keep[np.flatnonzero(marks & ~keep)[-1:]] = True
    kept: Records = records[keep]
    return kept
