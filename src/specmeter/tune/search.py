"""The search: explore, race, repeat what cannot yet be told apart, within a budget, every start in the journal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from specmeter.analysis.racing import contenders, losers, smoothed
from specmeter.engines import Setting
from specmeter.errors import Exit, SpecmeterError
from specmeter.tune.budget import Budget
from specmeter.tune.journal import Journal
from specmeter.tune.limits import BudgetSpent, Limited
from specmeter.tune.planner import Planner
from specmeter.tune.space import Candidate
from specmeter.tune.trial import Logs, Observation, Runner

# Equal starts differed by up to 6 % (standard deviation about 3 %), until this tune knows better.
START_SD = 0.03
MOST_REPEATS = 3
HOPELESS_STARTS = 3
NOT_TOGETHER = "not together"
Say = Callable[[str], None]
__all__ = ["Budget", "Search"]


class Search:
    """One search at one concurrency level; ``observations`` holds all starts, earlier sessions' included."""

    def __init__(
        self, planner: Planner, runner: Runner, journal: Journal, budget: Budget, level: int, blocks: int, say: Say
    ) -> None:
        self.planner, self.runner, self.journal, self.budget = planner, runner, journal, budget
        self.level, self.blocks, self.say = level, blocks, say
        self.stopped_by = ""
        self.observations: list[Observation] = []
        self._began = time.monotonic()
        self._start = 0
        for event in journal.events("trial"):
            observation = Observation.from_json(event)
            self._start = max(self._start, observation.start + 1)
            # What hung against a shorter limit than today's may run now.
            longer = 0 < observation.limit_s < getattr(runner, "limit_s", 0.0)
            if observation.level == level and not longer:
                self._take(observation)
        self._earlier_s = sum(o.seconds for o in self.observations)
        self._replayed = len(self.observations)
        self._racing: Sequence[Candidate] = ()
        self._parted = 0
        self._out = False
        # Settings that travel with the request may be trees; what is switched for all requests is a chain.
        self._chains_only = not getattr(runner, "per_request", True)
        if any(event["level"] == level for event in journal.events(NOT_TOGETHER)):
            self.runner.together = False

    def run(self, start: Candidate) -> None:
        """Search until nothing is left to learn or the budget is spent; ``start`` is what the user runs now."""
        if self.runner.together:
            self._explore_together(start)
        else:
            self._explore_alone()
        self._repeat()
        self._fair()
        if self._out and not self.observations:
            raise SpecmeterError(
                f"No trial was finished: {self.stopped_by}.",
                "A trial is a whole start: loading, a warm-up and its passes over the prompts.",
                "Give more --minutes, or fewer --blocks, --requests or --max-tokens. No setting is called infeasible.",
                Exit.SERVER_FAILED,
            )
        if not any(o.mean is not None for o in self.observations):
            causes = sorted({o.cause for o in self.observations if o.cause})
            raise SpecmeterError(
                "No point of the space is feasible.",
                "; ".join(causes[:3]) or "The budget ended before the first start.",
                "The logs of the trials are in the run directory.",
                Exit.SERVER_FAILED,
            )

    def logs(self) -> dict[str, list[float]]:
        """Candidate key -> one mean log rate a start, of feasible candidates.

        Those that lost a race within one start are left out; a start of its own that was cut short has a mean like any
        other, of fewer blocks, and steadies the curve over chain length.
        """
        found: dict[str, list[float]] = {}
        for o in self.observations:
            if o.mean is not None and not (o.stopped and self.runner.together):
                found.setdefault(o.candidate.key, []).append(o.mean)
        return found

    def best(self, speculative: bool | None = None) -> Candidate | None:
        """The candidate of the highest mean: of all, or with (True) or without (False) speculation."""
        known = {o.candidate.key: o.candidate for o in self.observations}
        kept = self._smoothed() if not self.runner.together else self._in_one_measure()
        # Where every one of a kind lost its race, the least slow of them is still its best.
        lost = {o.candidate.key: o.mean for o in self.observations if o.mean is not None}
        for logs in (kept, lost):
            fits = [k for k in logs if speculative is None or bool(known[k].setting.steps) == speculative]
            if fits:
                return known[max(fits, key=lambda k: logs[k])]
        return None

    def _smoothed(self) -> dict[str, float]:
        """Mean log rate by key, chains of the same knobs drawn towards their common curve over length."""
        logs, counts = self._in_one_measure(), {key: len(values) for key, values in self.logs().items()}
        groups: dict[tuple[object, ...], dict[int, Candidate]] = {}
        for o in self.observations:
            c = o.candidate
            if c.key in logs and c.setting.topk == 1 and c.setting.steps:
                groups.setdefault((c.flags, c.env), {})[c.setting.steps] = c
        for chain in groups.values():
            means = {k: (logs[c.key], counts.get(c.key, 1)) for k, c in chain.items()}
            logs |= {chain[k].key: value for k, value in smoothed(means, START_SD).items()}
        return logs

    def _in_one_measure(self) -> dict[str, float]:
        """Mean log rate by key; of candidates that lost a race only if nothing else is known."""
        logs = {key: sum(values) / len(values) for key, values in self.logs().items()}
        return logs or {o.candidate.key: o.mean for o in self.observations if o.mean is not None}

    def spent_s(self) -> float:
        """Seconds of this level so far, those of earlier sessions included."""
        return self._earlier_s + self.session_s()

    def session_s(self) -> float:
        """Seconds of this session so far."""
        return time.monotonic() - self._began

    def starts(self) -> int:
        """Server starts at this level so far."""
        return len({o.start for o in self.observations})

    def start_s(self) -> float:
        """Mean seconds of a start so far; 0 before the first."""
        return sum(o.seconds for o in self.observations) / self.starts() if self.observations else 0.0

    def _may_start(self, keep: int = 0) -> bool:
        """Whether the budget has one more start, ``keep`` of them kept back."""
        if self._out:
            return False
        reason = self.budget.refusal(self.spent_s(), self.starts(), self.start_s(), keep)
        self.stopped_by = reason or self.stopped_by
        return not reason

    def _owed(self, candidate: Candidate) -> int:
        """Starts to be kept back for the baseline with the candidate's flags and variables, should it lead."""
        plain = candidate.plain
        alone = not self.runner.together or not self._switches(candidate.setting)
        owes = alone and candidate.setting.steps and plain.key not in self._known()
        return int(bool(owes) and self.planner.space.allows(plain))

    def _explore_alone(self) -> None:
        """One candidate a start; a start that lags far behind the best is cut short."""
        while True:
            self._fair()
            candidate = self.planner.next() if self._may_start() else None
            if candidate is None:
                return
            fallen = self._past_the_peak(candidate)
            if fallen:
                self.planner.skipped[candidate.label] = fallen
                continue
            # What the user runs is tried in any case; its baseline is the next in the queue.
            if self.observations and not self._may_start(keep=self._owed(candidate)):
                return
            self._run([candidate], self._lagging)
            self._give_up_if_hopeless()

    def _fair(self) -> None:
        """The baseline meets the flags and variables of the best setting, or they would be credited to speculation."""
        best = self.best(True)
        if best is None or not (best.flags or best.env):
            return
        plain = best.plain
        if plain.key in self._known():
            return
        if not self.planner.space.allows(plain):
            self.planner.skipped[plain.label] = "a rule of `forbid`: the baseline never met the best setting's knobs"
        elif self._may_start():
            self._run([plain], self._lagging)
        else:
            self.planner.skipped[plain.label] = "the budget ended before the baseline met the best setting's knobs"

    def _past_the_peak(self, candidate: Candidate) -> str:
        """Why a longer chain cannot be the best, or an empty text.

        Each further draft step costs as much as the last and is kept less often, so tokens a second over chain length
        have one peak: concave gain over linear cost (Boyd and Vandenberghe, Convex Optimization, 3.4). Once a shorter
        chain with the same knobs lies behind a still shorter one by more than equal starts explain, longer ones do too.
        """
        k, logs = candidate.setting.steps, self._in_one_measure()
        means = {
            o.candidate.setting.steps: logs[o.candidate.key]
            for o in self.observations
            if o.candidate.key in logs
            and o.candidate.setting.topk == candidate.setting.topk == 1
            and (o.candidate.flags, o.candidate.env) == (candidate.flags, candidate.env)
        }
        for high in sorted(n for n in means if n < k):
            best = max((n for n in means if 0 < n < high), key=lambda n: means[n], default=None)
            if best is not None and means[high] < means[best] - 2 * START_SD * 2**0.5:
                return f"k={high} already lies {100 * -math.expm1(means[high] - means[best]):.0f} % behind k={best}"
        return ""

    def _explore_together(self, start: Candidate) -> None:
        """A race of all settings in the user's own configuration, then of the best in each other configuration."""
        settings = self.planner.settings_in_order()
        group = [Candidate(setting, start.flags, start.env) for setting in settings if self._switches(setting)]
        fresh = [c for c in group if c.key not in self._known()]
        if fresh and self._may_start():
            self._run(group, self._race)
            if not self.runner.together:
                return self._explore_alone()  # found out that the settings cannot be switched
            self._give_up_if_hopeless()
        self.planner.seen(group)
        while self._may_start():
            candidate = self.planner.next()
            if candidate is None:
                return None
            if candidate.own or not self._switches(candidate.setting):
                if not self._may_start(self._owed(candidate)):
                    return None
                self._run([candidate], self._lagging)
                continue
            best = [c.setting for c in (self.best(True), self.best(False)) if c is not None and not c.own]
            chosen = dict.fromkeys([candidate.setting, *(setting for setting in best if self._switches(setting))])
            group = [Candidate(setting, candidate.flags, candidate.env) for setting in chosen]
            group = [c for c in group if c.key not in self._known() and self.planner.space.allows(c)]
            self._run(group, self._race)
            if not self.runner.together:
                return self._explore_alone()
            self.planner.seen(group)
        return None

    def _switches(self, setting: Setting) -> bool:
        return setting.topk == 1 or not self._chains_only

    def _repeat(self) -> None:
        """More starts for those that equal starts could explain, fewest starts first."""
        apart = any(o.candidate.own or not self._switches(o.candidate.setting) for o in self.observations)
        if self.runner.together and not self.planner.space.dimensions and not apart:
            return  # all ran in the same start: their race has compared them without a start's chance
        known = {o.candidate.key: o.candidate for o in self.observations}
        while True:
            logs = self.logs()
            could = contenders(logs, START_SD)
            close = [key for key in could if len(logs[key]) < MOST_REPEATS]
            keep = max((self._owed(known[key]) for key in could), default=0)
            if not close or len(could) < 2 or not self._may_start(keep):
                return
            self._run([known[min(close, key=lambda key: len(logs[key]))]], lambda logs: set())

    def _known(self) -> set[str]:
        return {o.candidate.key for o in self.observations}

    def _race(self, logs: Logs) -> set[str]:
        keep = {o.key for o in self._racing if not o.setting.steps}
        return set(losers(logs)) - keep  # the baseline is never dropped: every ratio is to it

    def _lagging(self, logs: Logs) -> set[str]:
        """A lone candidate is cut short once it lies four start deviations behind the best so far."""
        best = max(self._in_one_measure().values(), default=None)
        out = set()
        plain = {o.key for o in self._racing if not o.setting.steps}
        for key, values in logs.items():
            if key in plain:
                continue  # the baseline is never cut short: every ratio is to it
            mean = sum(values) / len(values) if values else None
            if best is not None and mean is not None and mean < best - 4 * START_SD * 2**0.5:
                out.add(key)
        return out

    def _run(self, candidates: Sequence[Candidate], stop: Callable[[Logs], set[str]]) -> None:
        self._racing = candidates
        left = self._time_left()
        names = candidates[0].label if len(candidates) == 1 else f"{len(candidates)} settings in one start"
        self.say(f"trial {self.starts() + 1}: {names}{left}")
        if isinstance(self.runner, Limited):
            self.runner.left_s = self.budget.trial_s(self.spent_s(), self.start_s())
        try:
            found = self.runner.run(candidates, self.level, self._start, self.blocks, stop)
        except BudgetSpent as spent:
            # Nothing of it is written, so that the next session runs it; its whole blocks count in this one.
            self._out = True
            for observation in spent.partial:
                self._take(observation)
            self.stopped_by = f"the budget of {self.budget.minutes or 0:g} minutes, which ended {names} half-way"
            self.say(f"  stopped: {self.stopped_by}")
            return
        finally:
            self._start += 1
        if len(found) > 1 and all(o.cause for o in found) and not self.observations:
            self._part(found)
            return
        for observation in found:
            self.journal.add("trial", observation.as_json())
            self._take(observation)
        for observation in found:
            if observation.cause:
                self.say(f"  infeasible: {observation.candidate.label}: {observation.cause}")
            elif observation.told:
                self.say(f"  {observation.candidate.label} runs {observation.told}")

    def _part(self, found: Sequence[Observation]) -> None:
        """The first start served several settings and failed: any one of them may be why, so each gets its own."""
        self.say(f"  each setting gets starts of its own, since the one with all of them failed: {found[0].cause}")
        self.journal.add(NOT_TOGETHER, {"level": self.level, "cause": found[0].cause})
        self.runner.together = False
        self._parted = 1

    def _take(self, observation: Observation) -> None:
        self.observations.append(observation)
        self.planner.seen([observation.candidate])
        self.planner.tell(observation.candidate, observation.mean)

    def _time_left(self) -> str:
        if self.budget.minutes is not None:
            return f" ({max(0.0, self.budget.minutes - self.spent_s() / 60):.1f} min left in all)"
        if self.budget.trials is not None:
            more = self.budget.trials - self.starts()
            about = f", about {more * self.start_s() / 60:.1f} min" if self.observations else ""
            return f" ({more} starts left{about})"
        more = self.planner.queued()
        return f" (about {more} more, {more * self.start_s() / 60:.1f} min)" if more and self.observations else ""

    def _give_up_if_hopeless(self) -> None:
        fresh = self.observations[self._replayed :]
        if len(fresh) + self._parted >= HOPELESS_STARTS and all(o.cause for o in self.observations):
            raise SpecmeterError(
                "The server does not start with any setting tried.",
                fresh[0].cause,
                "Try the command by itself; the logs of the trials are in the run directory.",
                Exit.SERVER_FAILED,
            )
