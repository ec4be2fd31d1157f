"""The tuned setting's script without a server: starts side by side, the proof's ratios, robust pairs, tables."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_fa3
import gpu_paired as paired
import gpu_tuning as tuning
import sglang_device_gpu as device
import sglang_dummy_gpu as dummy
import sglang_tune_gpu as tune
from gpu_client import Answer
from gpu_fleet import Place
from gpu_models import SHAPES
from gpu_steps import write
from gpu_tune_text import table

from specmeter.trace import Request


def test_the_robust_interval_covers_and_one_disturbed_pair_moves_it_little() -> None:
    rng, inside, experiments = np.random.default_rng(1), 0, 400
    for _ in range(experiments):
        found = paired.centre((0.01 + 0.03 * rng.standard_normal(40)).tolist())
        inside += found["low"] <= math.exp(0.01) <= found["high"]  # type: ignore[operator]
    assert 0.92 < inside / experiments < 0.98
    logs = (0.002 * rng.standard_normal(40)).tolist()
    calm, disturbed = paired.centre(logs), paired.centre([*logs[1:], 0.3])
    assert abs(disturbed["point"] - calm["point"]) < 0.001  # type: ignore[operator]
    assert paired.centre([0.01] * 5)["low"] is None, "five pairs leave no order statistic"


def _answer(cycle_ms: float, cycles: int | None, tokens: int = 101) -> Answer:
    end = int(1e6 * cycle_ms * (cycles or tokens - 1)) + 1
    at = tuple(int(1e6 * cycle_ms * n) for n in range((cycles or tokens - 1) + 1))
    return Answer(Request("r", "p", "spec", 0, 0, 1, end, 4, tokens), tuple(range(tokens)), cycles, at)


def test_a_block_is_compared_by_its_cycles_not_by_its_tokens() -> None:
    """Equal cycles, other acceptance: no difference; a plain server counts tokens."""
    pairs = [
        {"armed": paired.cycle_of(_answer(3.0, 40)), "original": paired.cycle_of(_answer(3.0, 60))} for _ in range(8)
    ]
    found = paired.compared(pairs, "armed", "original")
    assert found["cycle"]["point"] == pytest.approx(1) and found["gap"]["point"] == pytest.approx(1)
    assert paired.cycle_of(_answer(1.5, None))["ms"] == pytest.approx(1.5)
    failed = Answer(Request("r", "p", "spec", 0, 0, 0, 0, 4, 0, "ReadTimeout: "), (), None)
    with pytest.raises(RuntimeError, match="ReadTimeout"):
        paired.cycle_of(failed)


def test_always_on_is_measured_before_a_profiler_was_on_the_server() -> None:
    names = [step.name for step in device.steps()]
    assert names.index("spec3.budget") < names.index("spec3.deep1")
    for step in device.steps():
        assert all(names.index(name) < names.index(step.name) for name in step.after)


@pytest.mark.parametrize("steps", [device.STEPS, tune.STEPS])
def test_a_switched_start_has_rows_of_logits_for_its_longest_chain(steps: tuple[int, ...], tmp_path: Path) -> None:
    """SGLang reserves rows by the start's own steps; a longer candidate ends in its assertion."""
    [command] = (
        [start.command for start in device.starts(tmp_path, tmp_path, tmp_path) if start.knobs]
        if steps is device.STEPS
        else [start.command for start in _tuning(tmp_path)._before() if start.knobs]
    )
    assert int(command[command.index("--speculative-num-steps") + 1]) == max(steps)


def _tuning(folder: Path, subject: tune.Subject | None = None) -> tune.Tuning:
    subject = subject or tune.dense8b(folder)
    return tune.Tuning(subject, Place(folder, None, subject.prompts), folder, folder, 1e12, False)


