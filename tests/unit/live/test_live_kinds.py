"""Seams and plain steps of engines that do not say how many tokens they drafted, or when they had nothing to do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specmeter.exports.cycle_kinds import NAMES, CycleFacts, cycle_kinds, kind_counts
from specmeter.exports.figures import run_figures
from specmeter.live import server as server_module
from specmeter.live.server import LiveServer
from specmeter.live.view import Shown, plain_text, rank_lines
from specmeter.runtime import layout
from specmeter.trace.rundir import load
from specmeter.trace.synthetic import make_plan
from tests.support.growing import GrowingRing
from tests.support.saved_runs import MS, PLAN, Rows, cycle, save_run

NOW = 5000
S = 1000 * MS
# As SGLang's recipe: no number of drafted tokens, and the batch.
SILENT = make_plan(
    [("cycle", "cycle", "none"), ("verify.forward", "leaf", "none"), ("draft.graph", "leaf", "none")], ["cycle.batch"]
)


def silent(count: int, drafting: bool, start: int, marks: bool = False) -> Rows:
    """Cycles of 10 ms for two sequences; with ``marks`` the probes are in for one in five."""
    rows: Rows = []
    for i in range(count):
        at, inside = start + i * 10 * MS, not marks or i % 5 == 0
        if marks and i % 5 < 2:
            rows.append((at, at, i, layout.POINT_SAMPLING, layout.KIND_MARK, 0, int(inside)))
        if inside and drafting:
            rows.append((at + 1, at + 2 * MS, i, 3, layout.KIND_HOST_SPAN, 0, 0))
        if inside:
            rows.append((at + 2 * MS, at + 9 * MS, i, 2, layout.KIND_HOST_SPAN, 0, 0))
        rows.append((at, at + 9 * MS + 5, i, 1, layout.KIND_HOST_SPAN, 0, 0))
        if inside:
            rows.append((2, at + 9 * MS + 6, i, 4, layout.KIND_VALUE, 0, 0))
    return rows


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every poll folds."""
    monkeypatch.setattr(server_module, "FOLD_S", 0.0)


def watched(tmp_path: Path, plan: dict[str, object], rows: Rows, pieces: int = 3) -> LiveServer:
    """A server that was polled after each piece."""
    ring = GrowingRing(tmp_path / "links", plan)
    live = LiveServer(ring.link, histograms=True)
    live.poll()
    for piece in np.array_split(np.arange(len(rows)), pieces):
        ring.add([rows[i] for i in piece])
        live.poll()
    return live


@pytest.mark.parametrize("marks", [False, True])
def test_a_plain_server_is_not_shown_as_speculative(tmp_path: Path, marks: bool) -> None:
    live = watched(tmp_path, SILENT, silent(200, False, NOW * S, marks))
    (rank,) = live.ranks.values()
    recent = rank.stats.recent(NOW + 2, 2)
    (figures,) = live.figures()
    assert recent.cycle_ms is None and recent.plain_ms == pytest.approx(10)
    assert figures.cycle.count == 0 and figures.cycles["decode"] == 0 and figures.cycles["plain"] >= 190
    assert recent.tokens_per_s == pytest.approx(200, rel=0.06), "a token a sequence in each step"
    assert "plain step 10.00 ms" in plain_text(rank_lines("rank 0", recent, [], Shown()))


def test_cycles_with_drafts_and_without_are_apart(tmp_path: Path) -> None:
    rows = silent(50, True, NOW * S) + silent(30, False, NOW * S + 500 * MS)
    (figures,) = watched(tmp_path, SILENT, rows).figures()
    assert figures.cycles == {"decode": 49, "plain": 29} and figures.cycle.count == 49


def test_a_cycle_without_probes_is_as_the_last_one_with_them_and_an_unknown_one_is_named() -> None:
    def facts(**told: list[int]) -> CycleFacts:
        count = len(next(iter(told.values())))
        given = {name: np.array(told.get(name, [-1] * count)) for name in ("drafted", "accepted", "steps", "batch")}
        return CycleFacts(
            np.array(told.get("kind", [0] * count)), **given, probed=np.array(told.get("probed", [1] * count)),
            drafts=np.array(told.get("drafts", [0] * count), bool), telling=bool(told.get("telling", [1])[0]),
            forward=np.array(told.get("forward", [1] * count), bool),
        )  # fmt: skip

    def names(found: CycleFacts) -> list[str]:
        return [NAMES[kind] for kind in cycle_kinds(found)[0]]

    sampled = facts(probed=[0, 1, 0, 1, 0, 2], drafts=[0, 1, 0, 0, 0, 0], forward=[0, 1, 0, 1, 0, 0])
    assert names(sampled) == ["unknown", "decode", "decode", "plain", "plain", "plain"]
    assert cycle_kinds(facts(probed=[0]), 0)[0].tolist() == [0], "what the records before these showed"
    assert names(facts(drafted=[3, 0, -1], drafts=[0, 1, 1])) == ["decode", "plain", "decode"]
    assert names(facts(steps=[0, 3])) == ["plain", "decode"], "drafting is off, or it is in no point"
    assert names(facts(accepted=[0])) == ["decode"], "a drafter that has no points"
    assert names(facts(telling=[0])) == names(facts(forward=[0])) == ["unknown"]
    assert names(facts(batch=[0, 1], kind=[0, 3])) == ["empty", "prefill"]
    assert kind_counts(cycle_kinds(sampled)[0]) == {"unknown": 1, "decode": 2, "plain": 3}


def test_a_saved_run_says_so_too(tmp_path: Path) -> None:
    run = load(save_run(tmp_path / "run"))
    kinds = run_figures(run)[0].cycles
    for name in ("drafted", "steps", "accepted"):
        run.cycles[name] = np.full(len(run.cycles[name]), -1)
    assert run_figures(run)[0].cycles == kinds and kinds["plain"] > 100


def device_rows(count: int, drafted: int, start: int, number: int) -> Rows:
    """Cycles of 16 ms, one after the other, with two device spans each: 1 ms between them, 3 ms to the next cycle."""
    rows: Rows = []
    for i in range(count):
        at = start + i * 16 * MS
        rows += [(*row[:2], number + i, *row[3:]) for row in cycle(at, 16 * MS, drafted, 1 if drafted else 0)]
        for begin, end in ((0, 6), (7, 13)):
            # As the runtime does, written in the next cycle.
            rows.append((at + begin * MS, at + end * MS, number + i + 1, 2, layout.KIND_DEVICE_SPAN, 0, 1))
    return rows


@pytest.mark.parametrize("pieces", [1, 7, 400])
def test_waiting_for_requests_is_no_seam(tmp_path: Path, pieces: int) -> None:
    """60 s without requests, then plain steps, whose gaps are no part of a speculative cycle."""
    rows = [
        *device_rows(40, 2, NOW * S, 1),
        *device_rows(40, 2, (NOW + 60) * S, 41),
        *device_rows(40, 0, (NOW + 61) * S, 81),
    ]
    live = watched(tmp_path, PLAN, rows, pieces)
    (rank,) = live.ranks.values()
    assert rank.stats.recent(NOW + 63, 10).seam_ms == pytest.approx(4, rel=0.03)
    (figures,) = live.figures()
    assert figures.seam is not None and figures.seam.count == pytest.approx(76, abs=2)
    assert figures.seam.sum_s / figures.seam.count == pytest.approx(0.004, rel=0.03)
