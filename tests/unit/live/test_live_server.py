"""Live figures against the analysis of the same records, however they arrive."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specmeter.analysis.breakdown import breakdown
from specmeter.errors import SpecmeterError
from specmeter.exports.openmetrics import openmetrics_text
from specmeter.live import server as server_module
from specmeter.live import watch as watch_module
from specmeter.live.server import LiveServer
from specmeter.live.tail import Tail
from specmeter.live.view import Shown, bar, clip, legend, plain_text, rank_lines, server_lines
from specmeter.live.watch import LinksHere, Watch
from specmeter.runtime import layout
from specmeter.trace import load_rings
from specmeter.trace.cycles import KINDS
from tests.support.growing import GrowingRing
from tests.support.saved_runs import MS, PLAN, cycle, recording

NOW = 5000  # seconds of perf_counter at which the synthetic recording starts


def grown(tmp_path: Path, pieces: int, monkeypatch: pytest.MonkeyPatch, **how: Any) -> tuple[GrowingRing, LiveServer]:
    """A server that was polled after each of so many pieces of a recording."""
    monkeypatch.setattr(server_module, "FOLD_S", 0.0)
    ring = GrowingRing(tmp_path / "links", PLAN, **how)
    live = LiveServer(ring.link, histograms=True)
    live.poll()
    rows = recording(prompts=4, cycles=30, start=NOW * 1000 * MS)[0]
    for piece in np.array_split(np.arange(len(rows)), pieces):
        ring.add([rows[i] for i in piece])
        live.poll()
    return ring, live


def mixed_rows(cycles: int) -> list[tuple[int, ...]]:
    """Cycles whose probes are in and out by fives: a mark at each change, and only the cycle's own span while out."""
    rows: list[tuple[int, ...]] = []
    at = NOW * 1000 * MS
    for number in range(cycles):
        inside = number // 5 % 2 == 0
        if number % 5 == 0:
            rows.append((at, at, number, layout.POINT_SAMPLING, layout.KIND_MARK, 0, int(inside)))
        whole = cycle(at, 16 * MS, 2, number % 3)
        rows += [r for r in whole if inside or r[3] == 1]
        at += 16 * MS
    return rows


@pytest.mark.parametrize("pieces", [1, 13, 150])
def test_cycles_of_the_original_code_are_not_averaged_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    monkeypatch.setattr(server_module, "FOLD_S", 0.0)
    ring = GrowingRing(tmp_path / "links", PLAN)
    live = LiveServer(ring.link, histograms=True)
    live.poll()
    rows = mixed_rows(100)
    for piece in np.array_split(np.arange(len(rows)), pieces):
        ring.add([rows[i] for i in piece])
        live.poll()
    (figures,) = live.figures()
    assert figures.cycle.count == pytest.approx(49, abs=1)
    assert figures.phases["verify"].sum_s / figures.cycle.count == pytest.approx(0.0096, rel=1e-3)


@pytest.mark.parametrize("pieces", [1, 7, 160, 900])
def test_live_totals_are_the_batch_analysis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: int) -> None:
    ring, live = grown(tmp_path, pieces, monkeypatch)
    (figures,) = live.figures()
    trace = load_rings([ring.path], PLAN)
    rank = trace.main
    wanted = (rank.cycles.drafted > 0) & (rank.cycles.dur_ns < 20 * MS)
    wanted[[0, -1]] = False
    # The batch also leaves out what is beside idle times; both count a cycle's phases alike.
    table = breakdown(rank, trace.index, wanted)
    assert figures.cycle.count == table.cycles
    assert figures.cycle.sum_s * 1e3 / table.cycles == pytest.approx(table.cycle_ms)
    assert {n: b.sum_s * 1e3 / table.cycles for n, b in figures.phases.items()} == pytest.approx(
        {row.name: row.ms for row in table.phases}
    )
    rows = rank.cycles.accept[(rank.cycles.drafted > 0)[rank.cycles.accept[:, 0]]]
    rows = rows[rows[:, 0] < len(rank.cycles) - 1]  # the last one has not ended
    assert figures.sequences == len(rows) and figures.tokens == int(rows[:, 1].sum()) + len(rows)
    assert [p.kept for p in figures.positions] == [int((rows[:, 1] > i).sum()) for i in range(2)]
    # The first one seen is not whole, and the last has not ended. Each is of one kind, so that they add up.
    drafted, kind = rank.cycles.drafted[1:-1], np.array(KINDS)[rank.cycles.kind[1:-1]]
    assert figures.cycles["plain"] == np.count_nonzero((kind == "decode") & (drafted == 0)) > 100
    assert sum(figures.cycles.values()) == len(kind) and figures.lost == 0


