"""Switched starts: why there is none, the order of the turns, what the engine counts, and what the report says."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from specmeter.analysis.sweep import Arm, analyse_sweep
from specmeter.bench import switched_sweep
from specmeter.bench.prompts import load_prompts
from specmeter.bench.schedule import Sending
from specmeter.bench.session import Probing
from specmeter.bench.sweeping import Gathered, SweepPlan
from specmeter.bench.switching import NEAR_BASELINE, CannotSwitch, Counted, label_of, prepare
from specmeter.engines import Counters, ServerSpec, Setting
from specmeter.reporters.terminal import render_analysis
from specmeter.trace import Request

SETTINGS = tuple(Setting.of(steps) for steps in (0, 1, 3))
CONFIG = json.dumps({"method": "eagle3", "model": "H", "num_speculative_tokens": 3})
VLLM = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", "M", "--speculative-config", CONFIG)
PROMPTS = load_prompts(None, []).sample(3, 1)
PLAN = SweepPlan(SETTINGS, PROMPTS, 2, Sending(16, seed=5))


@pytest.mark.parametrize(
    ("spec", "settings", "why"),
    [
        (ServerSpec("vllm", url="http://127.0.0.1:9"), SETTINGS, "a running server was given"),
        (ServerSpec("sglang", ("python", "-m", "sglang.launch_server")), SETTINGS, "no --speculative-algorithm"),
        (ServerSpec("embedded", ("specmeter", "serve")), SETTINGS, "with each request"),
        (ServerSpec("vllm", VLLM), [Setting.of(2, 4, 9)], "chains only"),
        (ServerSpec("vllm", VLLM), SETTINGS[:1], "no step count to switch to"),
        (ServerSpec("vllm", (VLLM[0], "-I", *VLLM[1:])), SETTINGS, "isolated mode"),
        (ServerSpec("vllm", VLLM[:-2]), SETTINGS, "no --speculative-config"),
    ],
)
def test_why_a_server_is_not_switched(spec: ServerSpec, settings: list[Setting], why: str) -> None:
    with pytest.raises(CannotSwitch, match=why):
        prepare(spec, Probing(), settings, whole=True)


def test_an_interpreter_without_the_engine_is_not_switched_and_leaves_no_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(CannotSwitch, match="vllm"):
        prepare(ServerSpec("vllm", VLLM), Probing(), SETTINGS, whole=False)
    assert list(tmp_path.glob("specmeter/*")) == []


def test_every_block_and_prompt_runs_each_step_count_once_in_an_order_of_the_seed() -> None:
    groups = switched_sweep._groups(PLAN)
    assert groups == switched_sweep._groups(PLAN)
    calls = [(setting, call) for setting, (call,) in groups]
    assert all(call.setting == label_of(setting) and call.seed == 5 for setting, call in calls)
    seen = {(call.block, call.prompt.prompt_id, setting.steps) for setting, call in calls}
    assert len(seen) == len(calls) == 2 * 3 * 3
    assert len({call.request_id for _, call in calls}) == len(calls)
    orders = {tuple(s.steps for s, _ in calls[at : at + 3]) for at in range(0, len(calls), 3)}
    assert len(orders) > 1, "another order for each pair of block and prompt"


def test_the_engines_own_count_of_drafts_agrees_or_does_not() -> None:
    counted = Counted(3)
    counted.add(Counters(cycles=10, drafted=30))
    counted.add(Counters(cycles=2, drafted=6))
    assert counted.as_json("k=3") == {
        "setting": "k=3", "steps": 3, "turns": 2, "cycles": 12, "drafted_tokens": 36, "agrees": True,
    }  # fmt: skip
    counted.add(Counters(cycles=5, drafted=10))
    assert counted.as_json("k=3")["agrees"] is False
    silent = Counted(1)
    silent.add(Counters())
    assert silent.as_json("k=1")["agrees"] is None
    off = Counted(0)
    off.add(Counters(cycles=0, drafted=0))
    assert off.as_json(NEAR_BASELINE)["agrees"] is True


def requests(setting: str, rate: float, start: int = 0) -> list[Request]:
    """Six requests of 101 tokens at about ``rate`` tokens a second."""
    found = []
    for number in range(6):
        end = int(1e9 + 100 / (rate * (1 + 0.002 * number)) * 1e9)
        found.append(
            Request(
                f"{setting}{start}{number}", f"p{number % 3}", setting, number // 3, 0, 10**9, end, 9, 101, start=start
            )
        )
    return found  # fmt: skip


def confirmed() -> dict[str, Any]:
    """The document of a sweep: k=3 20 % above k=0 in one start, 10 % above plain decoding in three starts a side."""
    arms = [
        Arm(name, {"steps": k}, requests(name, rate))
        for name, k, rate in (("k=0", 0, 50), ("k=1", 1, 55), ("k=3", 3, 60))
    ]
    own = Gathered([], [])
    for start in range(3):
        own.requests += requests("baseline", 54 + 0.1 * start, 2 * start)
        own.requests += requests("k=3", 1.1 * (54 + 0.1 * start), 2 * start + 1)
    document = analyse_sweep(arms, 0.01, NEAR_BASELINE)
    document["one_start"] = {"knob": "draft_steps", "reference": NEAR_BASELINE, "verified": []}
    gathered = Gathered([r for arm in arms for r in arm.requests], [])
    return document | switched_sweep._confirmed(document, arms, gathered, own, Setting.of(3), PLAN)


def test_the_verdict_is_that_of_the_starts_of_their_own() -> None:
    document = confirmed()
    rows = {row["setting"]: row for row in document["arms"]}
    assert rows["k=3"]["ratio"]["point"] == pytest.approx(1.2) and rows["k=0"]["verdict"] == "reference"
    assert document["confirmation"]["arms"][1]["ratio"]["point"] == pytest.approx(1.1, rel=1e-3)
    assert document["verdict"]["sentence"] == "k=3 is best: 10 % faster than the baseline."
    near = document["near_baseline"]
    assert near["point"] == pytest.approx(1.1 / 1.2, rel=1e-3)
    assert near["low"] <= near["point"] <= near["high"] and near["level"] == 0.9
    text = render_analysis(document, 110)
    assert "x k=0" in text and "not plain decoding" in text and "In starts of their own, 3 a side" in text
    # The session's drift (0.1 a start) is taken out: 0.916, where means of starts would have 0.917.
    assert "k=0 runs at 0.916 x plain decoding" in text.replace("\n", " ")


def test_without_starts_of_their_own_there_is_no_verdict() -> None:
    document = confirmed()
    arms = [Arm("k=3", {"steps": 3}, requests("k=3", 60))]
    alone = switched_sweep._confirmed(document, arms, Gathered([], []), Gathered([], []), Setting.of(3), PLAN)
    assert alone["confirmation"] is None and alone["verdict"]["word"] == "inconclusive"
    assert "no starts of its own" in alone["verdict"]["sentence"]
