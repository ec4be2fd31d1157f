"""The search: explore, race, repeat what cannot yet be told apart, within a budget, every start in the journal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specmeter.analysis.racing import contenders, losers, smoothed
from specmeter.engines import Setting
from specmeter.errors import Exit, SpecmeterError
from specmeter.tune.journal import Journal
from specmeter.tune.planner import Planner
from specmeter.tune.space import Candidate
from specmeter.tune.trial import Logs, Observation, Runner

# Equal starts differed by up to 6 % (standard deviation about 3 %), until this tune knows better.
START_SD = 0.03
MOST_REPEATS = 3
HOPELESS_STARTS = 3
NOT_TOGETHER = "not together"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Budget:
    """At most so many minutes in all and so many server starts for the search; None: no such limit.

    ``confirm_starts`` starts are kept back for the proof, whose time is taken from the minutes.
    """

    minutes: float | None = None
    trials: int | None = None
    confirm_starts: int = 9

    def __post_init__(self) -> None:
        if self.minutes is not None and not 0 < self.minutes < 1e6:
            raise SpecmeterError(f"--minutes is {self.minutes}; it must be above 0.")
        if self.trials is not None and self.trials < 1:
            raise SpecmeterError(f"--trials is {self.trials}; it must be 1 or more.")

    def left(self, spent_s: float, levels: int) -> Budget:
        """The budget of the next of ``levels`` concurrency levels to come: minutes are for all, starts for each."""
        if self.minutes is None:
            return self
        return replace(self, minutes=max(self.minutes - spent_s / 60, 0.01) / levels)


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
            if observation.level == level:
                self._take(observation)
        self._earlier_s = sum(o.seconds for o in self.observations)
        self._replayed = len(self.observations)
        self._racing: Sequence[Candidate] = ()
        self._parted = 0
        if any(event["level"] == level for event in journal.events(NOT_TOGETHER)):
            self.runner.together = False

    def run(self, start: Candidate) -> None:
        """Search until nothing is left to learn or the budget is spent; ``start`` is what the user runs now."""
        if self.runner.together:
            self._explore_together(start)
        else:
            self._explore_alone()
        self._repeat()
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

    def _may_start(self) -> bool:
        reserve = self.start_s() * (1 + self.budget.confirm_starts)
        if self.budget.minutes is not None and self.spent_s() + reserve > 60 * self.budget.minutes and self.starts():
            self.stopped_by = f"the budget of {self.budget.minutes:g} minutes, the proof's part kept back"
            return False
        if self.budget.trials is not None and self.starts() >= self.budget.trials:
            self.stopped_by = f"the budget of {self.budget.trials} starts"
            return False
        return True

    def _explore_alone(self) -> None:
        """One candidate a start; a start that lags far behind the best is cut short."""
        while self._may_start():
            candidate = self.planner.next()
            if candidate is None:
                return
            fallen = self._past_the_peak(candidate)
            if fallen:
                self.planner.skipped[candidate.label] = fallen
                continue
            self._run([candidate], self._lagging)
            self._give_up_if_hopeless()
            self._fair()

    def _fair(self) -> None:
        """The baseline meets the flags and variables of the best setting, or they would be credited to speculation."""
        best = self.best(True)
        if best is None or not (best.flags or best.env):
            return
        plain = Candidate(Setting.of(0), best.flags, best.env)
        if plain.key in self._known() or not self.planner.space.allows(plain):
            return
        if self._may_start():
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
        group = [Candidate(setting, start.flags, start.env) for setting in settings]
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
            best = [c.setting for c in (self.best(True), self.best(False)) if c is not None]
            chosen = dict.fromkeys([candidate.setting, *best])
            group = [Candidate(setting, candidate.flags, candidate.env) for setting in chosen]
            group = [c for c in group if c.key not in self._known() and self.planner.space.allows(c)]
            self._run(group, self._race)
            if not self.runner.together:
                return self._explore_alone()
            self.planner.seen(group)
        return None

    def _repeat(self) -> None:
        """More starts for those that equal starts could explain, fewest starts first."""
        if self.runner.together and not self.planner.space.dimensions:
            return  # all ran in the same start: their race has compared them without a start's chance
        known = {o.candidate.key: o.candidate for o in self.observations}
        while True:
            logs = self.logs()
            close = [key for key in contenders(logs, START_SD) if len(logs[key]) < MOST_REPEATS]
            if not close or len(contenders(logs, START_SD)) < 2 or not self._may_start():
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
        found = self.runner.run(candidates, self.level, self._start, self.blocks, stop)
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
