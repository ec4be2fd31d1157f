"""What a tune ends with: the proof's word over the search's, and which journal goes on with which work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specmeter.analysis.compare import ACROSS
from specmeter.bench.prompts import load_prompts
from specmeter.bench.schedule import Sending
from specmeter.engines import ServerSpec, Setting
from specmeter.errors import SpecmeterError
from specmeter.tune.budget import Budget
from specmeter.tune.facts import carried
from specmeter.tune.flags import EngineFlags
from specmeter.tune.proof import BASELINE, START, TUNED, proven, verdict
from specmeter.tune.space import Candidate, Space, settings_of
from specmeter.tune.tuning import TunePlan, _candidate_json, candidates_by_level, warnings_of_tune

OFF, BEST, OWN = (Candidate(Setting.of(k)) for k in (0, 2, 4))
ARMS = {BASELINE: OFF, TUNED: BEST, START: OWN}


def _found(tuned: tuple[str, float], own: tuple[str, float] = ("faster", 1.2), against: str = "faster") -> Any:
    pairs = [
        {"arm": arm, "verdict": word, "ratio": {"point": at}} for arm, (word, at) in ((TUNED, tuned), (START, own))
    ]
    return {"proof": {"pairs": pairs}, "against_start": {"verdict": against}}


@pytest.mark.parametrize(
    ("winner", "found", "runs", "said"),
    [
        (BEST, _found(("faster", 1.3)), BEST, "k=2 is best: +30.0 %"),
        (OFF, _found(("faster", 1.3)), BEST, "k=2 is best"),
        (BEST, _found(("slower", 0.9)), OFF, "should be off"),
        (BEST, _found(("inconclusive", 1.02)), BEST, "but inconclusive"),
        (BEST, _found(("inconclusive", 0.99)), OFF, "should be off"),
        (OFF, _found(("inconclusive", 1.02)), OFF, "should be off"),
        (BEST, _found(("faster", 1.1), ("faster", 1.3), "slower"), OWN, "Keep k=4"),
        (BEST, _found(("slower", 0.8), ("slower", 0.9), "slower"), OFF, "should be off"),
    ],
)
def test_what_is_written_is_what_the_proof_says(winner: Candidate, found: Any, runs: Candidate, said: str) -> None:
    chosen = proven(winner, ARMS, found)
    assert chosen == runs
    assert said in verdict(winner, BEST, found["proof"], OWN if chosen == OWN else None)["sentence"]


@pytest.mark.parametrize("winner", [BEST, OFF])
def test_too_few_starts_prove_nothing_and_leave_the_search_its_choice(winner: Candidate) -> None:
    found = _found((ACROSS, 0.934))
    found["proof"]["pairs"][0]["reason"] = "1 of at least 3 starts a side"
    assert proven(winner, ARMS, found) == winner
    sentence = verdict(winner, BEST, found["proof"])["sentence"]
    assert sentence.startswith("Not proven (1 of 3 starts): ") and "should be off" not in sentence
    assert "-6.6 %" in sentence


def test_a_proof_without_a_ratio_gives_no_number() -> None:
    found = _found(("inconclusive", 1.0))
    found["proof"]["pairs"][0].update(ratio=None, reason="every start failed")
    assert proven(BEST, ARMS, found) == OFF
    sentence = verdict(BEST, BEST, found["proof"])["sentence"]
    assert sentence == (
        "Speculation should be off until it is shown to gain: k=2 has no ratio in the proof (every start failed)."
    )


def test_a_proof_that_a_failed_start_ended_overrules_nothing() -> None:
    missing = "the proof ended at start 2 of 6 (tuned): The server ended before it was ready."
    nothing = {"proof": None, "against_start": None, "missing": missing}
    found = _found(("inconclusive", 1.0))
    found["proof"]["pairs"][0].update(ratio=None, reason="a side has no whole block")
    for one in (nothing, {**found, "against_start": None, "missing": missing}):
        assert proven(BEST, ARMS, one) == BEST and proven(OFF, ARMS, one) == OFF
        sentence = verdict(BEST, BEST, one["proof"], None, missing)["sentence"]
        assert sentence == f"k=2: fastest in the search, not proven: {missing}."


def test_a_winner_comes_back_from_the_document() -> None:
    plan = _plan(ServerSpec("sglang", tuple(f"{SGLANG} --speculative-adaptive".split())))
    own = plan.starting_point()
    for candidate in (own, Candidate(Setting.of(4, 4, 12), (("--a", "on"),), (("B", "2"),))):
        winner = _candidate_json(candidate, plan.spec)
        assert candidates_by_level([{"concurrency": 8, "winner": winner}]) == {8: candidate}
    assert own.own and own.arm(plan.spec).spec == plan.spec


def test_a_command_without_speculation_is_refused_unless_none_is_asked_for() -> None:
    for engine, line in (("vllm", "vllm serve M"), ("sglang", "python -m sglang.launch_server --model-path M")):
        plan = _plan(ServerSpec(engine, tuple(line.split())))
        assert plan.starting_point() == Candidate(Setting.of(0)) and plan.facts()["model"] == "M"
        with pytest.raises(SpecmeterError, match="step count cannot be changed"):
            plan.check()
        replace(plan, space=Space(settings_of([0], [1], []))).check()
    with pytest.raises(SpecmeterError, match="no draft head"):
        _plan(ServerSpec("embedded", ("specmeter", "serve", "--draft", "none"))).check()


def test_what_a_proof_warns_of_is_a_warning_of_the_tune() -> None:
    proofs: list[Any] = [None, {"models": {"baseline": "A", "tuned": "B"}, "knobs": []}]
    levels = [{"concurrency": at, "proof": proof} for at, proof in zip((1, 8), proofs, strict=True)]
    first, second = warnings_of_tune({"levels": levels, "missing": ["1 requests at once: why"]})
    assert first == "1 requests at once: why" and second.startswith("the proof at 8: the arms serve models")


def test_what_the_server_inherits_stands_in_the_files_unless_it_is_a_secret() -> None:
    exported = {"NCCL_ALGO": "Ring", "VLLM_API_KEY": "hunter2", "CUDA_HOME": "/usr", "SGLANG_X": "1"}
    assert carried(exported) == {"NCCL_ALGO": "Ring", "SGLANG_X": "1"}


def test_trials_of_another_environment_or_other_answers_are_other_work() -> None:
    spec = ServerSpec("embedded", ("specmeter", "serve"), {"A": "1"})
    space, prompts = Space(settings_of([0, 1], [1], [])), load_prompts(None).prompts[:2]
    plan = TunePlan(spec, space, EngineFlags({}, "t"), prompts, Sending(8), Budget())
    others = [
        replace(plan, spec=replace(spec, env={"A": "2"})),
        replace(plan, sending=replace(plan.sending, ignore_eos=False)),
        replace(plan, exported={"NCCL_ALGO": "Ring"}),
        replace(plan, where="gpu7"),
        replace(plan, separate=True),
        replace(plan, served_model="M-lora"),
    ]
    assert all(other.facts() != plan.facts() for other in others)


def _plan(spec: ServerSpec) -> TunePlan:
    space, prompts = Space(settings_of([0, 1], [1], [])), load_prompts(None).prompts[:2]
    return TunePlan(spec, space, EngineFlags({}, "t"), prompts, Sending(8), Budget())


VLLM = """vllm serve M --speculative-config {"method":"eagle3","model":"HEAD","num_speculative_tokens":3}"""
SGLANG = (
    "python -m sglang.launch_server --model-path M --speculative-algorithm EAGLE3 --speculative-draft-model-path HEAD"
)


@pytest.mark.parametrize(("engine", "line"), [("vllm", VLLM), ("sglang", SGLANG)])
def test_trials_with_another_draft_head_are_other_work(engine: str, line: str) -> None:
    words = line.split()
    plan = _plan(ServerSpec(engine, tuple(words)))
    other = replace(plan, spec=replace(plan.spec, command=tuple(w.replace("HEAD", "OTHER") for w in words)))
    again = replace(plan, spec=replace(plan.spec, command=tuple(w.replace(":3}", ":5}") for w in words)))
    assert other.facts() != plan.facts() and again.facts() == plan.facts()
