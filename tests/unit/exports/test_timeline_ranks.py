"""A timeline of ranks on two hosts whose calendars are an hour apart: their cycles stand beside each other."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import specmeter
from specmeter.analysis.profile import analyse
from specmeter.exports.timeline import build_timeline
from specmeter.trace.build import load_rings
from specmeter.trace.rundir import RunWriter
from specmeter.trace.synthetic_ranks import PLAN, Ranks, write_ranks

HOUR_NS = 3_600_000_000_000


@pytest.mark.parametrize("joined", [True, False])
def test_ranks_stand_where_their_collectives_put_them(tmp_path: Path, joined: bool) -> None:
    ranks = Ranks(4, 2, 40, offset_ns=(0, 5 * HOUR_NS), drift=(0.0, 2e-5), calendar_ns=(0, HOUR_NS))
    (tmp_path / "link").mkdir()
    paths = write_ranks(tmp_path / "link", ranks)
    trace = load_rings(paths, PLAN)
    writer = RunWriter.create(tmp_path / "run", ["specmeter", "profile"])
    writer.write_plan(PLAN)
    shutil.copytree(tmp_path / "link", writer.path / "rings")
    writer.write_trace(trace)
    document = analyse(trace, ())
    writer.write_analysis(document if joined else {**document, "rank_skew": None})
    writer.finish("complete")
    lanes = [lane for lane in build_timeline(specmeter.load(writer.path), 10, 20).lanes if lane.kind == "cycles"]
    if not joined:
        # By the calendar alone the other host's cycles lie an hour away, outside of the window.
        assert {lane.process for lane in lanes} == {0, 1}
        return
    assert {lane.process for lane in lanes} == {0, 1, 2, 3}
    first = {lane.process: int(lane.t0_ns[lane.args["cycle"] == 15][0]) for lane in lanes}
    bound = document["rank_skew"]["clocks"][3]["error_ns"]
    assert max(first.values()) - min(first.values()) <= bound < 200_000
