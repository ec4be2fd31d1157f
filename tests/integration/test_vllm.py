"""A real vLLM on CPU with EAGLE-3 under the full recipe: hits, coverage, acceptance, tokens, disarming.

Two starts of the server: one under a link for everything, one without specmeter for its tokens.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from specmeter.analysis.profile import analyse
from specmeter.trace import Trace, load_link
from specmeter.trace.cycles import AFTER_PREFILL, DECODE, KEPT, MIXED, PREFILL
from tests.support import real_vllm
from tests.support.real_vllm import STEPS, TOKENS, Session

VLLM = os.environ.get("SPECMETER_VLLM_PYTHON")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not VLLM, reason="SPECMETER_VLLM_PYTHON names no environment with vLLM"),
]

# Sites of branches that synchronous scheduling, one pipeline rank and more than one draft step do not take.
NOT_TAKEN = [
    ("extend.head", "SpecDecodeBaseProposer.propose"),
    ("schedule.output", "EngineCore.step_with_batch_queue"),
    ("schedule.step", "EngineCore.step_with_batch_queue"),
    ("verify.logits", "GPUModelRunner.execute_model"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def ran(folder: Path) -> Session:
    assert VLLM is not None
    return real_vllm.session(VLLM, folder)


@pytest.fixture(scope="module")
def trace(ran: Session) -> Trace:
    return load_link(ran.link.path, [*ran.alone, *ran.together])


def test_every_required_point_of_the_runner_was_hit(ran: Session) -> None:
    points = [p for p in ran.link.plan()["points"] if p["required"] and p["runner"] in (None, "mrv1")]
    never = sorted((p["name"], p["qualname"]) for p in points if not ran.hits.get(p["id"]))
    assert never == NOT_TAKEN
    assert {p["name"] for p in points} == {p["name"] for p in points if ran.hits.get(p["id"])}
    assert ran.link.plan()["refused"] == []


def test_named_leaf_points_cover_the_decode_cycle(ran: Session, trace: Trace) -> None:
    coverage = analyse(trace, ran.alone)["coverage"]
    assert coverage["leaf_percent"] >= 97.0
    assert coverage["glue_percent"] < 3.0
    assert coverage["unattributed_percent"] < 1.0


def test_draft_steps_are_those_of_the_setting(ran: Session, trace: Trace) -> None:
    steps = analyse(trace, ran.alone)["draft_steps"]
    assert [step["step"] for step in steps] == list(range(2, STEPS + 1))  # the first is the extend phase


def test_accepted_tokens_by_position_are_the_engines_own(ran: Session, trace: Trace) -> None:
    assert ran.before is not None and ran.after is not None
    accept = trace.main.cycles.accept
    theirs = np.subtract(ran.after.per_position, ran.before.per_position).tolist()
    assert [int((accept[:, 1] > place).sum()) for place in range(STEPS)] == theirs
    assert len(accept) == (ran.after.cycles or 0) - (ran.before.cycles or 0)
    assert int(accept[:, 2].sum()) == (ran.after.drafted or 0) - (ran.before.drafted or 0)
    assert theirs[0] > 0


def test_tokens_are_the_same_with_probes_and_without(ran: Session, folder: Path) -> None:
    assert VLLM is not None
    plain = real_vllm.never_loaded(VLLM, folder)
    assert [len(tokens) for tokens in plain] == [TOKENS] * len(plain)
    for stage in ("dormant", "armed", "disarmed"):
        assert ran.tokens[stage] == plain, stage


def test_cycles_with_prefill_and_after_it_are_told_apart(ran: Session, trace: Trace) -> None:
    table = trace.main.cycles
    # Each armed request has one prompt chunk; only the second of a pair may meet a request that decodes.
    chunks = int((table.kind == PREFILL).sum()) + int((table.kind == MIXED).sum())
    assert chunks == len(ran.alone) + len(ran.together)
    holds = np.flatnonzero(np.isin(table.kind, (PREFILL, MIXED)))
    assert (table.kind[holds + 1] == AFTER_PREFILL).all()


def test_cycles_of_two_requests_are_mixed_and_then_of_two(ran: Session, trace: Trace) -> None:
    table = trace.main.cycles
    if not real_vllm.met(ran.together):
        pytest.skip(real_vllm.apart(ran))
    late = ran.together[1]
    mixed = int(np.flatnonzero(table.kind == MIXED)[-1])
    assert late.send_ns < table.t0_ns[mixed] + table.dur_ns[mixed]
    assert table.t0_ns[mixed] < late.first_ns
    assert (table.batch[(table.kind == DECODE) & (table.batch > 1)] == 2).any()


def test_core_and_worker_are_one_timeline(trace: Trace) -> None:
    assert len(trace.ranks) == 1
    rank = trace.main
    kept = (rank.cycles.drop == KEPT) & (rank.cycles.kind == DECODE)
    assert kept.sum() > 30
    for name in ("schedule.step", "verify.forward", "accept.sample", "extend.forward"):
        assert (rank.calls[kept, trace.index.names.index(name)] == 1).all(), name
    assert len({spans.pid for spans in rank.spans}) == 2


def test_disarming_leaves_nothing_armed(ran: Session) -> None:
    assert len(ran.armed) >= 3
    assert any(process.report["armed_points"] for process in ran.armed)
    for process in ran.armed:
        assert process.report["faults"] == [] and process.report["disarmed"] == []
    for process in [*ran.dormant, *ran.disarmed]:
        assert not process.report["armed"]
        assert process.report["armed_points"] == []
