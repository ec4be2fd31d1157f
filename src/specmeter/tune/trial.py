"""One trial: a server start in its own process group, benched block by block, stopped surely; or why it failed."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Protocol

from specmeter.analysis.compare import DROPPED_BLOCKS
from specmeter.bench.client import Call, Outcome
from specmeter.bench.load import Load, as_request, raise_failure
from specmeter.bench.place import HERE
from specmeter.bench.progress import Progress
from specmeter.bench.prompts import Prompt
from specmeter.bench.resolved import resolved_arguments
from specmeter.bench.schedule import Sending, call, warm_up
from specmeter.bench.session import Probing, Session, session
from specmeter.bench.switching import CannotSwitch, Switch, SwitchedServer, prepare
from specmeter.engines import Engine, ServerSpec, Setting, engine_named
from specmeter.engines.access import listening_host
from specmeter.engines.process import port_is_taken
from specmeter.errors import Exit, SpecmeterError
from specmeter.trace.rundir import RunWriter
from specmeter.tune.limits import BudgetSpent, Limit
from specmeter.tune.own import told
from specmeter.tune.space import Candidate

PORT_WAIT_S = 10.0
Logs = Mapping[str, Sequence[float]]
Stop = Callable[[Logs], set[str]]
"""Hears the kept blocks' log rates by candidate key after every block; returns the keys to run no further."""


