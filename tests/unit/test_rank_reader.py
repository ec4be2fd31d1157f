"""Rings of many ranks on several hosts: joined on one clock, gaps and missing ranks named, the straggler found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specmeter.analysis.profile import analyse
from specmeter.analysis.rank_arrivals import rank_skew
from specmeter.reporters.terminal import render_analysis
from specmeter.trace.build import Trace, load_rings
from specmeter.trace.synthetic_ranks import PLAN, TRANSFER_NS, Ranks, write_ranks

HOUR_NS = 3_600_000_000_000


def read(folder: Path, ranks: Ranks) -> Trace:
    return load_rings(write_ranks(folder, ranks), PLAN)


def skew_of(trace: Trace) -> dict[str, Any]:
    found = rank_skew(trace, np.arange(len(trace.main.cycles)) < len(trace.main.cycles) - 1)
    assert found is not None
    return found.as_json()


@pytest.mark.parametrize(("count", "hosts"), [(8, 2), (64, 8)])
def test_clocks_of_several_hosts_are_recovered_and_the_straggler_found(tmp_path: Path, count: int, hosts: int) -> None:
    offsets = tuple(h * 7 * HOUR_NS + 1_234 * h for h in range(hosts))
    drift = tuple((-1) ** h * 5e-6 * h for h in range(hosts))
    calendars = tuple((-1) ** h * h * HOUR_NS for h in range(hosts))
    ranks = Ranks(
        count, hosts, 40, offset_ns=offsets, drift=drift, calendar_ns=calendars, straggler=count - 2, missing=(3,)
    )
    trace = read(tmp_path, ranks)
    found = skew_of(trace)
    assert len(found["ranks"]) == count - 1
    assert "no cycles of rank 3: its ring was not recorded" in found["notes"]
    begin, arrived, _end = ranks.begins()
    for (host, rank), clock in zip(found["ranks"], found["clocks"], strict=True):
        assert clock["source"] == ("shared" if host == "host0" else "collectives")
        # Moved onto the first host's clock, a cycle's begin lies where it really was, within the stated bound.
        number = ranks.host(rank)
        shown = int(ranks.read(begin[20:21], number)[0])
        moved = shown + clock["offset_ns"] + round(clock["drift_ppm"] / 1e6 * (shown - clock["middle_ns"]))
        assert abs(moved - int(begin[20])) <= clock["error_ns"] <= 200_000
    arrivals = found["arrivals"][0]
    late = found["ranks"][int(np.argmax(arrivals["last_percent"]))][1]
    assert (late, max(arrivals["last_percent"])) == (count - 2, 100.0)
    true_skew = np.ptp(np.delete(arrived, 3, axis=0), axis=0) / 1e6
    assert arrivals["skew_p50_ms"] == pytest.approx(float(np.median(true_skew)), abs=0.005)
    assert arrivals["transfer_ms"] == pytest.approx(4 * TRANSFER_NS / 1e6, rel=1e-3)


def test_a_ring_lapped_on_one_rank_only_is_said_and_the_ranks_are_compared_over_what_all_have(tmp_path: Path) -> None:
    for hosts in (1, 2):
        folder = tmp_path / str(hosts)
        folder.mkdir()
        ranks = Ranks(4, hosts, 90, offset_ns=(0, HOUR_NS), straggler=1, lapped=(2,))
        trace = read(folder, ranks)
        found = skew_of(trace)
        assert 27 <= found["cycles"] <= 30
        assert any("the ring of rank 2" in note and "was lapped" in note for note in found["notes"])
        assert found["arrivals"][0]["last_percent"][1] == 100.0
        assert found["cycle_p50_ms"] == pytest.approx(0, abs=0.001)


def test_rings_that_are_all_lapped_are_said_in_one_line(tmp_path: Path) -> None:
    found = skew_of(read(tmp_path, Ranks(2, 1, 60, lapped=(0, 1))))
    assert len([note for note in found["notes"] if "lapped" in note]) == 1


def test_a_profile_shows_a_row_a_rank_and_who_is_waited_for(tmp_path: Path) -> None:
    document = analyse(read(tmp_path, Ranks(4, 2, 60, straggler=3, offset_ns=(0, HOUR_NS))), ())
    assert [row["rank"] for row in document["ranks"]] == [0, 1, 2, 3]
    assert document["straggler"]["rank"] == 3
    assert document["phase_stragglers"][0]["phase"] == "verify" and document["phase_stragglers"][0]["rank"] == 3
    text = render_analysis(document)
    for words in (
        "3 on host1",
        "Rank 3 is the straggler",
        "verify rank 3",
        "which is rank 3 in 100 %",
        "Clock of host1",
    ):
        assert words in text.replace("\n", " "), words


def test_a_single_rank_has_nothing_to_compare(tmp_path: Path) -> None:
    document = analyse(read(tmp_path, Ranks(1, 1, 30)), ())
    assert (document["ranks"], document["rank_skew"], document["phase_stragglers"]) == ([], None, [])
