"""Which processes of a link have the cycles, which work for them, and a number of its own for each rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specmeter.trace.plan import CYCLE, LEAF, PlanIndex, phase_of
from specmeter.trace.regular import read_regular
from specmeter.trace.ring import Ring
from specmeter.trace.spans import LaneSpans
from specmeter.trace.strict_json import parse_json

_WORK = ("draft", "verify", "accept", "extend")
_CORE = ".core"
# A worker is its engine core's child, or a child's child where a starter stands between them.
_MOST_PARENTS = 8


class Process:
    """A ring with its threads' spans; ``main`` is the thread that runs the cycles, or else the busiest one."""

    def __init__(self, ring: Ring, lanes: dict[int, LaneSpans]) -> None:
        self.ring = ring
        self.lanes = lanes
        self.main = max(lanes, key=lambda lane: self._weight(lanes[lane]), default=-1)

    @staticmethod
    def _weight(spans: LaneSpans) -> tuple[int, int]:
        return int(np.count_nonzero(spans.role == CYCLE)), int(spans.dur[spans.role == LEAF].sum())

    @property
    def spans(self) -> LaneSpans:
        """The main thread's."""
        return self.lanes[self.main]

    def cycle_names(self) -> set[int]:
        """The names of the cycle points that its main thread passed."""
        if self.main < 0:
            return set()
        return set(np.unique(self.spans.name[self.spans.role == CYCLE]).tolist())

    @property
    def machine(self) -> tuple[str, str]:
        """Host and boot: processes of one machine have one clock."""
        return self.ring.header.host, self.ring.header.boot_id

    def __str__(self) -> str:
        header = self.ring.header
        rank = f" (rank {header.rank})" if header.rank >= 0 else ""
        return f"process {header.pid}{rank} on {header.host}"


def masters_of(processes: Sequence[Process], index: PlanIndex) -> tuple[list[Process], list[Process]]:
    """Split into processes whose cycles count and processes that work for them.

    Where an engine core has its own cycle point (named ``*.core``) it leads, and its workers follow.
    """
    named = [(p, {index.names[n] for n in p.cycle_names()}) for p in processes]
    core = any(name.endswith(_CORE) for _p, names in named for name in names)
    masters = [p for p, names in named if names and (not core or any(n.endswith(_CORE) for n in names))]
    work = {i for i, name in enumerate(index.names) if phase_of(name) in _WORK}
    followers = [
        p for p in processes if p not in masters and p.main >= 0
        and (p.cycle_names() or work & set(np.unique(p.spans.name).tolist()))
    ]  # fmt: skip
    return masters, followers


def pairs_of(
    masters: Sequence[Process], followers: Sequence[Process]
) -> tuple[list[tuple[Process, Process | None]], list[str]]:
    """Each master with each process that works for it, or with none; and sentences on what could not be joined.

    One master has every follower of its machine. Of several a follower's is the one that started it (``ppid`` of the
    report beside its ring), else the only one of its machine, else the only one of its rank.
    """
    leader = {id(f): _leader(f, [m for m in masters if m.machine == f.machine], len(masters)) for f in followers}
    pairs: list[tuple[Process, Process | None]] = []
    warnings: list[str] = []
    for master in masters:
        mine = [f for f in followers if leader[id(f)] is master]
        pairs.extend([(master, f) for f in mine] or [(master, None)])
        if not mine and followers and len(masters) > 1:
            warnings.append(
                f"{master} runs cycles, but no worker process could be joined to it: what workers do is missing"
            )
    if len(masters) > 1:
        warnings += [
            f"{f} works in no cycle here: which of the {len(masters)} processes with cycles it works for is not known"
            for f in followers if leader[id(f)] is None
        ]  # fmt: skip
    return pairs, warnings


def _leader(follower: Process, near: Sequence[Process], masters: int) -> Process | None:
    """Of the masters of its machine the one that a process works for; None where nothing tells."""
    if masters == 1:
        return near[0] if near else None
    for pid in _parents(follower.ring.header.path):
        for master in near:
            if master.ring.header.pid == pid:
                return master
    alike = near if len(near) == 1 else [m for m in near if m.ring.header.rank == follower.ring.header.rank]
    return alike[0] if len(alike) == 1 else None


def _parents(ring: Path) -> list[int]:
    """The processes above a ring's, nearest first, as far as the reports beside it tell."""
    found: list[int] = []
    report = ring.with_suffix(".json")
    while len(found) < _MOST_PARENTS:
        try:
            pid = parse_json(read_regular(report)).get("ppid")
        except (OSError, ValueError, AttributeError):
            break
        if type(pid) is not int or pid <= 1 or pid in found:
            break
        found.append(pid)
        above = sorted(ring.parent.glob(f"{pid}-*.json"))
        if not above:
            break
        report = above[-1]
    return found


def distinct_ranks(ranks: Sequence[tuple[str, int, int]]) -> tuple[list[int], list[str]]:
    """A number of its own for each of some ranks, given as host, process id and rank, the leading one first.

    The first of several that say one rank keeps it (data parallel copies of a server count from 0 each); of one host's
    that say none (-1) none does. With a sentence for each number that was shared.
    """
    groups: dict[tuple[str, int], list[int]] = {}
    for at, (host, _pid, rank) in enumerate(ranks):
        groups.setdefault(("", rank) if rank >= 0 else (host, rank), []).append(at)
    numbers, warnings = [rank for _host, _pid, rank in ranks], []
    following = max(numbers, default=-1) + 1
    for (_host, rank), members in groups.items():
        if len(members) == 1:
            continue
        for at in members[1 if rank >= 0 else 0 :]:
            numbers[at], following = following, following + 1
        who = ", ".join(f"process {ranks[at][1]} on {ranks[at][0]}" for at in members)
        said = f"say that they are rank {rank}" if rank >= 0 else "do not say their rank"
        counted = ", ".join(str(numbers[at]) for at in members)
        warnings.append(f"{who} {said}: they are counted as ranks {counted}, in this order")
    return numbers, warnings
