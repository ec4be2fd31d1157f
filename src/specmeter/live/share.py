"""Measures, on a running server under its own traffic, the share of cycles that a budget allows to sample."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specmeter.analysis.sampling import Share
from specmeter.bench.budget import ENOUGH, assumed_share, share_for
from specmeter.control.link import Link
from specmeter.control.processes import mix, processes
from specmeter.control.sampling import Sampling
from specmeter.errors import SpecmeterError
from specmeter.live.tail import Tail, joined
from specmeter.runtime import layout
from specmeter.trace.build import RankTrace, build_trace
from specmeter.trace.plan import CYCLE, index_plan
from specmeter.trace.ring import Records, Ring

QUIET_S = 0.5  # a server without a cycle for so long has no traffic to measure
_LOOK_S = 0.1


@dataclass
class Window:
    """The records that a link's rings have got since this window began."""

    link: Link
    _tails: dict[Path, Tail] = field(default_factory=dict)
    _records: dict[Path, Records] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._plan = self.link.plan()
        self._index = index_plan(self._plan)
        self._look(held=False)

    def poll(self) -> int:
        """Take what is new; gives how many cycles ended so far in the process that has most."""
        self._look(held=True)
        for path, tail in self._tails.items():
            new = tail.new()
            if len(new):
                self._records[path] = joined(self._records[path], new)
        return max((self._cycles(records) for records in self._records.values()), default=0)

    def leading(self) -> RankTrace | None:
        """The leading rank's cycles, None before there are any."""
        rings = [Ring(tail.header, self._records[path], 0, 0, 0) for path, tail in self._tails.items()]
        try:
            return build_trace([ring for ring in rings if len(ring.records)], self._plan, (), self._index).main
        except SpecmeterError:
            return None

    def _cycles(self, records: Records) -> int:
        cycles = (self._index.role_of[records["point"]] == CYCLE) & (records["kind"] == layout.KIND_HOST_SPAN)
        return int(np.count_nonzero(cycles))

    def _look(self, held: bool) -> None:
        """Open rings that are new; one made after the window began counts from its begin."""
        for process in processes(self.link, alive_only=True):
            if process.ring is None or process.ring in self._tails:
                continue
            try:
                tail = Tail(process.ring, held)
            except (SpecmeterError, OSError, ValueError):
                continue  # not written yet; looked at again
            self._tails[process.ring], self._records[process.ring] = tail, tail.poll(0)


def watch_share(link: Link, sampling: Sampling, budget_percent: float, seconds: float) -> Share:
    """Watch a link that was armed with ``sampling``, at most ``seconds``; the share that its cycles' cost allows.

    Ends as soon as enough cycles of either kind ran, or when none runs; assumed where too few did. Raises
    SpecmeterError where somebody has disarmed the link meanwhile.
    """
    began = time.monotonic()
    window, seen = Window(link), 0
    while (passed := time.monotonic() - began) < seconds:
        time.sleep(_LOOK_S)
        count = window.poll()
        if not count and passed > QUIET_S:
            return assumed_share(budget_percent, f"no cycle ran for {QUIET_S:g} s")
        if count < seen + ENOUGH:
            continue
        seen = count
        rank = window.leading()
        if rank is not None and _enough(rank):
            return share_for(budget_percent, rank, (), _reports(link, sampling))
    rank = window.leading()
    reason = f"too few cycles ran in {seconds:g} s"
    if rank is not None:
        return share_for(budget_percent, rank, (), _reports(link, sampling))
    return assumed_share(budget_percent, reason)


def _reports(link: Link, sampling: Sampling) -> list[dict[str, Any]]:
    """What the processes say now: they write it when the same share is asked for again."""
    ack = mix(link, sampling.seed, sampling.permille, why=sampling.why, again=True)
    return [process.report for process in ack.done]


def _enough(rank: RankTrace) -> bool:
    drawn, probed = rank.cycles.drawn, rank.cycles.probed
    return all(int(np.count_nonzero(drawn & (probed == side))) >= ENOUGH for side in (0, 1))