def test_armed_is_known_before_the_first_cycle(tmp_path: Path) -> None:
    ring = GrowingRing(tmp_path / "links", PLAN)
    live = LiveServer(ring.link)
    live.poll()
    (figures,) = live.figures()
    assert figures.armed is True and (figures.server, figures.rank, figures.cycles) == ("grow", -1, {})
    ring.report(armed=False, rank=2)
    live.look()
    assert [(f.rank, f.armed) for f in live.figures()] == [(2, False)]
    assert "specmeter_armed" in openmetrics_text(live.figures())


@pytest.mark.parametrize("capacity", [4096, 512])
def test_what_the_ring_holds_counts_where_it_is_asked_for(tmp_path: Path, capacity: int) -> None:
    ring = GrowingRing(tmp_path / "links", PLAN, capacity=capacity)
    rows = recording(prompts=4, cycles=30, start=NOW * 1000 * MS)[0]
    ring.add(rows)
    fresh, whole = LiveServer(ring.link), LiveServer(ring.link, held=True)
    for live in (fresh, whole):
        live.poll()
    assert fresh.figures()[0].cycles == {}
    (figures,) = whole.figures()
    everything = len(load_rings([ring.path], PLAN).main.cycles)
    assert sum(figures.cycles.values()) == pytest.approx(min(1, capacity * 7 / 8 / len(rows)) * 240, abs=5)
    assert whole.lost == 0 and sum(figures.cycles.values()) < everything


def test_a_ring_made_after_the_first_look_counts_from_its_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process makes its ring with its first record, and a second's cycles may be in it by the next look."""
    monkeypatch.setattr(server_module, "FOLD_S", 0.0)
    monkeypatch.setattr(server_module, "LOOK_S", 0.0)
    ring = GrowingRing(tmp_path / "links", PLAN)
    ring.path.rename(tmp_path / "away")
    watch = Watch(LinksHere(ring.link), histograms=True)
    watch.poll()
    assert watch.figures()[0].armed and not watch.servers["grow"].ranks
    (tmp_path / "away").rename(ring.path)
    rows = recording(prompts=4, cycles=30, start=NOW * 1000 * MS)[0]
    ring.add(rows)
    watch.poll()
    everything = len(load_rings([ring.path], PLAN).main.cycles)
    assert sum(watch.figures()[0].cycles.values()) == everything - 2, "all but the first and the one that has not ended"


def test_a_link_made_after_the_first_listing_counts_from_its_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "FOLD_S", 0.0)
    monkeypatch.setattr(watch_module, "_LINKS_S", 0.0)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    rows = recording(prompts=4, cycles=30, start=NOW * 1000 * MS)[0]
    GrowingRing(tmp_path / "specmeter", PLAN, "old").add(rows)
    watch = Watch(LinksHere(), histograms=True)
    watch.poll()
    GrowingRing(tmp_path / "specmeter", PLAN, "young").add(rows)
    watch.poll()
    counts = {figures.server: sum(figures.cycles.values()) for figures in watch.figures()}
    assert counts["old"] == 0 and counts["young"] > 200
    young = watch.servers["young"]
    assert young.since_s is not None and time.perf_counter() - young.since_s < 60, "no rate over more than was watched"


def test_recent_figures_are_of_the_last_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _ring, live = grown(tmp_path, 40, monkeypatch)
    (rank,) = live.ranks.values()
    recent = rank.stats.recent(NOW + 4, 4)
    assert recent.cycle_ms == pytest.approx(16.19, abs=0.05) and recent.plain_ms == pytest.approx(10.19, abs=0.05)
    assert recent.phases_ms["verify"] == pytest.approx(9.6, abs=0.01)
    assert recent.accept_length == pytest.approx(2.0, abs=0.1)
    assert recent.kept == pytest.approx((2 / 3, 1 / 3), abs=0.03)
    assert sum(rank.stats.trend(NOW + 4)) == pytest.approx(4 * 30 * 3, abs=4)
    later = rank.stats.recent(NOW + 100, 10)
    assert later.cycle_ms is None and later.tokens_per_s == 0 and later.accept_length is None


