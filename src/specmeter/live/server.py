"""One link's server while it runs: its rings are tailed, new cycles folded into each rank's figures."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from specmeter.control.link import Link
from specmeter.control.processes import Process, processes
from specmeter.errors import SpecmeterError
from specmeter.exports.figures import Figures
from specmeter.live.rank import RankStats, Taken
from specmeter.live.source import IDLE_NS, MOST_PENDING, Identity, Source, ends, groups, is_drawn, members, unknown
from specmeter.live.tail import Tail
from specmeter.trace.build import RankTrace, Trace, build_trace
from specmeter.trace.plan import index_plan
from specmeter.trace.ring import Ring

Key = tuple[str, int, int]  # host, rank, pid
LOOK_S = 1.0
# All that is shown is sums over whole seconds: they are made once in each, this long after it ended, by when the cycles
# that ended in it have been written.
FOLD_S = 1.0
BEHIND_S = 0.25


def beat(now_s: float) -> int:
    """The number of the second of perf_counter whose figures are due at ``now_s``."""
    return math.floor(now_s - BEHIND_S)


@dataclass
class LiveRank:
    """One rank: its figures, and the trace that was seen last (its host, pid and rank)."""

    stats: RankStats
    last: RankTrace


@dataclass
class LiveServer:
    """Reads one link. ``fault`` says why a ring cannot be read (empty: all can); ``version`` rises with changes.

    ``held``: what the rings hold already counts too, not only what is new from now on. A ring that is made after the
    first look counts from its begin: its process makes it with the first record. ``since_s``: the moment of
    perf_counter from which rates are over what was watched; None: now, or with ``held`` from before all that is asked.
    ``missed`` counts records that never came to where the rings are read.
    """

    link: Link
    histograms: bool = False
    held: bool = False
    ranks: dict[Key, LiveRank] = field(default_factory=dict)
    found: list[Process] = field(default_factory=list)
    fault: str = ""
    since_s: float | None = None
    missed: Callable[[], int] = int

    def __post_init__(self) -> None:
        self._plan = self.link.plan()
        self._index = index_plan(self._plan)
        self._sources: dict[Path, Source] = {}
        self._groups: dict[Identity, frozenset[Identity]] = {}
        # Of processes that are gone: their counters go on in those that take their place.
        self._past: dict[tuple[str, int], RankStats] = {}
        self._lost = 0
        self._looked = 0.0
        self._seen = False
        self._since_s = self.since_s if self.since_s is not None or self.held else time.perf_counter()
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
        """Records overwritten before they came or were read, or given up."""
        return self._lost + self.missed() + sum(source.lost for source in self._sources.values())

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
        if any(len(source.pending) > MOST_PENDING // 2 for source in self._sources.values()):
            self._update()

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

    def _read(self, source: Source) -> None:
        fresh, lost = source.read()
        self._fresh = self._fresh or fresh
        if lost:
            self._forget(source, False)

    def look(self) -> None:
        """See which processes and rings there are now."""
        found = processes(self.link)
        if found != self.found:
            self.found, self.version = found, self.version + 1
        self._leave({process.ring for process in found if not process.alive})
        for source in self._sources.values():
            source.tail.pass_hole()
        for process in self.found:
            if process.ring in self._sources:
                source, before = self._sources[process.ring], self._sources[process.ring].drawn
                source.drawn = is_drawn(process)
                if before and not source.drawn:
                    self._forget()
                elif source.drawn and not before:
                    source.begin_unseen()
            if process.ring is None or process.ring in self._sources or not process.alive:
                continue
            try:
                tail = Tail(process.ring, self.held or self._seen)
            except (SpecmeterError, OSError, ValueError) as error:
                self.fault = str(getattr(error, "why", "") or error)
                continue
            # The copy of a far ring begins where it was first looked at: its begin says nothing of the process's.
            drawn = is_drawn(process)
            self._sources[process.ring] = Source(tail, unknown() if drawn else tail.poll(0), drawn)
        self._seen = True

    def _leave(self, ended: set[Path | None]) -> None:
        """Count what processes that have ended wrote to their end, and go on without them.

        Before new ones are looked at: one that takes another's place would work in the same cycles.
        """
        gone = [path for path in self._sources if path in ended or not path.exists()]
        if not gone:
            return
        self._update()
        for path in gone:
            self._lost += self._sources.pop(path).lost
        there = {source.identity for source in self._sources.values()}
        for key, rank in list(self.ranks.items()):
            if not members(rank.last) <= there:
                self._retire(key)

    def _retire(self, key: Key) -> None:
        stats, before = self.ranks.pop(key).stats, self._past.get(key[:2])
        self._past[key[:2]] = stats if before is None else stats.with_sums_of([before])
        self.version += 1

    def figures(self) -> list[Figures]:
        """What metrics show, a rank each, up to the last cycle that ended; before the first, whether it is armed."""
        self._update()
        if not self.ranks:
            return self._waiting()
        second = beat(time.perf_counter())
        alike: dict[tuple[str, int], list[LiveRank]] = {}
        for key in sorted(self.ranks):
            alike.setdefault(key[:2], []).append(self.ranks[key])
        found = []
        for number, (label, ranks) in enumerate(alike.items()):
            # One series: replicas that have the same rank, and processes whose place was taken.
            others = [rank.stats for rank in ranks[1:]]
            if label in self._past:
                others.append(self._past[label])
            stats = ranks[0].stats.with_sums_of(others) if others else ranks[0].stats
            lost = self.lost if number == 0 else 0
            found.append(stats.figures(self.link.id, ranks[0].last, second, lost, self.armed))
        return found

    def _waiting(self) -> list[Figures]:
        """A link's living processes that have had no cycle yet: that they are there, and whether the probes are in."""
        ranks = sorted({-1 if p.rank is None else p.rank for p in self.found if p.alive})
        return [Figures(self.link.id, socket.gethostname(), rank, armed=self.armed) for rank in ranks]

    def _fold(self) -> None:
        """Count the cycles whose end is known, and keep the records from the last cycle's begin on."""
        begun = {}
        for source in self._sources.values():
            cycles = source.cycles(self._index)
            if len(cycles):
                begun[source.identity] = int(cycles["t0"].max())
        if begun:
            rings = [Ring(s.tail.header, s.pending, 0, 0, 0) for s in self._sources.values() if len(s.pending)]
            trace = build_trace(rings, self._plan, (), self._index)
            self._groups = groups(trace.ranks)
            self._count(trace, begun)
        for source in self._sources.values():
            if source.overflows(self._index):
                self._forget(source)

    def _count(self, trace: Trace, begun: dict[Identity, int]) -> None:
        until = ends(self._groups, begun)
        counted: dict[Identity, tuple[RankStats, Taken | None]] = {}
        for rank in trace.ranks:
            moment = until.get((rank.host, rank.pid))
            if moment is not None and (found := self._take(rank, moment)) is not None:
                for process in sorted(members(rank)):
                    counted.setdefault(process, found)
        self._reconsider(trace)
        # Records of a process that is in no cycle yet serve cycles to come.
        latest = max(until.values(), default=0)
        rest = min((at for at in until.values() if at >= latest - IDLE_NS), default=0)
        for source in self._sources.values():
            moment = until.get(source.identity, rest)
            if source.identity in counted:
                stats, taken = counted[source.identity]
                gaps = source.gaps(self._index, taken, moment)
                if gaps is not None:
                    stats.take_device(*gaps)
            # One that stands idle stays in its group by its last cycle.
            source.keep_from(min(moment, begun.get(source.identity, moment)))

    def _take(self, rank: RankTrace, until: int) -> tuple[RankStats, Taken | None] | None:
        """Count a rank's cycles; None before its first one has ended: its workers may not be seen yet."""
        key = (rank.host, rank.rank, rank.pid)
        if key not in self.ranks:
            if not (rank.cycles.t0_ns < until).any():
                return None
            self.ranks[key] = LiveRank(RankStats(self._index, self.histograms, self._since_s), rank)
        mine = self.ranks[key]
        mine.last = rank
        return mine.stats, mine.stats.take(rank, until)

    def _reconsider(self, trace: Trace) -> None:
        """Drop ranks that were none: a worker that was seen before its core, or a core before its workers."""
        now = {(rank.host, rank.rank, rank.pid) for rank in trace.ranks}
        for key in [key for key in self.ranks if key not in now and (key[0], key[2]) in self._groups]:
            self._retire(key)

    def _forget(self, of: Source | None = None, its_own: bool = True) -> None:
        """Records are missing: what is pending belongs to cycles that are not whole.

        ``of`` one process: in its group (before any is known, in all). ``its_own`` False: it keeps what came after.
        """
        group = self._groups.get(of.identity) if of is not None else None
        for source in self._sources.values():
            if (group is None or source.identity in group) and (its_own or source is not of):
                source.forget()
        for rank in self.ranks.values():
            if group is None or members(rank.last) & group:
                rank.stats.interrupt()