def test_every_side_has_three_starts_that_fit_and_none_knows_specmeter(tmp_path: Path) -> None:
    for subject in (tune.smollm2(tmp_path, tmp_path), tune.dense8b(tmp_path)):
        names = [name for rounds in subject.rounds for name in tuning.proving(rounds).roles]
        assert sorted(names) == sorted(f"{role}.{n}" for role in tuning.ROLES for n in (1, 2, 3))
        places = [place for rounds in subject.rounds for place in tuning.proving(rounds).places.values()]
        assert sorted(places) == list(range(9)), "starts that share a place would be taken as one"
        run = _tuning(tmp_path, subject)
        starts = [run._proof(name, name.partition(".")[0], 2) for name in names]
        assert not any(start.linked for start in starts)
        chains = {start.name: start.command.count("--speculative-num-steps") for start in starts}
        assert {name for name, count in chains.items() if not count} == {"baseline.1", "baseline.2", "baseline.3"}
        assert all(bool(start.env) == (subject.name == "8b" and chains[start.name] > 0) for start in starts)
    most = max(len(tuning.proving(rounds).roles) for rounds in tune.dense8b(tmp_path).rounds)
    assert most * 1.03 * SHAPES["8b"].gigabytes + most * 4.5 < dummy.CARD_GB - dummy.RESERVE_GB


def _proof(rates: dict[str, float]) -> list[Request]:
    rng, found = np.random.default_rng(3), []
    proving = tuning.proving((1, 2, 3))
    for name, role in proving.roles.items():
        start = rng.normal(0, 0.01)
        for block in range(5):
            answers = []
            for number in range(6):
                seconds = 100 / rates[role] * math.exp(start + rng.normal(0, 0.002))
                answers.append(Answer(Request("r", f"p{number}", "x", 0, 0, 1, int(seconds * 1e9), 4, 101), (), None))
            found += tuning.labelled(answers, role, proving.places[name], block)
    return found


def test_the_proof_has_its_ratios_over_starts_and_the_table_beside_what_was_foretold(tmp_path: Path) -> None:
    run = _tuning(tmp_path)
    requests = _proof({"baseline": 200, "default": 380, "tuned": 410})
    row = {"tok_s": 400.0, "block_logs": [6.0], "accept_length": 2.5, "raced_out": False, "cause": ""}
    write(tmp_path, "search", {"line": "tuned to k=2", "tuned": 2, "rows": {"2": row, "3": {**row, "tok_s": 370.0}}})
    told = {
        k: {"tokens_per_s": {"low": v - 9, "point": v, "high": v + 9}, "plain_tok_s": 210.0}
        for k, v in (("2", 402.0), ("3", 390.0))
    }
    write(tmp_path, "predicted", {"from_steps": 3, "best": 2, "pays": True, "rows": told})
    kept = {"requests": [asdict(request) for request in requests], "accept_length": {}, "ids": {}}
    write(tmp_path, "proof1.1", kept)
    run.conclude()
    results = json.loads((tmp_path / "results.json").read_text())
    welch = results["proof.1"]["welch"]
    assert set(welch) == {"default/baseline", "tuned/baseline", "tuned/default"}
    assert welch["tuned/default"]["low"] < 410 / 380 < welch["tuned/default"]["high"]
    assert welch["tuned/baseline"]["n"] == 3 and welch["tuned/baseline"]["unit"] == "server start"
    assert [pair["verdict"] for pair in results["proof.1"]["pairs"][:2]] == ["faster", "faster"]
    text = (tmp_path / "tune.txt").read_text()
    assert "foretold 1.031" in text and "+0.5 %" in text and "+5.4 %" in text, text
    assert table({**results, "predicted": None, "search": None}, tune.SIZES).count("tok/s, starts") == 3


def test_flashattention_is_left_out_where_the_bundle_lacks_it(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "sgl_kernel").mkdir(parents=True)
    assert gpu_fa3.left_out(site, tmp_path / "out", ("plain", "fa3")) == ("fa3",)
    assert "flash_ops" in json.loads((tmp_path / "out/fa3.left_out.json").read_text())["reason"]
    (site / "sgl_kernel" / "flash_ops.abi3.so").write_bytes(b"")
    assert gpu_fa3.left_out(site, tmp_path / "out", ("plain", "fa3")) == ()
    names = [one.start.name for one in dummy.Plan(SHAPES["8b"], 1, tmp_path).wanted()]
    assert names.index("fa3-plain") < names.index("fa3")
    with pytest.raises(SystemExit, match="spec9"):
        device.chosen(device.steps(), ["spec9"], [], ())
    assert {step.server for step in device.chosen(device.steps(), ["plain"], ["fa3.1"], ("fa3",))} == {"plain"}