def test_only_new_records_are_read(tmp_path: Path) -> None:
    ring = GrowingRing(tmp_path / "links", PLAN, capacity=64)
    rows = recording(prompts=1)[0]
    ring.add(rows[:50])
    tail = Tail(ring.path)
    assert len(tail.new()) == 0
    ring.add(rows[50:55])
    assert tail.new()["t1"].tolist() == [row[1] for row in rows[50:55]]
    ring.add(rows[55:100])
    assert len(tail.new()) == 45 and tail.lost == 0, "over the end of the ring"
    assert len(tail.new()) == 0
    ring.add(rows[100:300])
    newest = tail.new()["t1"]
    assert newest[-1] == rows[299][1] and tail.lost + len(newest) == 200
    assert tail.lost > 0 and tail.next_position == 300


def test_records_wait_in_the_ring_until_their_second_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [float(NOW)]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    ring = GrowingRing(tmp_path / "links", PLAN, capacity=1 << 12)
    live = LiveServer(ring.link)
    live.poll()
    rows = recording(prompts=1, cycles=30, start=NOW * 1000 * MS)[0]
    ring.add(rows[:200])
    clock[0] += server_module.BEHIND_S / 2
    live.poll()
    assert not live.ranks, "the second is not over"
    clock[0] = NOW + 1 + server_module.BEHIND_S * 1.5
    version = live.version
    live.poll()
    assert live.ranks and live.version == version + 1
    live.poll()
    assert live.version == version + 1, "once a second"


def test_a_ring_that_fills_up_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [float(NOW)]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    ring = GrowingRing(tmp_path / "links", PLAN, capacity=256)
    live = LiveServer(ring.link)
    live.poll()
    rows = recording(prompts=4, cycles=30, start=NOW * 1000 * MS)[0]
    for begin in range(0, len(rows), 40):  # many laps within the one second
        ring.add(rows[begin : begin + 40])
        live.poll()
    clock[0] += 2
    live.poll()
    assert live.lost == 0 and live.ranks


def test_a_slot_never_completed_is_passed(tmp_path: Path) -> None:
    ring = GrowingRing(tmp_path / "links", PLAN)
    tail = Tail(ring.path)
    rows = recording(prompts=1)[0]
    ring.hole()
    ring.add(rows[:3])
    assert len(tail.new()) == 0
    tail.pass_hole()
    assert len(tail.new()) == 0, "it may be completed yet"
    tail.pass_hole()
    assert len(tail.new()) == 3 and tail.lost == 1


def test_lost_records_leave_no_half_cycle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _ring, live = grown(tmp_path, 3, monkeypatch, capacity=256)
    (figures,) = live.figures()
    assert figures.lost > 0
    verify = figures.phases["verify"]
    assert verify.count == figures.cycle.count and verify.sum_s / verify.count == pytest.approx(0.0096, rel=1e-3)


def test_device_gaps_are_seams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "FOLD_S", 0.0)
    ring = GrowingRing(tmp_path / "links", PLAN)
    live = LiveServer(ring.link, histograms=True)
    live.poll()
    rows, device = [], 0
    for row in recording(prompts=1, start=NOW * 1000 * MS)[0]:
        rows.append(row)
        if row[3] == 2:
            rows.append((device, device + 7 * MS, row[2], 2, layout.KIND_DEVICE_SPAN, 0, 0))
            device += 9 * MS
    ring.add(rows)
    live.poll()
    (figures,) = live.figures()
    assert figures.seam is not None and figures.seam.sum_s / figures.seam.count == pytest.approx(0.002, rel=0.05)
    assert "specmeter_seam_duration_seconds_bucket" in openmetrics_text([figures])


def test_a_damaged_ring_is_said_and_harms_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ring, live = grown(tmp_path, 4, monkeypatch)
    count = live.figures()[0].cycle.count
    ring.add([(9, 5, 0, 1, 0, 0, 0), (0, 0, 0, 999, 0, 0, 0), (-5, -9, 0, 2, 0, 0, 0)])
    live.poll()
    assert live.figures()[0].cycle.count == count
    ring.path.write_bytes(b"no ring")
    other = LiveServer(ring.link)
    other.poll()
    assert other.fault and not other.ranks
    assert other.fault in plain_text(server_lines(other, NOW, Shown()))


def test_a_link_without_a_plan_is_refused_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    good = GrowingRing(tmp_path / "specmeter", PLAN, "good")
    bad = GrowingRing(tmp_path / "specmeter", PLAN, "bad")
    (bad.link.path / "plan.json").write_text("{")
    with pytest.raises(SpecmeterError):
        LiveServer(bad.link)
    watch = Watch(LinksHere())
    watch.poll()
    assert list(watch.servers) == [good.link.id] and "bad" in watch.note


