"""diff: known differences come out, noise does not, and one start a side proves nothing about a setting."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats

import specmeter
from specmeter.analysis.changes import changes
from specmeter.analysis.diff import diff_runs, side
from specmeter.analysis.unit_means import Units, difference, ratio
from specmeter.cli import main
from specmeter.exports.timeline import build_timeline
from specmeter.reporters.diff_view import render_diff
from specmeter.trace.rundir import write_json
from specmeter.trace.tables import read_table, write_table
from tests.support.saved_runs import PLAN, save_run


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("diff")
    return (
        save_run(folder / "a", command=["specmeter", "profile", "--steps", "2"]),
        save_run(folder / "b", command=["specmeter", "profile", "--steps", "3"], stretch=1.2, seed=1),
    )


def compare(a: Path, b: Path) -> dict[str, Any]:
    return diff_runs(specmeter.load(a), specmeter.load(b))


def test_the_phase_that_changed_is_the_one_that_differs(pair: tuple[Path, Path]) -> None:
    found = compare(*pair)
    words = {row["name"]: row["word"] for row in found["phases"]}
    assert {k: v for k, v in words.items() if k != "rest"} == {
        "draft": "no difference seen",
        "verify": "more",
        "accept": "no difference seen",
    }
    verify = next(row for row in found["phases"] if row["name"] == "verify")
    # 60 % of 16 ms, stretched by 1.2.
    assert verify["difference_ms"]["point"] == pytest.approx(9.6 * 0.2, abs=1e-3)
    assert found["unit"] == "prompt, paired" and verify["difference_ms"]["n"] == 4
    assert found["cycle"]["ratio"]["point"] == pytest.approx(found["cycle"]["b_ms"] / found["cycle"]["a_ms"], rel=1e-3)
    assert "longer" in found["sentence"] and "inconclusive across starts" in found["sentence"]


def test_one_mean_for_columns_differences_and_the_sentence(tmp_path: Path) -> None:
    # Seen with real runs: B - A was +14 ms between columns of 23.9 and 25.7 ms, since prompts were weighed differently.
    a, b = save_run(tmp_path / "a", prompts=4), save_run(tmp_path / "b", prompts=6, stretch=1.3)
    table = read_table(b, "cycles")
    table["dropped"] = np.where((table["prompt_id"] == "p1") & (table["cycle"] % 3 > 0), "cut", table["dropped"])
    table["dur_ns"] = np.where(table["prompt_id"] == "p1", 2 * table["dur_ns"], table["dur_ns"])
    write_table(b, "cycles", table)
    found = compare(a, b)
    for row in (found["cycle"], *found["phases"]):
        assert row["difference_ms"]["point"] == pytest.approx(row["b_ms"] - row["a_ms"])
    assert found["cycle"]["ratio"]["point"] == pytest.approx(found["cycle"]["b_ms"] / found["cycle"]["a_ms"])
    assert f"{100 * (found['cycle']['ratio']['point'] - 1):.1f} %" in found["sentence"]
    assert found["cycle"]["ratio"]["n"] == 4, "only prompts that both runs used"


def test_equal_weights_give_students_and_welchs_t() -> None:
    rng = np.random.default_rng(3)
    x, y = rng.normal(10, 1, 8), rng.normal(11, 2, 8)
    ours, theirs = Units(x, np.full(8, 5.0)), Units(y, np.full(8, 7.0))
    student, welch = difference(ours, theirs, True, "prompt"), difference(ours, theirs, False, "prompt")
    wanted = scipy_stats.ttest_rel(y, x).confidence_interval(0.95)
    assert (student.low, student.high) == pytest.approx((wanted.low, wanted.high))
    wanted = scipy_stats.ttest_ind(y, x, equal_var=False).confidence_interval(0.95)
    assert (welch.low, welch.high) == pytest.approx((wanted.low, wanted.high), rel=1e-3)


def test_intervals_cover_with_unequal_weights() -> None:
    rng = np.random.default_rng(5)
    hits = np.zeros(3)
    for _ in range(400):
        weights = rng.integers(5, 60, 12).astype(float)
        x = rng.normal(10, 1, 12)
        sides = Units(x, weights), Units(x * 1.1 + rng.normal(0, 0.3, 12), weights)
        paired, apart = difference(*sides, True, "u"), difference(*sides, False, "u")
        times = ratio(*sides, True, "u")
        hits += [paired.low < 1.0 < paired.high, apart.low < 1.0 < apart.high, times.low < 1.1 < times.high]
    assert (hits / 400 > 0.89).all() and hits[0] < 396


def test_means_are_the_reports(pair: tuple[Path, Path]) -> None:
    found = compare(*pair)
    for key, path in zip("ab", pair, strict=True):
        report = specmeter.load(path).analysis
        assert found["cycle"][f"{key}_ms"] == pytest.approx(report["cycle"]["mean_ms"]["point"])
        assert found["accept_length"][f"{key}_tokens"] == pytest.approx(report["acceptance"]["length_tokens"]["point"])
        for row in report["phases"]:
            mine = next(r for r in found["phases"] if r["name"] == row["name"])
            assert mine[f"{key}_ms"] == pytest.approx(row["ms"])


def test_a_run_against_itself_has_no_difference(pair: tuple[Path, Path]) -> None:
    found = compare(pair[0], pair[0])
    assert found["changes"] == [] and found["cycle"]["word"] == "no difference seen"
    assert {row["word"] for row in found["phases"]} == {"no difference seen"}


def test_what_was_set_differently_is_listed(pair: tuple[Path, Path], tmp_path: Path) -> None:
    plan = {**PLAN, "engine_version": "9", "points": [{**p, "text": "other()"} for p in PLAN["points"]]}
    other = save_run(tmp_path / "c", plan=plan, command=["specmeter", "profile", "--api-key", "sk-secretsecret"])
    found = {c.name: (c.a, c.b) for c in changes(specmeter.load(pair[0]), specmeter.load(other))}
    assert found["command"] == ("specmeter profile --steps 2", "specmeter profile --api-key ***")
    assert found["plan.engine_version"] == ("0", "9") and found["analysis.engine.version"] == ("0", "9")
    assert any(name.startswith("plan.point verify.forward") for name in found)


def test_the_load_has_the_names_of_its_options(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = save_run(tmp_path / "c")
    for path, tokens in ((pair[0], 64), (other, 128)):
        document = json.loads((path / "analysis.json").read_text())
        write_json(
            path / "analysis.json", {**document, "prompts": {"set": "built-in", "count": 2, "max_tokens": tokens}}
        )
    found = {c.name: (c.a, c.b) for c in changes(specmeter.load(pair[0]), specmeter.load(other))}
    assert found["answer length (--max-tokens)"] == ("64", "128")
    assert not any(name.startswith(("analysis.prompts", "analysis.setting")) for name in found)


def with_starts(run: Path, starts: list[int]) -> Path:
    table = read_table(run, "requests")
    table["start"] = np.array([starts[int(p[1:])] for p in table["prompt_id"]])
    write_table(run, "requests", table)
    return run


def test_three_starts_a_side_make_the_start_the_unit(tmp_path: Path) -> None:
    a = with_starts(save_run(tmp_path / "a", prompts=6), [0, 0, 1, 1, 2, 2])
    b = with_starts(save_run(tmp_path / "b", prompts=6, stretch=1.2), [0, 0, 1, 1, 2, 2])
    found = compare(a, b)
    assert found["unit"] == "server start" and found["cycle"]["ratio"]["n"] == 3
    assert "inconclusive" not in found["sentence"] and "longer" in found["sentence"]
    assert side(specmeter.load(a)).starts.tolist() == [0, 0, 1, 1, 2, 2]


def test_counts_that_are_not_known_are_no_tokens(tmp_path: Path) -> None:
    a, b = save_run(tmp_path / "a"), save_run(tmp_path / "b")
    table = read_table(b, "cycles")
    table["sampled"] = np.where(table["cycle"] % 3 == 0, -1, np.where(table["sampled"] >= 0, 2, table["sampled"]))
    write_table(b, "cycles", table)
    assert compare(a, b)["accept_length"]["b_tokens"] == 2
    table["sampled"] = np.where(table["prompt_id"] == "p1", -1, table["sampled"])
    write_table(b, "cycles", table)
    assert compare(a, b)["accept_length"] is None


def test_with_sampling_the_counts_of_clean_cycles_count_as_in_the_report(tmp_path: Path) -> None:
    a = save_run(tmp_path / "a")
    table = read_table(a, "cycles")
    clean = (table["cycle"] % 2 == 0) & (table["sampled"] >= 0)
    table["probed"], table["sampled"] = np.where(clean, 0, table["probed"]), np.where(clean, 3, 1)
    write_table(a, "cycles", table)
    assert compare(a, a)["accept_length"]["a_tokens"] == 1
    document = json.loads((a / "analysis.json").read_text())
    write_json(a / "analysis.json", {**document, "sampling": {"permille": 500}})
    assert compare(a, a)["accept_length"]["a_tokens"] == pytest.approx(2, abs=0.1)


def test_a_run_of_an_earlier_version_with_two_processes_in_one_rank_is_loaded_but_not_added_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = save_run(tmp_path / "a", ranks=(0, 1))
    for name in ("cycles", "spans"):
        table = read_table(a, name)
        write_table(a, name, {**table, "rank": np.zeros_like(table["rank"])})
    assert len(specmeter.load(a).cycles["rank"])
    assert main(["diff", str(a), str(a)]) == 2
    assert "recorded as one rank" in capsys.readouterr().err
    warnings = build_timeline(specmeter.load(a)).warnings
    assert len(warnings) == 1 and "several processes on host are recorded as rank 0" in warnings[0]


def test_one_prompt_gives_no_interval(tmp_path: Path) -> None:
    a, b = save_run(tmp_path / "a", prompts=1), save_run(tmp_path / "b", prompts=1, stretch=2)
    found = compare(a, b)
    assert found["cycle"]["ratio"]["high"] is None and {row["word"] for row in found["phases"]} == {"unclear"}
    assert "too few units" in found["sentence"] and "no interval" in render_diff(found)


def test_command_prints_text_and_json(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", *map(str, pair)]) == 0
    text = capsys.readouterr().out
    assert "verify" in text and "Set differently" in text and "\x1b" not in text
    assert main(["diff", *map(str, pair), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "specmeter/diff-result/1" and document["result"]["schema"] == "specmeter/diff/1"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_verdict_comes_first_and_everything_fits(pair: tuple[Path, Path], width: int) -> None:
    document = compare(*pair)
    lines = render_diff(document, width).splitlines()
    assert document["sentence"].startswith(lines[0].strip()) and max(map(len, lines)) <= width
    assert any(re.search(r"^verify +9\.6\d+ +11\.\d+ +\+1\.9", line) for line in lines)


def test_what_cannot_be_compared_is_said(pair: tuple[Path, Path], tmp_path: Path) -> None:
    assert main(["diff", str(pair[0]), str(tmp_path)]) == 2
    sweep = save_run(tmp_path / "sweep")
    write_json(sweep / "analysis.json", {"schema": "specmeter/analysis/1", "kind": "sweep"})
    assert main(["diff", str(pair[0]), str(sweep)]) == 2
    (sweep / "analysis.json").unlink()
    assert main(["diff", str(sweep), str(pair[0])]) == 2


def test_hostile_text_in_a_run_is_inert(pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = save_run(tmp_path / "x", command=["[red]\x1b[31m\u202e<b>"])
    text = render_diff(compare(pair[0], other))
    assert "\x1b" not in text and "\u202e" not in text and "[red]?[31m?<b>" in text
