"""The live view of a server whose cycles are sampled: times of all cycles, phases and tokens from the sampled ones."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import numpy as np
import pytest

from specmeter.commands.arm import _measured
from specmeter.control import Ack, Sampling, arm, disarm, holder, mix
from specmeter.errors import Exit, SpecmeterError
from specmeter.hosts.far_rings import pack
from specmeter.hosts.mirror import Mirror
from specmeter.live.rank import RankStats
from specmeter.live.recent import AT
from specmeter.live.server import LiveServer
from specmeter.live.view import Shown, legend, plain_text, rank_lines
from specmeter.runtime import layout
from specmeter.runtime.mix import drawn
from specmeter.trace import load_rings
from specmeter.trace.plan import index_plan
from specmeter.trace.synthetic import make_plan, make_records, write_ring
from tests.support.growing import GrowingRing

PLAN = make_plan([("cycle", "cycle", "none"), ("verify.forward", "leaf", "none")], ["cycle.drafted", "cycle.accepted"])
MS = 1_000_000


def records(count: int, late: bool) -> list[tuple[int, int, int, int, int, int, int]]:
    """Cycles of 10 ms, 12 with probes; 1 of 2 drafts accepted, read in sampled cycles, (``late``) for those before."""
    rows: list[tuple[int, int, int, int, int, int, int]] = []
    now, state = 5_000_000_000, -1
    for i in range(count):
        wanted = int(drawn(i, 1, 100))
        if wanted != state:
            rows.append((now, now, i, layout.POINT_SAMPLING, layout.KIND_MARK, 0, wanted))
        state = wanted
        took = (12 if state else 10) * MS
        if state:
            rows.append((now + MS, now + 9 * MS, i, 2, layout.KIND_HOST_SPAN, 0, 0))
            rows += [(n, now - MS if late else now + 9 * MS, i, 5 - n, layout.KIND_VALUE, 0, 0) for n in (2, 1)]
        rows.append((now, now + took - MS // 10, i, 1, layout.KIND_HOST_SPAN, 0, 0))
        now += took
    return rows


@pytest.mark.parametrize("late", [False, True])
def test_tokens_and_cycle_are_of_all_cycles_and_phases_of_sampled_ones(tmp_path: Path, late: bool) -> None:
    ring = write_ring(tmp_path / "1-1.ring", make_records(records(1_000, late)), perf_counter_ns=5_000_000_000)
    rank = load_rings([ring], PLAN).main
    stats = RankStats(index_plan(PLAN))
    stats.take(rank, 1 << 62)
    second = int(rank.cycles.t0_ns[-1] // 1_000_000_000)
    recent = stats.recent(second, 8)
    share = 1 - recent.clean / recent.cycles
    assert 0.07 < share < 0.14
    assert recent.cycle_ms == pytest.approx(10 + 2 * share, rel=0.01)
    assert recent.phases_ms["verify"] == pytest.approx(8.0)
    assert recent.split_ms == pytest.approx(12.0, rel=0.01)
    assert recent.tokens_per_s == pytest.approx(2 / recent.cycle_ms * 1e3, rel=0.03)
    trend = stats.trend(second, 8)
    assert sum(trend) / 8 == pytest.approx(recent.tokens_per_s, rel=0.03)
    text = plain_text(rank_lines("rank 0", recent, trend, Shown(width=120)))
    assert f"probes in {100 * share:.1f} %" in text
    assert sum(map(float, re.findall(r"([\d.]+) %", legend(recent)))) == pytest.approx(100, abs=0.2)


def test_a_link_that_somebody_disarms_while_its_cost_is_measured_stays_disarmed(tmp_path: Path) -> None:
    link = GrowingRing(tmp_path / "links", PLAN).link
    first = Sampling(1, 40)
    arm(link, 0.0, sampling=first)
    assert mix(link, 1, 50, 0.0, again=True).silent and link.document()["state"]["armed"]
    disarm(link, 0.0, take_over=True)
    words = argparse.Namespace(budget=1.0, window=0.1, timeout=0.0)
    with pytest.raises(SpecmeterError, match="disarmed meanwhile") as caught:
        _measured(link, Ack(1, (), ()), first, words)
    assert caught.value.exit == Exit.REFUSED and not link.document()["state"]["armed"]
    holder.release(link)


def test_cycles_before_the_first_change_that_a_ring_still_holds_count_for_neither_side(tmp_path: Path) -> None:
    ring = write_ring(tmp_path / "1-1.ring", make_records(records(1_000, False)), 512, perf_counter_ns=5_000_000_000)
    cycles = load_rings([ring], PLAN).main.cycles
    first = int(np.argmax(cycles.probed != 2))
    assert first > 0 and cycles.drawn.all() and (cycles.probed[first:] != 2).all()


def test_a_view_that_opens_or_loses_records_between_two_changes_waits_for_the_next_one(tmp_path: Path) -> None:
    rows = records(400, False)
    grown = GrowingRing(tmp_path / "links", PLAN, capacity=1 << 12)
    grown.report(sampling={"on": True})
    # 20 records before changes to sampled cycles: where the view opens, and where it goes on after a loss.
    sampled = [at for at, row in enumerate(rows) if row[3] == layout.POINT_SAMPLING and row[6] == 1]
    opened, lost, again = sampled[3] - 20, sampled[5] - 20, sampled[7] - 20
    grown.add(rows[:opened])
    server = LiveServer(grown.link)
    server.look()
    grown.add(rows[opened:lost])
    server._update()
    assert [rank.last.cycles.probed[0] for rank in server.ranks.values()] == [2]
    server._forget()
    grown.add(rows[again:])
    server._update()
    [rank] = server.ranks.values()
    truly = sum(row[3] == 2 for row in rows[opened:lost] + rows[again:])
    assert 0 < rank.stats._total[AT["cycles"]] <= truly and rank.stats._total[AT["clean"]] > 100


def test_the_copy_of_a_far_ring_counts_from_its_first_change_on(tmp_path: Path) -> None:
    rows = records(400, False)
    sampled = [at for at, row in enumerate(rows) if row[3] == layout.POINT_SAMPLING and row[6] == 1]
    rows = rows[sampled[3] - 20 :]
    there = GrowingRing(tmp_path / "links", PLAN)
    mirror = Mirror({"link": "far", "path": "/there", "plan": PLAN, "document": {"id": "far"}})
    try:
        report = json.dumps({"pid": there.pid, "armed": True, "sampling": {"on": True}}).encode()
        mirror.take({"event": "process", "name": there.stem, "alive": True}, report)
        mirror.take({"event": "ring", "name": there.stem}, there.path.read_bytes()[: layout.HEADER.size])
        server = LiveServer(mirror.link)
        server.look()
        data = b"".join(layout.RECORD.pack(*row, 0) for row in rows)
        mirror.take({"event": "records", "name": there.stem, "lost": 0}, pack(data))
        server._update()
    finally:
        mirror.close()
    [rank] = server.ranks.values()
    assert rank.last.cycles.probed[0] == 2
    assert 0 < rank.stats._total[AT["cycles"]] <= sum(row[3] == 2 for row in rows)
    assert rank.stats._total[AT["clean"]] > 100


def test_a_process_that_says_later_that_it_is_sampled_counts_from_the_first_change_that_was_seen(
    tmp_path: Path,
) -> None:
    rows = records(400, False)
    sampled = [at for at, row in enumerate(rows) if row[3] == layout.POINT_SAMPLING and row[6] == 1]
    grown = GrowingRing(tmp_path / "links", PLAN, capacity=1 << 12)
    grown.add(rows[: sampled[3] - 20])
    server = LiveServer(grown.link)
    server.look()
    grown.report(sampling={"on": True})
    server.look()
    grown.add(rows[sampled[3] - 20 :])
    server._update()
    [rank] = server.ranks.values()
    assert rank.last.cycles.probed[0] == 2
    assert 0 < rank.stats._total[AT["cycles"]] <= sum(row[3] == 2 for row in rows[sampled[3] :])