@dataclass(frozen=True)
class Observation:
    """What one start said of one candidate at one concurrency.

    ``logs`` are its blocks' mean log decode rates (tokens a second), the first block left out; ``seconds`` its share
    of the start, loading included; ``cause`` why it is infeasible, empty if it is not; ``stopped`` that it lost a race;
    ``told`` the setting that the server named, where the command leaves it to its engine; ``limit_s`` the limit that it
    hung against, in seconds, 0 if it did not.
    """

    candidate: Candidate
    level: int
    start: int
    logs: tuple[float, ...]
    seconds: float
    cause: str = ""
    stopped: bool = False
    accept_length: float | None = None
    told: str = ""
    limit_s: float = 0.0

    @property
    def mean(self) -> float | None:
        """Mean log rate; None if infeasible."""
        return sum(self.logs) / len(self.logs) if self.logs and not self.cause else None

    def as_json(self) -> dict[str, Any]:
        """All of it, for the journal."""
        c = self.candidate
        return {
            "setting": c.setting_json(),
            "flags": dict(c.flags),
            "env": dict(c.env),
            "level": self.level,
            "start": self.start,
            "logs": list(self.logs),
            "seconds": self.seconds,
            "cause": self.cause,
            "stopped": self.stopped,
            "accept_length": self.accept_length,
            **({"own": True, "told": self.told} if c.own else {}),
            **({"limit_s": self.limit_s} if self.limit_s else {}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Observation:
        """The inverse of ``as_json``."""
        s = data["setting"]
        candidate = Candidate(
            Setting(s["steps"], s["topk"], s["draft_tokens"]),
            tuple(sorted(data["flags"].items())),
            tuple(sorted(data["env"].items())),
            data.get("own", False),
        )
        rest = {name: data[name] for name in ("level", "start", "seconds", "cause", "stopped", "accept_length")}
        rest |= {"told": data.get("told", ""), "limit_s": data.get("limit_s", 0.0)}
        return cls(candidate=candidate, logs=tuple(data["logs"]), **rest)


class Runner(Protocol):
    """Runs starts: live, or from a recorded grid. ``together``: one start serves several speculative settings.

    It may turn false in a run that finds that they cannot be switched; that run gives no observation.
    """

    together: bool

    def run(
        self, candidates: Sequence[Candidate], level: int, start: int, blocks: int, stop: Stop
    ) -> list[Observation]:
        """One start with these candidates (one, or several that differ in the setting only)."""
        ...


@dataclass
class LiveRunner:
    """Starts the real server. A start that takes longer than ``limit_s`` seconds in all is a hang: it is killed.

    ``left_s`` are the seconds that the budget has left: a start that these end raises BudgetSpent. ``separate`` gives
    each setting its own start even where the engine's number of draft steps could be switched.
    """

    spec: ServerSpec
    prompts: tuple[Prompt, ...]
    sending: Sending
    how: Probing
    writer: RunWriter
    progress: Progress
    limit_s: float = 1800.0
    separate: bool = False
    left_s: float = math.inf
    together: bool = field(init=False)
    per_request: bool = field(init=False)

    def __post_init__(self) -> None:
        engine = engine_named(self.spec.engine or "")
        self.per_request = engine.can("per_request")
        self.together = self.per_request or (engine.can("switch") and not self.separate)

    def run(
        self, candidates: Sequence[Candidate], level: int, start: int, blocks: int, stop: Stop
    ) -> list[Observation]:
        """One start; a crash, a refusal or a hang makes its candidates infeasible with the cause from the log.

        Raises BudgetSpent, and SpecmeterError for what is no candidate's fault: a port that is taken, a program or a
        model's name that is not there.
        """
        began, limit = time.monotonic(), Limit(self.limit_s, self.left_s)
        collected = _Collected({c.key: [] for c in candidates})
        cause, ended = "", False
        try:
            self._start(candidates, level, start, blocks, stop, collected, limit)
        except CannotSwitch as reason:
            ended = limit.over
            if not ended:
                self.progress.say(f"each setting gets starts of its own: {reason}")
                self.together = False
                return []
        except _CannotBeSet as error:
            cause = str(error)
        except SpecmeterError as error:
            if error.exit is not Exit.SERVER_FAILED:
                raise
            ended, cause = limit.over, _cause(error)
        if ended:
            cause = "" if limit.is_budgets else f"it hung: not done after {self.limit_s:g} s"
        share = (time.monotonic() - began) / len(candidates)
        found = [
            Observation(
                c, level, start, tuple(collected.logs[c.key]), share, cause, c.key in collected.dropped,
                collected.length(c.key), collected.told, self.limit_s if ended else 0.0,
            )
            for c in candidates
        ]  # fmt: skip
        if ended and limit.is_budgets:
            raise BudgetSpent([observation for observation in found if observation.logs])
        return found

    def _start(
        self, candidates: Sequence[Candidate], level: int, start: int, blocks: int, stop: Stop, into: _Collected,
        limit: Limit,
    ) -> None:  # fmt: skip
        engine = engine_named(self.spec.engine or "")
        if self.how.place is HERE:
            refuse_taken_port(engine, self.spec.command)
        server = self._switched(candidates)
        spec, link = (server.spec, server.link) if server else (self._spec(candidates[0]), None)
        how = replace(
            self.how, start_timeout_s=limit.wait_s(self.how.start_timeout_s, engine.default_start_timeout_s())
        )
        with (
            session(spec, link, self.writer, how, self.progress, f"trial-{start}") as running,
            limit.kills(running),
            running.armed(),
        ):
            switch = Switch(running) if server else None
            settings = [c.setting if self.per_request and not c.own else None for c in candidates]
            warm = warm_up(self.prompts[0], settings, running.engine, self.sending)
            if switch is not None:
                switch.meet(warm[:1])
                switch.drive("warm-up", [(c.setting, [w]) for c, w in zip(candidates, warm, strict=True)])
            else:
                raise_failure(running.drive("warm-up", warm).outcomes, "The warm-up failed.")
            if candidates[0].own:
                into.told = told(resolved_arguments(running.server, spec.command, (), how.place))
            self._blocks(running, switch, candidates, level, blocks, stop, into)

    def _blocks(
        self, running: Session, switch: Switch | None, candidates: Sequence[Candidate], level: int, blocks: int,
        stop: Stop, into: _Collected,
    ) -> None:  # fmt: skip
        alive = list(candidates)
        for block in range(blocks):
            found = self._block(running, switch, alive, level, f"block {block + 1} of {blocks}", block)
            into.add(found, keep=block >= DROPPED_BLOCKS)
            if block >= DROPPED_BLOCKS:
                into.dropped |= stop({key: logs for key, logs in into.logs.items() if key not in into.dropped})
                alive = [c for c in alive if c.key not in into.dropped]
            if not alive or (len(candidates) > 1 and len(alive) == 1):
                return

    def _spec(self, candidate: Candidate) -> ServerSpec:
        """The candidate's server; raises _CannotBeSet for a setting that the engine does not take."""
        try:
            return candidate.arm(self.spec).spec
        except SpecmeterError as error:
            raise _CannotBeSet(_cause(error)) from error

    def _switched(self, candidates: Sequence[Candidate]) -> SwitchedServer | None:
        """A start in which the candidates are switched, if they have to be; raises CannotSwitch."""
        if self.per_request or len(candidates) == 1:
            return None
        longest = max(candidates, key=lambda c: c.setting.steps)
        return prepare(self._spec(longest), self.how, [c.setting for c in candidates], whole=False)

    def _block(
        self, running: Session, switch: Switch | None, alive: Sequence[Candidate], level: int, title: str, block: int
    ) -> list[tuple[str, Outcome]]:
        """One pass over the prompts; with several candidates each prompt runs all of them in a drawn order.

        Where they are switched and several requests run at once, each candidate has all prompts, in a drawn order.
        """
        rng = random.Random(f"{self.sending.seed}-{block}")
        calls = []
        for prompt in rng.sample(list(self.prompts), len(self.prompts)):
            for c in rng.sample(list(alive), len(alive)):
                own = c.setting if self.per_request and not c.own else None
                made = call(prompt, own, running.engine, self.sending, block, c.label)
                calls.append((c.key, replace(made, seed=self.sending.seed)))
        load = Load(level, seed=self.sending.seed)
        if switch is not None:
            if level > 1:
                order = [c.key for c in rng.sample(list(alive), len(alive))]
                calls.sort(key=lambda pair: order.index(pair[0]))
            return _switching(switch, title, alive, calls, load)
        result = running.drive(title, [made for _, made in calls], load)
        raise_failure(result.outcomes)
        return [(key, outcome) for (key, _), outcome in zip(calls, result.outcomes, strict=True)]


def _switching(
    switch: Switch, title: str, alive: Sequence[Candidate], calls: Sequence[tuple[str, Call]], load: Load
) -> list[tuple[str, Outcome]]:
    """The calls in their order, neighbours of one candidate as one group."""
    settings = {c.key: c.setting for c in alive}
    groups = [(key, [made for _, made in pairs]) for key, pairs in groupby(calls, key=lambda pair: pair[0])]
    outcomes = switch.drive(title, [(settings[key], own) for key, own in groups], load)
    return [(key, outcome) for (key, _), outcome in zip(calls, outcomes, strict=True)]


@dataclass
class _Collected:
    """The blocks of one start so far."""

    logs: dict[str, list[float]]
    dropped: set[str] = field(default_factory=set)
    cycles: dict[str, list[int]] = field(default_factory=dict)
    told: str = ""

    def add(self, outcomes: Sequence[tuple[str, Outcome]], keep: bool) -> None:
        """Take one block in."""
        rates: dict[str, list[float]] = {}
        for key, outcome in outcomes:
            rate = as_request(outcome).decode_rate
            if rate:
                rates.setdefault(key, []).append(math.log(rate))
            if outcome.cycles and outcome.accepted is not None:
                counts = self.cycles.setdefault(key, [0, 0])
                counts[0] += outcome.cycles
                counts[1] += outcome.accepted
        if keep:
            for key, values in rates.items():
                self.logs[key].append(sum(values) / len(values))

    def length(self, key: str) -> float | None:
        """Mean accept length, where the server tells cycles and accepted tokens with each answer."""
        cycles, accepted = self.cycles.get(key, (0, 0))
        return 1 + accepted / cycles if cycles else None


class _CannotBeSet(Exception):
    """Why a candidate has no command."""


def refuse_taken_port(engine: Engine, command: tuple[str, ...], wait_s: float = PORT_WAIT_S) -> None:
    """Raise SpecmeterError (exit 5) where the port that the command states is taken, which is no candidate's fault.

    The last trial's server may have left it a moment ago, so it is looked at for ``wait_s`` seconds.
    """
    port, until = engine.command_port(command), time.monotonic() + wait_s
    while port is not None and port_is_taken(port, listening_host(command)):
        if time.monotonic() > until:
            raise SpecmeterError(
                f"Port {port} is taken: something else listens on it.",
                "The command asks for this port.",
                "Stop what uses it, or leave --port out: a free one is picked then. Every finished trial is kept.",
                Exit.ENVIRONMENT,
            )
        time.sleep(0.1)


def _cause(error: SpecmeterError) -> str:
    lines = [line.strip() for line in (error.why or error.what).splitlines() if line.strip()]
    return f"{error.what} {lines[0]}"[:300] if lines else error.what[:300]