def test_the_view_shows_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _ring, live = grown(tmp_path, 40, monkeypatch)
    lines = server_lines(live, NOW + 4, Shown(width=100, seconds=4), chosen=True)
    text = plain_text(lines)
    assert "> grow" in text and "armed" in text and "16.18 ms" in text
    assert "accept 1.99" in text and "(break-even 1.59)" in text and "kept 6" in text and "seams -" in text
    assert max(len(line) for line in text.splitlines()) <= 100
    rank = next(iter(live.ranks.values()))
    drawn = "".join(part for part, _style in bar(rank.stats.recent(NOW + 4, 4), 60))
    assert len(drawn) == 62
    # 1.6 of 16.2 ms draft, 9.6 verify, 1.6 accept, the rest between points.
    assert [drawn.count(letter) for letter in "DVA?"] == pytest.approx([6, 36, 6, 12], abs=1)
    ascii_only = plain_text(server_lines(live, NOW + 4, Shown(width=60, seconds=4, unicode=False)))
    assert ascii_only.isascii()


def test_the_legend_is_broken_between_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _ring, live = grown(tmp_path, 40, monkeypatch)
    (rank,) = live.ranks.values()
    recent = rank.stats.recent(NOW + 4, 4)
    whole, broken = legend(recent), legend(recent, 40).splitlines()
    assert len(broken) > 1 and " ".join(broken) == whole and "?=between points" in broken[-1]
    assert all(len(line) <= 40 and line.endswith("%") for line in broken) and len(whole) > 40


def test_nothing_recent_and_hostile_names_in_the_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = {**PLAN, "engine": "evil\x1b[2J\u202e", "engine_version": "[red]"}
    ring = GrowingRing(tmp_path / "links", plan)
    live = LiveServer(ring.link)
    live.poll()
    text = plain_text(server_lines(live, NOW, Shown()))
    assert "\x1b" not in text and "\u202e" not in text and "no cycle yet" in text
    _ring, busy = grown(tmp_path, 4, monkeypatch, link_id="b")
    (rank,) = busy.ranks.values()
    quiet = plain_text(rank_lines("rank 0", rank.stats.recent(NOW + 200), rank.stats.trend(NOW + 200), Shown()))
    assert "no speculative cycle in the last 10 s" in quiet
    assert clip([("abcdef", ""), ("gh", "")], 4) == [("abcd", "")]


def test_polling_without_news_costs_little(tmp_path: Path) -> None:
    ring = GrowingRing(tmp_path / "links", PLAN, capacity=1 << 16)
    live = LiveServer(ring.link)
    live.poll()
    ring.add(recording(prompts=1)[0])
    live.poll()
    began = time.process_time()
    for _ in range(200):
        live.poll()
    # Far from the measured 0.02 ms each: a look over the whole ring would take longer than this.
    assert (time.process_time() - began) / 200 < 0.002


def test_a_rate_is_over_the_time_that_was_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opened 2.4 s ago, figures over 10 s: what was not watched is no idle time. Later it is the 10 s again."""
    monkeypatch.setattr(time, "perf_counter", lambda: NOW - 0.4)
    _ring, live = grown(tmp_path, 40, monkeypatch)
    (rank,) = live.ranks.values()
    young, old = rank.stats.recent(NOW + 2, 10), rank.stats.recent(NOW + 10, 10)
    tokens = sum(rank.stats.trend(NOW + 2))
    assert tokens > 100 and young.tokens_per_s == pytest.approx(tokens / 2.4)
    assert old.tokens_per_s == pytest.approx(sum(rank.stats.trend(NOW + 10, 10)) / 10)


def test_a_server_without_cycles_says_why(tmp_path: Path) -> None:
    ring = GrowingRing(tmp_path / "links", PLAN)
    live = LiveServer(ring.link)
    live.poll()
    assert "no cycle yet" in plain_text(server_lines(live, NOW, Shown()))
    ring.report(armed=False)
    live.look()
    assert "press a to arm" in plain_text(server_lines(live, NOW, Shown()))
    assert "`specmeter arm --link grow` arms it" in plain_text(server_lines(live, NOW, Shown(keys=False)))
    live.found = [replace(process, alive=False) for process in live.found]
    assert "its server has ended" in plain_text(server_lines(live, NOW, Shown()))
    live.found = []
    assert "waiting for the server" in plain_text(server_lines(live, NOW, Shown()))
