"""Records that are missing in the middle of a ring: no half cycle counts, nor one whose probes are not known."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from specmeter.hosts.far_rings import pack
from specmeter.hosts.live_links import FarLinks
from specmeter.hosts.mirror import Mirror
from specmeter.live.server import LiveServer
from specmeter.live.watch import Watch
from specmeter.runtime import layout
from specmeter.trace import RankTrace, load_rings
from specmeter.trace.cycles import KEPT, LOST
from specmeter.trace.synthetic import make_plan, make_records, write_ring

MS = 1_000_000
PLAN = make_plan([("cycle", "cycle", "none"), ("verify.forward", "leaf", "none")], [])
Row = tuple[int, int, int, int, int, int, int]


def rows(number: int, drawn: bool = True) -> list[Row]:
    """The records of one cycle of 10 ms: 8 of them in verify, where the probes are in, which is not from 20 to 39."""
    begin, inside = (100 + 10 * number) * MS, not (drawn and 20 <= number < 40)
    found: list[Row] = []
    if drawn and number in (0, 20, 40):
        found.append((begin, begin, number, layout.POINT_SAMPLING, layout.KIND_MARK, 0, int(inside)))
    if inside:
        found.append((begin + MS, begin + 9 * MS, number, 2, layout.KIND_HOST_SPAN, 0, 0))
    return [*found, (begin, begin + 9 * MS + 9, number, 1, layout.KIND_HOST_SPAN, 0, 0)]


def verify_ms(rank: RankTrace) -> set[float]:
    """What verify took in the cycles that count as probed."""
    counts = (rank.cycles.drop == KEPT) & (rank.cycles.probed == 1)
    return set((rank.self_ns[counts][:, 1] / MS).tolist())


def test_what_a_far_ring_lost_on_the_way_is_in_no_cycle(tmp_path: Path) -> None:
    there = write_ring(tmp_path / "7-8.ring", make_records([]), 4096)
    mirror = Mirror({"link": "l", "path": "/there", "plan": PLAN, "document": {"id": "l"}})
    try:
        mirror.take({"event": "ring", "name": "7-8"}, there.read_bytes()[: layout.HEADER.size])
        for numbers, lost in ((range(18), 0), (range(26, 60), 12)):
            data = b"".join(layout.RECORD.pack(*row, 0) for number in numbers for row in rows(number))
            mirror.take({"event": "records", "name": "7-8", "lost": lost}, pack(data))
        rank = load_rings([mirror.folder / "7-8.ring"], PLAN).main
        # The gap itself is one more, which whoever reads the ring counts.
        watch = Watch(FarLinks([]))
        assert LiveServer(mirror.link, missed=partial(watch.where.lost, mirror.link)).lost == 11
    finally:
        mirror.close()
    assert len(rank.cycles) == 18 + 34 and verify_ms(rank) == {8.0}
    assert rank.cycles.dur_ns[17] == 90 * MS and rank.cycles.drop[17] == LOST
    # The change at 20 is lost: up to that at 40 nobody knows whether the probes were in.
    assert set(rank.cycles.probed[19:32].tolist()) == {2} and set(rank.cycles.probed[32:].tolist()) == {1}


@pytest.mark.parametrize("gone", [0, 1])
def test_a_record_that_was_never_completed_takes_its_cycle_along(tmp_path: Path, gone: int) -> None:
    every = [row for number in range(30) for row in rows(number, drawn=False)]
    path = write_ring(tmp_path / "1-1.ring", make_records(every))
    whole = load_rings([path], PLAN).main
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), bytes(4), layout.HEADER_SIZE + (2 * 12 + gone) * layout.RECORD_SIZE + 28)
    rank = load_rings([path], PLAN).main
    assert verify_ms(whole) == verify_ms(rank) == {8.0} and np.count_nonzero(whole.cycles.drop == LOST) == 0
    assert 0 < np.count_nonzero(rank.cycles.drop == LOST) <= 2
    assert set(rank.cycles.dur_ns[rank.cycles.drop == KEPT].tolist()) == {10 * MS}


@pytest.mark.parametrize("later", [False, True])
def test_a_hole_after_the_probes_were_put_in_for_good_leaves_the_cycles_after_it(tmp_path: Path, later: bool) -> None:
    mark = (100 * MS, 100 * MS, 0, layout.POINT_SAMPLING, layout.KIND_MARK, 0, layout.SAMPLING_ALL)
    every = [mark, *(row for number in range(30) for row in rows(number, drawn=False))]
    if later:  # a draw began behind the hole, where is not known
        at = (100 + 10 * 20) * MS
        every.insert(1 + 2 * 20, (at, at, 20, layout.POINT_SAMPLING, layout.KIND_MARK, 0, 1))
    path = write_ring(tmp_path / "1-1.ring", make_records(every))
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), bytes(4), layout.HEADER_SIZE + (1 + 2 * 12) * layout.RECORD_SIZE + 28)
    cycles = load_rings([path], PLAN).main.cycles
    assert set(cycles.probed[:10].tolist()) == {1} and set(cycles.probed[21:].tolist()) == {1}
    assert set(cycles.probed[14:19].tolist()) == ({2} if later else {1})
