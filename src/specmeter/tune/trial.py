"""One trial: a server start in its own process group, benched block by block, stopped surely; or why it failed."""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Protocol

from specmeter.analysis.compare import DROPPED_BLOCKS
from specmeter.bench.client import Call, Outcome
from specmeter.bench.load import Load, as_request, raise_failure
from specmeter.bench.progress import Progress
from specmeter.bench.prompts import Prompt
from specmeter.bench.schedule import Sending, call, warm_up
from specmeter.bench.session import Probing, Session, session
from specmeter.bench.switching import CannotSwitch, Switch, SwitchedServer, prepare
from specmeter.engines import ServerSpec, Setting, engine_named
from specmeter.errors import Exit, SpecmeterError
from specmeter.trace.rundir import RunWriter
from specmeter.tune.space import Candidate

Logs = Mapping[str, Sequence[float]]
Stop = Callable[[Logs], set[str]]
"""Hears the kept blocks' log rates by candidate key after every block; returns the keys to run no further."""


@dataclass(frozen=True)
class Observation:
    """What one start said of one candidate at one concurrency.

    ``logs`` are its blocks' mean log decode rates (tokens a second), the first block left out; ``seconds`` its share
    of the start, loading included; ``cause`` why it is infeasible, empty if it is not; ``stopped`` that it lost a race.
    """

    candidate: Candidate
    level: int
    start: int
    logs: tuple[float, ...]
    seconds: float
    cause: str = ""
    stopped: bool = False
    accept_length: float | None = None

    @property
    def mean(self) -> float | None:
        """Mean log rate; None if infeasible."""
        return sum(self.logs) / len(self.logs) if self.logs and not self.cause else None

    def as_json(self) -> dict[str, Any]:
        """All of it, for the journal."""
        c = self.candidate
        return {
            "setting": c.setting.as_json(),
            "flags": dict(c.flags),
            "env": dict(c.env),
            "level": self.level,
            "start": self.start,
            "logs": list(self.logs),
            "seconds": self.seconds,
            "cause": self.cause,
            "stopped": self.stopped,
            "accept_length": self.accept_length,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Observation:
        """The inverse of ``as_json``."""
        s = data["setting"]
        candidate = Candidate(
            Setting(s["steps"], s["topk"], s["draft_tokens"]),
            tuple(sorted(data["flags"].items())),
            tuple(sorted(data["env"].items())),
        )
        rest = ("level", "start", "seconds", "cause", "stopped", "accept_length")
        return cls(candidate=candidate, logs=tuple(data["logs"]), **{name: data[name] for name in rest})


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

    ``separate`` gives each setting its own start even where the engine's number of draft steps could be switched.
    """

    spec: ServerSpec
    prompts: tuple[Prompt, ...]
    sending: Sending
    how: Probing
    writer: RunWriter
    progress: Progress
    limit_s: float = 1800.0
    separate: bool = False
    together: bool = field(init=False)
    per_request: bool = field(init=False)

    def __post_init__(self) -> None:
        engine = engine_named(self.spec.engine or "")
        self.per_request = engine.can("per_request")
        self.together = self.per_request or (engine.can("switch") and not self.separate)

    def run(
        self, candidates: Sequence[Candidate], level: int, start: int, blocks: int, stop: Stop
    ) -> list[Observation]:
        """One start; a crash, a refusal or a hang makes its candidates infeasible with the cause from the log."""
        began = time.monotonic()
        collected = _Collected({c.key: [] for c in candidates})
        cause = ""
        try:
            self._start(candidates, level, start, blocks, stop, collected)
        except CannotSwitch as reason:
            self.progress.say(f"each setting gets starts of its own: {reason}")
            self.together = False
            return []
        except SpecmeterError as error:
            if error.exit not in (Exit.SERVER_FAILED, Exit.USAGE):
                raise
            cause = _cause(error, collected.timed_out)
        share = (time.monotonic() - began) / len(candidates)
        return [
            Observation(
                c, level, start, tuple(collected.logs[c.key]), share, cause, c.key in collected.dropped,
                collected.length(c.key),
            )
            for c in candidates
        ]  # fmt: skip

    def _start(
        self, candidates: Sequence[Candidate], level: int, start: int, blocks: int, stop: Stop, into: _Collected
    ) -> None:
        server = self._switched(candidates)
        spec, link = (server.spec, server.link) if server else (candidates[0].arm(self.spec).spec, None)
        with (
            session(spec, link, self.writer, self.how, self.progress, f"trial-{start}") as running,
            _killed_after(self.limit_s, running, into),
            running.armed(),
        ):
            switch = Switch(running) if server else None
            settings = [c.setting if self.per_request else None for c in candidates]
            warm = warm_up(self.prompts[0], settings, running.engine, self.sending)
            if switch is not None:
                switch.meet(warm[:1])
                switch.drive("warm-up", [(c.setting, [w]) for c, w in zip(candidates, warm, strict=True)])
            else:
                raise_failure(running.drive("warm-up", warm).outcomes, "The warm-up failed.")
            alive = list(candidates)
            for block in range(blocks):
                found = self._block(running, switch, alive, level, f"block {block + 1} of {blocks}", block)
                into.add(found, keep=block >= DROPPED_BLOCKS)
                if block >= DROPPED_BLOCKS:
                    into.dropped |= stop({key: logs for key, logs in into.logs.items() if key not in into.dropped})
                    alive = [c for c in alive if c.key not in into.dropped]
                if not alive or (len(candidates) > 1 and len(alive) == 1):
                    return

    def _switched(self, candidates: Sequence[Candidate]) -> SwitchedServer | None:
        """A start in which the candidates are switched, if they have to be; raises CannotSwitch."""
        if self.per_request or len(candidates) == 1:
            return None
        longest = max(candidates, key=lambda c: c.setting.steps)
        return prepare(longest.arm(self.spec).spec, self.how, [c.setting for c in candidates], whole=False)

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
                own = c.setting if self.per_request else None
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
    timed_out: float | None = None

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


def _cause(error: SpecmeterError, timed_out: float | None) -> str:
    if timed_out is not None:
        return f"it hung: not done after {timed_out:g} s"
    lines = [line.strip() for line in (error.why or error.what).splitlines() if line.strip()]
    return f"{error.what} {lines[0]}"[:300] if lines else error.what[:300]


@contextlib.contextmanager
def _killed_after(seconds: float, running: Session, collected: _Collected) -> Iterator[None]:
    """Kills the server after ``seconds``, so that its requests fail; the guardian ends what it started."""
    process = running.server.process

    def kill() -> None:
        collected.timed_out = seconds
        if process is not None:
            process.kill()

    timer = threading.Timer(seconds, kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
