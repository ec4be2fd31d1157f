"""The cost model against laws that are known, each phase by itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specmeter.analysis.costmodel import Knots, fit
from specmeter.analysis.costmodel_collectives import by_issuer
from specmeter.analysis.costmodel_curve import best, curve
from specmeter.analysis.costmodel_data import samples_of
from specmeter.analysis.costmodel_evidence import Assumed, Evidence
from specmeter.analysis.costmodel_explain import evidence_of
from specmeter.analysis.moe import Experts
from specmeter.cli import main
from specmeter.errors import SpecmeterError
from specmeter.trace.rundir import load
from specmeter.trace.tables import read_table, write_table
from tests.support.cost_runs import Law, write_run

POSITIONS = {
    "acceptance": {
        "length_tokens": None,
        "positions": [{"position": 1, "conditional": 0.7}, {"position": 2, "conditional": 0.6}],
    }
}


def evidence(tmp_path: Path, law: Law, steps: list[int], **options: object) -> Evidence:
    return evidence_of([load(write_run(tmp_path / "run", law, steps, **options))])  # type: ignore[arg-type]


def test_two_step_counts_predict_the_rest(tmp_path: Path) -> None:
    law = Law()
    rows = {row.steps: row for row in curve(evidence(tmp_path, law, [0, 2, 5], prompts=20), range(1, 7))}
    for k, row in rows.items():
        assert row.cycle_ms.point == pytest.approx(law.cycle_ms(k), rel=0.01), k
        assert row.tokens.point == pytest.approx(law.tokens(k), rel=0.05), k
        assert row.cycle_ms.low < law.cycle_ms(k) < row.cycle_ms.high, k
    assert {k: row.status for k, row in rows.items()} == {
        1: "interpolated", 2: "measured", 3: "interpolated", 4: "interpolated", 5: "measured", 6: "extrapolated",
    }  # fmt: skip


def test_phases_by_themselves_see_what_a_line_through_cycles_does_not(tmp_path: Path) -> None:
    # Verify bends at six tokens: a line through the cycles of 1..3 steps cannot know, one measured wide chain can.
    law = Law(knee=1.5, noise=0.001)
    rows = {row.steps: row for row in curve(evidence(tmp_path, law, [0, 1, 3, 5, 6]), range(1, 7))}
    line = law.cycle_ms(1) + 5 * (law.cycle_ms(3) - law.cycle_ms(1)) / 2
    assert abs(line / law.cycle_ms(6) - 1) > 0.05
    assert rows[2].cycle_ms.point == pytest.approx(law.cycle_ms(2), rel=0.01)
    assert rows[4].cycle_ms.point == pytest.approx(law.cycle_ms(4), rel=0.01)


def test_the_bound_holds_where_the_knee_was_not_measured(tmp_path: Path) -> None:
    law = Law(knee=0.2)
    rows = {row.steps: row for row in curve(evidence(tmp_path, law, [0, 2, 4]), range(1, 8))}
    assert rows[6].status == "extrapolated"
    assert rows[6].cycle_ms.low < law.cycle_ms(6) < rows[6].cycle_ms.high


def test_one_run_of_one_setting_is_enough(tmp_path: Path) -> None:
    law = Law()
    found = evidence(tmp_path, law, [0, 3])
    rows = {row.steps: row for row in curve(found, range(1, 5))}
    assert found.now == 3
    assert rows[2].cycle_ms.point == pytest.approx(law.cycle_ms(2), rel=0.02)
    assert rows[4].status == "extrapolated"


def test_the_cost_of_tokens_gained_has_its_own_slope(tmp_path: Path) -> None:
    model = fit(samples_of([load(write_run(tmp_path / "run", Law(per_token=0.5), [0, 2, 5]))]))
    extend = next(m for m in model.models if m.name == "extend.forward")
    assert extend.per_token == pytest.approx(0.5, rel=0.02)
    assert next(m for m in model.models if m.name == "verify.forward").per_token == 0


def test_drafts_that_end_early_are_no_evidence_of_shorter_ones(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", Law(), [0, 3])
    cycles = read_table(path, "cycles")
    odd = np.arange(len(cycles["drafted"])) % 2
    write_table(path, "cycles", {**cycles, "drafted": cycles["drafted"] - odd * (cycles["drafted"] == 3)})
    with pytest.raises(SpecmeterError, match=r"The drafts of k=3 end early in \d+ of \d+ cycles"):
        samples_of([load(path)])


def test_a_server_switched_to_no_drafts_is_no_evidence(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", Law(), [0, 3])
    cycles = read_table(path, "cycles")
    none = cycles["setting"] == "baseline"
    # As vLLM records it: the draft's forward runs, no count of drafts is made.
    unknown = {key: np.where(none, -1, cycles[key]) for key in ("steps", "drafted", "accepted")}
    write_table(path, "cycles", {**cycles, **unknown, "setting": np.where(none, "k=0", cycles["setting"])})
    assert [sample.setting for sample in samples_of([load(path)])] == ["k=3"]


def test_break_even_and_speed_up_are_of_the_same_run(tmp_path: Path) -> None:
    law = Law()
    row = next(r for r in curve(evidence(tmp_path, law, [0, 2, 5], prompts=20), [5]) if r.steps == 5)
    assert row.break_even is not None and row.speedup is not None
    assert row.break_even.point == pytest.approx(law.cycle_ms(5) / law.cycle_ms(0), rel=0.01)
    assert row.speedup.point == pytest.approx(row.tokens.point / row.break_even.point)


def test_long_chains_whose_last_drafts_are_never_kept_are_measured_and_interpolated(tmp_path: Path) -> None:
    law = Law(accept=(0.6, 0.5, 0.4, 0.3, *[0.0] * 6))
    evidence = evidence_of([load(write_run(tmp_path / "run", law, [0, 5, 8, 10], kind="sweep"))])
    said = {row.steps: row.status for row in curve(evidence, range(1, 13))}
    assert [k for k, word in said.items() if word == "measured"] == [5, 8, 10]
    assert [k for k, word in said.items() if word == "interpolated"] == [1, 2, 3, 4, 6, 7, 9]
    assert [k for k, word in said.items() if word == "extrapolated"] == [11, 12]


def test_without_a_baseline_there_is_no_break_even(tmp_path: Path) -> None:
    rows = curve(evidence(tmp_path, Law(), [2, 5]), [3])
    assert all(row.break_even is None and row.speedup is None for row in rows)


def test_the_best_step_count_is_the_laws(tmp_path: Path) -> None:
    law = Law(step=2.0, accept=(0.8, 0.5, 0.3, 0.2, 0.2, 0.2))
    truth = max(range(1, 7), key=lambda k: law.tokens(k) / law.cycle_ms(k))
    assert best(curve(evidence(tmp_path, law, [0, 2, 6], prompts=20), range(1, 7))).steps == truth


def test_one_more_step_is_what_the_chain_gains_and_costs(tmp_path: Path) -> None:
    law = Law()
    rows = {row.steps: row for row in curve(evidence(tmp_path, law, [0, 2, 5], prompts=20), range(1, 6))}
    assert rows[4].more_ms == pytest.approx(rows[4].cycle_ms.point - rows[3].cycle_ms.point)
    assert rows[4].more_tokens == pytest.approx(rows[4].tokens.point - rows[3].tokens.point)


def test_a_what_if_on_a_phase_changes_that_phase(tmp_path: Path) -> None:
    law = Law()
    found = evidence(tmp_path, law, [0, 2, 5])
    plain = {row.steps: row for row in curve(found, [5])}[5]
    cut = {row.steps: row for row in curve(found, [5], Assumed({"verify": 0.73}))}[5]
    assert plain.cycle_ms.point - cut.cycle_ms.point == pytest.approx(0.27 * plain.phases_ms["verify"], rel=0.01)
    assert cut.status == "what if" and cut.tokens.point == plain.tokens.point


def test_experts_bend_the_verify_axis(tmp_path: Path) -> None:
    runs = [load(write_run(tmp_path / "run", Law(), [0, 2, 5]))]
    dense, mixed = fit(samples_of(runs)), fit(samples_of(runs), Experts(16, 4))
    # Between the same measured widths, and beyond them flatter: there are no more experts to read.
    assert mixed.cycle(12, 2.0).phases["verify"] < dense.cycle(12, 2.0).phases["verify"]
    assert mixed.cycle(5, 2.0).phases["verify"] == pytest.approx(dense.cycle(5, 2.0).phases["verify"])


def test_verify_has_a_part_for_its_width(tmp_path: Path) -> None:
    law = Law()
    parts = fit(samples_of([load(write_run(tmp_path / "run", law, [0, 2, 5]))])).verify_parts(5)
    assert parts["once"] == pytest.approx(law.verify_ms(1), rel=0.02)
    assert parts["width"] == pytest.approx(5 * law.per_width, rel=0.1)


def test_knots_do_not_fall_beyond_the_last() -> None:
    assert Knots((1.0, 2.0), (5.0, 4.0)).at(9.0) == 4.0
    assert Knots((1.0, 3.0), (4.0, 6.0)).at(2.0) == 5.0
    assert Knots((1.0, 3.0), (4.0, 6.0)).slack(1.0, 0.1) == 0.0
    assert Knots((1.0, 3.0), (4.0, 6.0)).slack(5.0, 0.0) == pytest.approx(2.0)


def test_a_run_without_speculation_cannot_be_explained(tmp_path: Path) -> None:
    with pytest.raises(SpecmeterError, match="No chain"):
        evidence(tmp_path, Law(), [0], kind="sweep")


def test_verify_follows_the_tokens_of_the_whole_batch(tmp_path: Path) -> None:
    law = Law()
    found = evidence(tmp_path, law, [0, 2, 5], changes=POSITIONS, batch=4)
    assert found.batch == 4
    rows = {row.steps: row for row in curve(found, range(1, 6))}
    assert rows[3].phases_ms["verify"] == pytest.approx(law.verify_ms(16), rel=0.01)
    assert rows[3].break_even is not None
    # Another batch: verify of as many tokens, and no break-even, for no plain decoding was recorded at it.
    two = {row.steps: row for row in curve(found, [5], Assumed(batch=2))}[5]
    assert two.phases_ms["verify"] == pytest.approx(law.verify_ms(12), rel=0.01)
    assert two.break_even is None


def test_acceptance_of_a_batch_comes_from_the_saved_analysis(tmp_path: Path) -> None:
    # The table of cycles has sums over the batch only.
    rows = curve(evidence(tmp_path, Law(), [0, 2], changes=POSITIONS, batch=4), [2])
    assert rows[0].tokens.point == pytest.approx(1 + 0.7 + 0.7 * 0.6)
    with pytest.raises(SpecmeterError, match="No acceptance was recorded"):
        curve(evidence_of([load(write_run(tmp_path / "bare", Law(), [0, 2], batch=4))]), [2])


def test_a_baseline_of_its_own_start_is_read_with_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", Law(), [3])
    (run / "children").mkdir()
    write_run(run / "children" / "baseline", Law(), [0], kind="sweep")
    assert evidence_of([load(run)]).plain() is not None


def test_the_bound_covers_what_other_prompts_show(tmp_path: Path) -> None:
    # Fitted on some prompts, measured on others: the interval is for the law, not for these prompts.
    law, inside = Law(noise=0.05), 0
    for seed in range(12):
        path = write_run(tmp_path / f"run{seed}", law, [0, 2, 5], prompts=6, cycles=20, seed=seed)
        row = next(r for r in curve(evidence_of([load(path)], now=2), [4]) if r.steps == 4)
        inside += row.tok_s.low <= 1000 * law.tokens(4) / law.cycle_ms(4) <= row.tok_s.high
    assert inside >= 10


def test_slack_is_in_cycle_and_speed_alike(tmp_path: Path) -> None:
    # Every draft is kept and nothing is noisy: all that is left is what was not measured.
    law = Law(knee=0.5, accept=(1.0,) * 7, noise=0.0)
    row = {row.steps: row for row in curve(evidence(tmp_path, law, [0, 2, 7]), [6])}[6]
    truth = 1000 * law.tokens(6) / law.cycle_ms(6)
    assert row.cycle_ms.low < law.cycle_ms(6) < row.cycle_ms.high
    assert row.tok_s.low < truth < row.tok_s.high and abs(row.tok_s.point / truth - 1) > 0.01


def test_what_a_shorter_chain_keeps_more_is_carried_over(tmp_path: Path) -> None:
    two = write_run(tmp_path / "two", Law(accept=(0.9, 0.9)), [2], cycles=100)
    five = write_run(tmp_path / "five", Law(), [0, 5], cycles=100)
    rows = {row.steps: row for row in curve(evidence_of([load(two), load(five)], now=2), range(1, 6))}
    more = 1 + 0.9 + 0.81 - Law().tokens(2)
    assert rows[2].tokens.point == pytest.approx(1 + 0.9 + 0.81, rel=0.02)
    assert rows[5].tokens.point == pytest.approx(Law().tokens(5), rel=0.03)
    assert rows[4].tokens.point == pytest.approx(Law().tokens(4) + more / 3, rel=0.03)
    assert rows[1].tokens.point == pytest.approx(Law().tokens(1) + more / 2, rel=0.03)


def test_collectives_belong_to_the_phase_that_encloses_them() -> None:
    rows = [
        ("verify.forward", 0, 0, 100), ("wait.all_reduce", 0, 10, 20), ("draft.forward", 2, 200, 50),
        ("wait.all_gather", 0, 210, 40), ("wait.all_reduce", 0, 260, 10), ("wait.rpc", 0, 20, 5),
    ]  # fmt: skip
    columns = dict(
        zip(("point", "step", "t0_ns", "dur_ns"), (np.array(c) for c in zip(*rows, strict=True)), strict=True)
    )
    found = by_issuer({**columns, "pid": np.ones(len(rows), np.int64)})
    assert list(found["point"]) == [
        "verify.forward", "verify.all_reduce", "draft.forward", "draft.all_gather", "wait.all_reduce", "wait.rpc",
    ]  # fmt: skip
    assert list(found["step"]) == [0, 0, 2, 2, 0, 0]


def test_stalls_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Seen on a busy machine: 11 of 140 cycles took 65 times the median, and a mean of them tripled the setting's cost.
    law, path = Law(), write_run(tmp_path / "run", Law(), [0, 2, 5])
    cycles = read_table(path, "cycles")
    hit = np.flatnonzero((cycles["setting"] == "k=5") & (cycles["dropped"] == ""))[:10]
    cycles["dur_ns"] = cycles["dur_ns"].copy()
    cycles["dur_ns"][hit] *= 65
    write_table(path, "cycles", cycles)
    found = evidence_of([load(path)], now=5)
    rows = {row.steps: row for row in curve(found, range(1, 6))}
    assert rows[5].cycle_ms.point == pytest.approx(law.cycle_ms(5), rel=0.01)
    assert next(s.stalled for s in found.samples if s.steps == 5) == 10
    assert main(["explain", str(path)]) == 0
    assert "10 cycles longer than 5 times the median" in " ".join(capsys.readouterr().out.split())
