"""The search on known speeds: what it finds, in how many starts, with what budget, after an interruption."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specmeter.analysis.racing import contenders, losers, smoothed
from specmeter.engines import Setting
from specmeter.errors import Exit, SpecmeterError
from specmeter.tune.budget import Budget
from specmeter.tune.journal import Journal
from specmeter.tune.limits import BudgetSpent
from specmeter.tune.planner import LISTED, Planner
from specmeter.tune.search import Search
from specmeter.tune.space import AS_GIVEN, Candidate, Dimension, Space, settings_of
from specmeter.tune.trial import Observation, Stop
from tests.support.replayed_tune import KnownRunner

CURVE = {0: 50.0, 1: 58.0, 2: 63.0, 3: 61.0, 4: 55.0, 5: 49.0, 6: 44.0}
SPACE = Space(settings_of(range(7), [1], []))
START = Candidate(Setting.of(4))


def _speed(candidate: Candidate) -> float:
    knobs = dict((*candidate.flags, *candidate.env))
    return CURVE[candidate.setting.steps] * {"Tree": 1.15, "Ring": 0.9}.get(knobs.get("NCCL_ALGO", ""), 1.0)


def _search(
    tmp_path: Path,
    runner: KnownRunner,
    space: Space = SPACE,
    budget: Budget | None = None,
    predict: Callable[[Setting], float | None] | None = None,
    seed: int = 0,
) -> Search:
    journal = Journal(tmp_path / "j.sqlite", {"a": "b"})
    journal._db.execute("PRAGMA synchronous = OFF")  # the same journal without the disk's waits
    planner = Planner(space, START, predict, seed)
    search = Search(planner, runner, journal, budget or Budget(), 1, 6, lambda text: None)
    try:
        search.run(START)
    finally:
        journal.close()
    return search


class FallingBack(KnownRunner):
    """Finds out in its start number ``at`` that the settings cannot be switched."""

    at = 0

    def run(
        self, candidates: Sequence[Candidate], level: int, start: int, blocks: int, stop: Stop
    ) -> list[Observation]:
        if self.together and len(self.starts) == self.at:
            self.together = False
            return []
        return super().run(candidates, level, start, blocks, stop)


@pytest.mark.parametrize("at", [0, 1])
def test_settings_that_cannot_be_switched_after_all_get_starts_of_their_own(tmp_path: Path, at: int) -> None:
    runner = FallingBack(_speed, together=True)
    runner.at = at
    space = Space(SPACE.settings, (Dimension("NCCL_ALGO", (None, "Tree")),))
    search = _search(tmp_path, runner, space, Budget(trials=30))
    best = search.best()
    assert best is not None and _speed(best) >= 0.95 * 1.15 * max(CURVE.values())
    assert all(len(group) == 1 for group in runner.starts[at:]) and len(runner.starts) > 4


@pytest.mark.parametrize("seed", range(5))
def test_one_start_finds_the_best_of_a_curve(tmp_path: Path, seed: int) -> None:
    runner = KnownRunner(_speed, together=True, seed=seed, start_sd=0.05, block_sd=0.01)
    search = _search(tmp_path, runner)
    best = search.best()
    assert best is not None and CURVE[best.setting.steps] >= 0.98 * max(CURVE.values())
    assert len(runner.starts) == 1
    # The clear losers did not run to the end; the baseline did, so that every ratio has it.
    stopped = {o.candidate.setting.steps for o in search.observations if o.stopped}
    assert {5, 6} <= stopped and 0 not in stopped


@pytest.mark.parametrize("seed", range(5))
def test_starts_of_their_own_find_it_too(tmp_path: Path, seed: int) -> None:
    runner = KnownRunner(_speed, together=False, seed=seed, start_sd=0.02, block_sd=0.005)
    best = _search(tmp_path, runner).best()
    assert best is not None and CURVE[best.setting.steps] >= 0.96 * max(CURVE.values())
    assert len(runner.starts) > len(CURVE)  # those close to the best had more than one start
    assert runner.starts[0] == [START] and runner.starts[1][0].setting.steps == 0


def test_predictions_leave_the_hopeless_out(tmp_path: Path) -> None:
    runner = KnownRunner(_speed, together=False)
    search = _search(tmp_path, runner, predict=lambda s: CURVE[s.steps] if s.steps else None)
    run = {c[0].setting.steps for c in runner.starts}
    assert {5, 6} & run == set() and set(search.planner.skipped) == {"k=5", "k=6"}
    # After the starting point and the baseline comes the best prediction.
    assert runner.starts[2][0].setting.steps == 2


@pytest.mark.parametrize("together", [True, False])
def test_a_knob_that_matters_is_found(tmp_path: Path, together: bool) -> None:
    space = Space(SPACE.settings, (Dimension("NCCL_ALGO", (None, "Ring", "Tree")), Dimension("Q", (None, "1", "2"))))
    runner = KnownRunner(_speed, together, start_sd=0.005, block_sd=0.002)
    best = _search(tmp_path, runner, space, Budget(trials=30)).best()
    assert best is not None and dict(best.env).get("NCCL_ALGO") == "Tree" and best.setting.steps in (2, 3)


def test_the_baseline_meets_the_knobs_of_the_best_setting(tmp_path: Path) -> None:
    """With a start for each setting, a variable that helps both would else be credited to speculation."""
    space = Space(SPACE.settings, (Dimension("NCCL_ALGO", (None, "Ring", "Tree")),))
    runner = KnownRunner(_speed, False, start_sd=0.005, block_sd=0.002)
    search = _search(tmp_path, runner, space, Budget(trials=30))
    best, plain = search.best(True), search.best(False)
    assert best is not None and plain is not None and dict(best.env) == dict(plain.env) == {"NCCL_ALGO": "Tree"}


@pytest.mark.parametrize("trials", range(1, 16))
def test_a_start_is_kept_back_for_the_baseline_with_the_best_knobs(tmp_path: Path, trials: int) -> None:
    space = Space(SPACE.settings, (Dimension("NCCL_ALGO", (None, "Tree")), Dimension("Q", (None, "1", "2"))))
    search = _search(tmp_path, KnownRunner(_speed, False), space, Budget(trials=trials))
    best = search.best(True)
    assert best is not None and search.starts() <= trials
    known = {o.candidate.key for o in search.observations}
    assert best.plain.key in known or not (best.flags or best.env)


def test_minutes_keep_the_time_of_that_start_back_too() -> None:
    budget = Budget(minutes=10.0, confirm_starts=2)
    assert not budget.refusal(200.0, 5, 100.0, keep=0) and budget.refusal(301.0, 5, 100.0, keep=0)
    assert budget.refusal(250.0, 5, 100.0, keep=1) and not budget.refusal(200.0, 5, 100.0, keep=1)
    assert not budget.refusal(9999.0, 0, 0.0, keep=0)  # one start in any case


def test_a_rule_that_keeps_the_baseline_from_the_knobs_is_said(tmp_path: Path) -> None:
    space = Space(SPACE.settings, (Dimension("NCCL_ALGO", (None, "Tree")),), ({"steps": "0", "NCCL_ALGO": "Tree"},))
    search = _search(tmp_path, KnownRunner(_speed, False), space, Budget(trials=20))
    best = search.best(True)
    assert best is not None and best.env and "rule of `forbid`" in search.planner.skipped[best.plain.label]


def test_flags_of_speculation_are_none_of_the_baselines() -> None:
    knobs = (("--speculative-attention-mode", "decode"), ("--tp", "2"))
    assert Candidate(Setting.of(3), knobs, (("A", "1"),)).plain == Candidate(Setting.of(0), (knobs[1],), (("A", "1"),))


class CutShort(KnownRunner):
    """A runner whose start number ``at`` the budget ends half-way, after its ``whole`` blocks."""

    at = 0
    whole = 0

    def run(
        self, candidates: Sequence[Candidate], level: int, start: int, blocks: int, stop: Stop
    ) -> list[Observation]:
        if len(self.starts) == self.at:
            found = super().run(candidates, level, start, self.whole + 1, stop)
            raise BudgetSpent([o for o in found if o.logs])
        return super().run(candidates, level, start, blocks, stop)


def test_a_trial_that_the_budget_ends_is_no_infeasible_one_and_runs_the_next_time(tmp_path: Path) -> None:
    first = CutShort(_speed, together=False)
    first.at = 3
    search = _search(tmp_path, first, budget=Budget(minutes=60.0))
    (lost,) = first.starts[3]
    assert len(first.starts) == 4 and "half-way" in search.stopped_by and search.best() is not None
    assert lost.key not in {o.candidate.key for o in search.observations}
    second = KnownRunner(_speed, together=False)
    again = _search(tmp_path, second, budget=Budget(minutes=60.0))
    assert second.starts[0] == [lost] and not any(o.cause for o in again.observations)


def test_a_budget_that_ends_the_first_trial_is_no_fault_of_a_setting(tmp_path: Path) -> None:
    runner = CutShort(_speed, together=True)
    with pytest.raises(SpecmeterError, match="No trial was finished: the budget of 1 minutes") as caught:
        _search(tmp_path, runner, budget=Budget(minutes=1.0))
    assert "--minutes" in caught.value.next_step and len(runner.starts) == 1


def test_the_whole_blocks_of_a_trial_that_the_budget_ends_count_in_that_session(tmp_path: Path) -> None:
    runner = CutShort(_speed, together=True)
    runner.whole = 2
    search = _search(tmp_path, runner, budget=Budget(minutes=1.0))
    assert search.best() == Candidate(Setting.of(2)) and {len(o.logs) for o in search.observations} == {2}
    again = KnownRunner(_speed, together=True)
    assert len(_search(tmp_path, again, budget=Budget(minutes=2.0)).observations) == 7 and len(again.starts[0]) == 7


class Patient(KnownRunner):
    """A runner with a limit, against which k=2 hangs unless it is 100 s or more."""

    limit_s = 10.0

    def run(
        self, candidates: Sequence[Candidate], level: int, start: int, blocks: int, stop: Stop
    ) -> list[Observation]:
        found = super().run(candidates, level, start, blocks, stop)
        hangs = self.limit_s < 100 and any(c.setting.steps == 2 for c in candidates)
        return [replace(o, logs=(), cause="it hung", limit_s=self.limit_s) if hangs else o for o in found]


def test_what_hung_is_tried_again_with_a_longer_limit_alone(tmp_path: Path) -> None:
    search = _search(tmp_path, Patient(_speed, together=False))
    assert search.best() == Candidate(Setting.of(3))
    same, longer = Patient(_speed, together=False), Patient(_speed, together=False)
    longer.limit_s = 100.0
    _search(tmp_path, same)
    assert not any(c.setting.steps == 2 for group in same.starts for c in group)
    assert _search(tmp_path, longer).best() == Candidate(Setting.of(2))


def test_what_the_minutes_leave_is_told_to_the_runner(tmp_path: Path) -> None:
    runner = KnownRunner(_speed, together=True)
    _search(tmp_path, runner, budget=Budget(minutes=2.0))
    assert 115 < runner.left_s <= 120
    budget = Budget(minutes=10.0, confirm_starts=9)
    assert budget.trial_s(0.0, 0.0) == 600 and budget.trial_s(100.0, 10.0) == 410
    assert budget.trial_s(580.0, 30.0) == 20 and budget.trial_s(400.0, 30.0) == 60
    assert Budget(trials=3).trial_s(1e9, 1.0) == float("inf")


class Switched(KnownRunner):
    """As an engine whose draft steps are switched for all requests: chains only in one start."""

    per_request = False


@pytest.mark.parametrize(
    "start", [Candidate(Setting.of(5, 4, 8)), Candidate(AS_GIVEN, own=True)], ids=["a tree", "as given"]
)
def test_a_starting_point_that_cannot_be_switched_has_a_start_of_its_own(tmp_path: Path, start: Candidate) -> None:
    runner = Switched(lambda c: 60.0 if c == start else _speed(c), together=True, block_sd=0.001)
    with Journal(tmp_path / "j.sqlite", {"a": "b"}) as journal:
        search = Search(Planner(SPACE, start, None, 0), runner, journal, Budget(), 1, 6, lambda text: None)
        search.run(start)
        again = Switched(_speed, together=True)
        Search(Planner(SPACE, start, None, 0), again, journal, Budget(), 1, 6, lambda text: None).run(start)
    assert len(runner.starts[0]) == 7 and runner.starts[1] == [start] and runner.together
    assert search.best() == Candidate(Setting.of(2)) and not again.starts


def test_optuna_is_missed_before_the_first_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    Planner(SPACE, START, None, 0)
    many = Space(settings_of(range(1, LISTED + 2), [1], []))
    for space in (Space(SPACE.settings, (Dimension("Q", (None, "1")),)), many):
        with pytest.raises(SpecmeterError, match="needs Optuna") as caught:
            Planner(space, START, None, 0)
        assert caught.value.exit == Exit.ENVIRONMENT


def test_a_space_of_many_settings_is_searched_by_what_was_measured(tmp_path: Path) -> None:
    """Beyond those listed Optuna suggests, and it has to hear of the starts for that."""
    sizes = list(range(8, 8 + 40))
    space = Space(settings_of([0, 5], [4], sizes))
    runner = KnownRunner(lambda c: 50.0 + c.setting.draft_tokens, together=False)
    search = _search(tmp_path, runner, space, Budget(trials=30))
    told = search.planner._opened().trials
    assert len(told) >= len(search.observations) - 2 and any(trial.value is not None for trial in told)


def test_infeasible_points_are_kept_with_their_cause_and_not_tried_again(tmp_path: Path) -> None:
    runner = KnownRunner(lambda c: None if c.setting.steps == 2 else _speed(c), together=False)
    search = _search(tmp_path, runner)
    causes = {o.candidate.setting.steps: o.cause for o in search.observations if o.cause}
    assert causes == {2: "out of GPU memory"} and search.best() == Candidate(Setting.of(3))
    assert sum(1 for c in runner.starts if c[0].setting.steps == 2) == 1


@pytest.mark.parametrize("together", [True, False])
def test_nothing_feasible_is_an_error_with_the_cause(tmp_path: Path, together: bool) -> None:
    runner = KnownRunner(lambda c: None, together)
    with pytest.raises(SpecmeterError, match=r"not start|feasible") as caught:
        _search(tmp_path, runner)
    assert "out of GPU memory" in caught.value.why and len(runner.starts) <= 3


def test_an_interrupted_search_repeats_no_start(tmp_path: Path) -> None:
    class Interrupted(KnownRunner):
        def run(self, *args: object) -> list:  # type: ignore[type-arg]
            if len(self.starts) == 3:
                raise KeyboardInterrupt
            return super().run(*args)  # type: ignore[arg-type]

    first = Interrupted(_speed, together=False)
    with pytest.raises(KeyboardInterrupt):
        _search(tmp_path, first)
    second = KnownRunner(_speed, together=False)
    search = _search(tmp_path, second)
    done = {c[0].key for c in first.starts}
    assert len(done) == 3 and all(c[0].key not in done for c in second.starts[:4])
    assert search.best() == Candidate(Setting.of(2))
    starts = [o.start for o in search.observations]
    assert len(starts) == len(set(starts))


def test_a_budget_of_starts_is_kept(tmp_path: Path) -> None:
    runner = KnownRunner(_speed, together=False)
    search = _search(tmp_path, runner, budget=Budget(trials=3))
    assert len(runner.starts) == 3 and search.stopped_by == "the budget of 3 starts" and search.best() is not None


def test_losers_are_those_shown_to_be_slower() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(size=6) * 0.05  # common to all: paired blocks cancel it
    logs = {"a": noise, "b": noise - 0.1 + 0.002 * rng.normal(size=6), "c": noise - 0.001 + 0.01 * (-1) ** np.arange(6)}
    found = losers({name: list(values) for name, values in logs.items()})
    assert set(found) == {"b"} and found["b"] == pytest.approx(0.905, abs=0.01)
    assert losers({"a": [1.0, 1.0], "b": [0.0, 0.0]}) == {}


def test_a_race_rarely_drops_the_true_best() -> None:
    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(300):
        blocks = {str(i): list(rng.normal(size=5) * 0.02) for i in range(6)}
        blocks["best"] = list(rng.normal(size=5) * 0.02 + 0.005)
        alive = dict(blocks)
        for n in (3, 4, 5):
            for name in losers({k: v[:n] for k, v in alive.items()}):
                alive.pop(name)
        wrong += "best" not in alive
    assert wrong / 300 < 0.05


def test_contenders_allow_for_the_chance_of_starts() -> None:
    logs = {"a": [1.0], "b": [0.95], "c": [0.8], "d": []}
    assert contenders(logs, 0.03) == ["a", "b"] and contenders(logs, 0.001) == ["a"] and contenders({}, 0.1) == []


def test_longer_chains_are_left_out_once_the_curve_has_fallen(tmp_path: Path) -> None:
    steep = {0: 50.0, 1: 70.0, 2: 60.0, 3: 50.0, 4: 42.0, 5: 36.0, 6: 30.0}
    runner = KnownRunner(lambda c: steep[c.setting.steps], together=False)
    journal = Journal(tmp_path / "j.sqlite", {"a": "b"})
    first = Candidate(Setting.of(2))
    search = Search(Planner(SPACE, first, None, 0), runner, journal, Budget(), 1, 6, lambda text: None)
    search.run(first)
    journal.close()
    assert {c[0].setting.steps for c in runner.starts} == {0, 1, 2}
    assert search.planner.skipped["k=6"] == "k=2 already lies 14 % behind k=1" and search.best() == Candidate(
        Setting.of(1)
    )


def test_neighbours_steady_a_choice_from_few_starts(tmp_path: Path) -> None:
    def gain(k: int) -> float:
        return sum(0.8**i for i in range(k + 1)) / (1 + 0.04 * k)

    regrets: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(40):
        runner = KnownRunner(lambda c: 50 * gain(c.setting.steps), together=False, seed=seed, start_sd=0.03)
        # Hundreds of starts: the same journal without the disk's waits.
        with Journal(tmp_path / str(seed), {"a": "b"}) as journal:
            journal._db.execute("PRAGMA synchronous = OFF")
            search = Search(
                Planner(SPACE, START, None, seed), runner, journal, Budget(trials=7), 1, 6, lambda text: None
            )
            search.run(START)
        raw = {o.candidate.setting.steps: o.mean or 0.0 for o in search.observations}
        best = search.best()
        assert best is not None
        for smooth, k in ((True, best.setting.steps), (False, max(raw, key=lambda k: raw[k]))):
            regrets[smooth].append(1 - gain(k) / max(gain(n) for n in range(7)))
    assert np.mean(regrets[True]) < 0.7 * np.mean(regrets[False])
    assert np.mean(np.array(regrets[True]) > 0.02) < 0.1


def test_smoothing_leaves_well_known_and_few_lengths_alone() -> None:
    few = {1: (1.0, 1), 2: (1.2, 1), 3: (1.1, 1)}
    assert smoothed(few, 0.03) == {k: mean for k, (mean, _) in few.items()}
    odd = {1: (1.0, 10**6), 2: (1.3, 10**6), 3: (1.0, 10**6), 4: (1.2, 10**6)}
    assert all(value == pytest.approx(odd[k][0], abs=1e-3) for k, value in smoothed(odd, 0.03).items())


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("baseline", [20.0, 200.0])
def test_both_sides_of_the_proof_are_known_however_far_apart_they_lie(
    tmp_path: Path, together: bool, baseline: float
) -> None:
    def speed(candidate: Candidate) -> float:
        return baseline if not candidate.setting.steps else CURVE[candidate.setting.steps]

    search = _search(tmp_path, KnownRunner(speed, together, block_sd=0.001))
    plain, speculative, best = search.best(False), search.best(True), search.best()
    assert plain is not None and speculative is not None and best is not None
    assert bool(best.setting.steps) == (baseline < 50) and speculative.setting.steps in (2, 4)
    assert not any(o.stopped for o in search.observations if not o.candidate.setting.steps)


def test_one_setting_that_breaks_the_common_start_does_not_damn_the_others(tmp_path: Path) -> None:
    def speed(candidate: Candidate) -> float | None:
        return None if candidate.setting.steps == 6 else _speed(candidate)

    runner = KnownRunner(speed, together=True)
    best = _search(tmp_path, runner).best()
    assert best == Candidate(Setting.of(2)) and len(runner.starts[0]) == 7
    assert all(len(group) == 1 for group in runner.starts[1:])
    # Gone on with, it does not try them in one start again.
    again = KnownRunner(speed, together=True)
    assert _search(tmp_path, again).best() == best and all(len(group) == 1 for group in again.starts)


def test_a_forbidden_setting_does_not_run_beside_an_allowed_one(tmp_path: Path) -> None:
    rule = {"steps": "2", "NCCL_ALGO": "Ring"}
    space = Space(SPACE.settings, (Dimension("NCCL_ALGO", (None, "Ring")),), (rule,))
    runner = KnownRunner(_speed, together=True)
    _search(tmp_path, runner, space, Budget(trials=30))
    ran = [c for group in runner.starts for c in group]
    assert any(c.env for c in ran) and all(space.allows(c) for c in ran)


def test_minutes_are_for_all_levels_together() -> None:
    budget = Budget(minutes=10.0, trials=4)
    assert budget.left(0.0, 2) == Budget(minutes=5.0, trials=4) and budget.left(480.0, 1).minutes == 2.0
    assert (budget.left(3600.0, 1).minutes or 0) > 0 and Budget(trials=3).left(99.0, 1) == Budget(trials=3)


def test_what_is_left_out_as_the_search_goes_on_does_not_change_what_optuna_chooses_from() -> None:
    planner = Planner(Space(settings_of(range(31), [1], [])), START, None, 0)
    for _ in range(26):
        candidate = planner.next()
        assert candidate is not None
        planner.tell(candidate, 1.0)
    planner.skipped[candidate.label] = "past the peak"
    assert planner.next() is not None
