"""A trial's limits on real processes: a server that never gets healthy, the budget's end, what is nobody's fault."""

from __future__ import annotations

import math
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from specmeter.bench.progress import Progress
from specmeter.bench.prompts import load_prompts
from specmeter.bench.schedule import Sending
from specmeter.bench.session import Probing
from specmeter.engines import ServerSpec, Setting, engine_named
from specmeter.engines.guardian import descendants
from specmeter.errors import Exit, SpecmeterError
from specmeter.trace.rundir import RunWriter
from specmeter.tune import trial
from specmeter.tune.limits import BudgetSpent, Limit
from specmeter.tune.space import AS_GIVEN, Candidate
from specmeter.tune.trial import LiveRunner, Observation, refuse_taken_port

# A server that starts, says so, and never opens its port.
SILENT = (sys.executable, "-c", "import time; print('loading'); time.sleep(600)")
HOSTILE = str(Path(__file__).parents[2] / "support" / "hostile_server.py")
PLAIN = Candidate(Setting.of(0))


def _runner(folder: Path, command: tuple[str, ...], limit_s: float, left_s: float = math.inf) -> LiveRunner:
    writer = RunWriter.create(folder / "run", ["test"])
    prompts, how = load_prompts(None).prompts[:1], Probing(probes=False)
    spec = ServerSpec("sglang", command)
    return LiveRunner(spec, prompts, Sending(8), how, writer, Progress(), limit_s, left_s=left_s)


def _run(runner: LiveRunner, candidate: Candidate = PLAIN) -> list[Observation]:
    return runner.run([candidate], 1, 0, 3, lambda logs: set())


def test_the_limit_covers_a_server_that_never_gets_healthy(tmp_path: Path) -> None:
    before, began = set(descendants(os.getpid())), time.monotonic()
    (found,) = _run(_runner(tmp_path, SILENT, limit_s=1.0))
    # SGLang's own limit for a start is 900 s.
    assert found.cause == "it hung: not done after 1 s" and time.monotonic() - began < 60
    assert found.mean is None and not set(descendants(os.getpid())) - before


def test_the_budgets_end_is_no_hang(tmp_path: Path) -> None:
    with pytest.raises(BudgetSpent):
        _run(_runner(tmp_path, SILENT, limit_s=1800.0, left_s=1.0))


def test_a_server_that_dies_early_keeps_its_own_cause_whatever_the_limit(tmp_path: Path) -> None:
    dies = (sys.executable, "-c", "raise SystemExit('out of something')")
    (found,) = _run(_runner(tmp_path, dies, limit_s=1800.0, left_s=900.0))
    assert "ended before it was ready" in found.cause


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("die", "out of GPU memory"),
        ("error", "no such adapter"),
        ("garbage", "The warm-up failed."),
        ("silent", "it hung: not done after 4 s"),
    ],
)
def test_a_server_that_fails_in_its_bench_is_infeasible_and_gone(tmp_path: Path, mode: str, said: str) -> None:
    before = set(descendants(os.getpid()))
    limit_s = 4.0 if mode == "silent" else 1800.0
    (found,) = _run(_runner(tmp_path, (sys.executable, HOSTILE, mode), limit_s))
    assert said in found.cause and found.mean is None and not set(descendants(os.getpid())) - before


def test_the_command_as_it_stands_runs_unchanged_and_tells_its_setting(tmp_path: Path) -> None:
    own = Candidate(AS_GIVEN, own=True)
    command = (sys.executable, HOSTILE, "good", "--speculative-algorithm", "EAGLE3")
    (found,) = _run(_runner(tmp_path, command, 1800.0), own)
    assert not found.cause and len(found.logs) == 2 and found.told == "k=5 top-k=4 tokens=8"


def test_whole_blocks_of_a_trial_that_the_budget_ended_are_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[Limit] = []
    monkeypatch.setattr(trial, "Limit", lambda *words: limits.append(Limit(*words)) or limits[-1])
    runner = _runner(tmp_path, (sys.executable, HOSTILE, "good"), 1800.0, left_s=900.0)

    def stop(logs: Mapping[str, Sequence[float]]) -> set[str]:
        limits[-1].struck = True  # as if the time were up now, and the server killed
        raise SpecmeterError("The server ended while it was in use.", exit=Exit.SERVER_FAILED)

    with pytest.raises(BudgetSpent) as caught:
        runner.run([PLAIN], 1, 0, 3, stop)
    (partial,) = caught.value.partial
    assert len(partial.logs) == 1 and not partial.cause and partial.mean is not None


def test_a_setting_that_the_engine_does_not_take_is_infeasible_without_a_start(tmp_path: Path) -> None:
    runner = _runner(tmp_path, SILENT, limit_s=60.0)
    (found,) = _run(runner, Candidate(Setting.of(2)))
    assert "no --speculative-algorithm" in found.cause and not list(runner.writer.logs.iterdir())


def test_a_program_that_is_not_there_is_no_candidates_fault(tmp_path: Path) -> None:
    with pytest.raises(SpecmeterError, match="not found") as caught:
        _run(_runner(tmp_path, ("no-such-program", "serve"), limit_s=60.0))
    assert caught.value.exit == Exit.USAGE


def test_a_port_that_is_taken_is_no_candidates_fault() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = ("specmeter", "serve", "--port", str(port))
        with pytest.raises(SpecmeterError, match=f"Port {port} is taken") as caught:
            refuse_taken_port(engine_named("embedded"), command, wait_s=0.2)
        assert caught.value.exit == Exit.ENVIRONMENT
    refuse_taken_port(engine_named("embedded"), command, wait_s=0.2)
    refuse_taken_port(engine_named("embedded"), ("specmeter", "serve"), wait_s=0.2)


def test_the_shorter_of_the_two_limits_ends_a_trial() -> None:
    own, budgets = Limit(10.0, 100.0), Limit(100.0, 10.0)
    assert not own.is_budgets and budgets.is_budgets
    for limit in (own, budgets):
        assert limit.allowed_s == 10 and 9 < limit.left_s <= 10 and not limit.over
        assert limit.wait_s(None, 900.0) <= 10 and limit.wait_s(0.5, 900.0) == 0.5
    assert Limit(0.0).over and Limit(0.0).left_s > 0
