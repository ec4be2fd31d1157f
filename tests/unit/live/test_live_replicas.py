"""Several processes in one link: one that dies or stands idle holds nobody back, and leaves no series twice."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from specmeter.exports.figures import Figures
from specmeter.exports.openmetrics import openmetrics_text
from specmeter.live import server as server_module
from specmeter.live import source as source_module
from specmeter.live.server import LiveServer
from specmeter.runtime import layout
from specmeter.runtime.ring import start_ticks
from specmeter.trace.synthetic import make_plan, make_records, write_ring
from tests.support.growing import GrowingRing
from tests.support.saved_runs import MS, PLAN, Rows, cycle

NOW = 5000
S = 1000 * MS


class Beside(GrowingRing):
    """Another process of a link that is there: one that sleeps, and whose ring grows under the test's hand."""

    def __init__(self, first: GrowingRing, rank: int, capacity: int = 4096) -> None:
        self.link, self.capacity, self.written = first.link, capacity, 0
        self.process = subprocess.Popen(["sleep", "60"])
        self.pid = self.process.pid
        self.stem = f"{self.pid}-{start_ticks(self.pid)}"
        self.path = self.link.path / f"{self.stem}.ring"
        self.report(armed=True, rank=rank)
        write_ring(self.path, make_records([]), capacity, pid=self.pid, rank=rank)

    def end(self) -> None:
        """Kill the process; its files stay."""
        self.process.kill()
        self.process.wait()


def cycles(count: int, start: int, length: int = 16 * MS) -> Rows:
    """So many cycles of ``length`` ns, one after the other."""
    return [row for i in range(count) for row in cycle(start + i * length, length, 2, i % 3)]


@pytest.fixture
def first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GrowingRing:
    """A link whose first process records nothing; every poll looks and folds."""
    monkeypatch.setattr(server_module, "FOLD_S", 0.0)
    monkeypatch.setattr(server_module, "LOOK_S", 0.0)
    return GrowingRing(tmp_path / "links", PLAN)


@pytest.fixture
def started() -> Iterator[list[Beside]]:
    """Processes that are ended with the test."""
    made: list[Beside] = []
    yield made
    for one in made:
        one.end()


def decode(found: list[Figures]) -> dict[int, int]:
    """Speculative cycles by rank."""
    return {figures.rank: figures.cycles["decode"] for figures in found}


def test_one_that_is_killed_and_started_again_goes_on_in_its_series(first: GrowingRing, started: list[Beside]) -> None:
    old = Beside(first, 0)
    started.append(old)
    live = LiveServer(first.link, histograms=True)
    live.poll()
    old.add(cycles(100, NOW * S))
    live.poll()
    assert decode(live.figures()) == {0: 98}
    old.add(cycles(50, NOW * S + 1600 * MS))
    old.end()
    live.poll()
    assert not live.ranks and live.figures()[0].cycles == {}, "the living process has had no cycle"
    new = Beside(first, 0)
    started.append(new)
    live.poll()
    new.add(cycles(100, (NOW + 60) * S))
    live.poll()
    (figures,) = live.figures()
    assert figures.cycles["decode"] == figures.cycle.count == 148 + 99 - 1, "each one's last has not ended"
    assert [key[2] for key in live.ranks] == [new.pid]
    assert openmetrics_text(live.figures()).count("specmeter_cycle_duration_seconds_count{") == 1


def test_one_that_stands_idle_holds_nobody_back(first: GrowingRing, started: list[Beside]) -> None:
    idle, busy = Beside(first, 0), Beside(first, 1)
    started += [idle, busy]
    live = LiveServer(first.link)
    live.poll()
    for one in (idle, busy):
        one.add(cycles(30, NOW * S))
    live.poll()
    for second in range(1, 4):
        busy.add(cycles(50, (NOW + second) * S))
        live.poll()
    assert decode(live.figures()) == {0: 28, 1: 28 + 150}
    assert max(len(source.pending) for source in live._sources.values()) < 20, "all but the last cycle is counted"


def test_replicas_of_the_same_rank_are_one_series(first: GrowingRing, started: list[Beside]) -> None:
    pair = [Beside(first, 0), Beside(first, 0)]
    started += pair
    live = LiveServer(first.link, histograms=True)
    live.poll()
    for one, count in zip(pair, (40, 20), strict=True):
        one.add(cycles(count, NOW * S))
    live.poll()
    (figures,) = live.figures()
    assert figures.cycle.count == figures.cycles["decode"] == 38 + 18 and len(live.ranks) == 2
    assert figures.phases["verify"].count == 56 and figures.positions[0].drafted == figures.sequences


def test_what_cannot_be_kept_is_a_loss_and_an_idle_loop_is_none(
    first: GrowingRing, started: list[Beside], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "MOST_OPEN", 100)
    monkeypatch.setattr(source_module, "MOST_PENDING", 200)
    one = Beside(first, 0)
    started.append(one)
    live = LiveServer(first.link, histograms=True)
    live.poll()
    one.add(cycles(20, NOW * S))
    live.poll()
    idle = NOW * S + 20 * 16 * MS
    one.add([(idle + i, idle + i, 0, 5, layout.KIND_HOST_SPAN, 0, 0) for i in range(150)])
    live.poll()
    assert live.lost == 0 and not len(next(iter(live._sources.values())).pending)
    one.add(cycles(20, (NOW + 60) * S))
    live.poll()
    assert live.figures()[0].cycle.count == 18 + 18, "the first after it may not be whole"
    source = live._sources[one.path]
    one.add(cycles(60, (NOW + 70) * S))
    source.read()
    assert source.overflows(live._index) and live.lost > 200


def test_a_worker_that_is_killed_and_started_again_beside_its_core(
    first: GrowingRing, started: list[Beside], tmp_path: Path
) -> None:
    """The core's cycles go on being counted with the new worker's phases, in one series."""
    plan = make_plan(
        [("cycle.core", "cycle", "none"), ("cycle", "cycle", "none"), ("verify.forward", "leaf", "none")],
        ["cycle.core.drafted"],
    )
    link = GrowingRing(tmp_path / "pair", plan)

    def both(count: int, start: int, worker: Beside) -> None:
        for i in range(count):
            at = start + i * 16 * MS
            worker.add([(at + 2 * MS, at + 9 * MS, i, 3, 0, 0, 0), (at + MS, at + 10 * MS, i, 2, 0, 0, 0)])
            link.add([(at, at + 15 * MS, i, 1, 0, 0, 0), (2, at + 15 * MS, i, 4, layout.KIND_VALUE, 0, 0)])

    old = Beside(link, 0)
    started.append(old)
    live = LiveServer(link.link, histograms=True)
    live.poll()
    both(30, NOW * S, old)
    live.poll()
    assert decode(live.figures()) == {0: 28}
    old.end()
    live.poll()
    new = Beside(link, 0)
    started.append(new)
    live.poll()
    both(30, (NOW + 9) * S, new)
    live.poll()
    both(20, (NOW + 10) * S, new)
    live.poll()
    (figures,) = live.figures()
    assert figures.cycles["decode"] == pytest.approx(28 + 49, abs=2)
    assert figures.phases["verify"].sum_s == pytest.approx(0.007 * figures.cycle.count, rel=0.05)
    assert len(live.ranks) == 1 and all(len(source.pending) < 10 for source in live._sources.values())
