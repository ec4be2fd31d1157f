"""One start, many step counts: the recipe's knob is turned between requests, each turn checked in the process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specmeter import control
from specmeter.bench.client import Call, Outcome
from specmeter.bench.load import Load, raise_failure
from specmeter.bench.place import HERE
from specmeter.bench.session import RECIPE_ENGINES, Probing, Session
from specmeter.control.prepare import prepare_link
from specmeter.engines import Counters, ServerSpec, Setting, engine_named
from specmeter.errors import Exit, SpecmeterError
from specmeter.recipes import loader

KNOB = "draft_steps"
# No drafts, but the draft's forward over the accepted tokens still runs: near plain decoding, and not it.
NEAR_BASELINE = "k=0"
MEET_S = 10.0
TURN_S = 5.0
POLL_S = 0.005
# Records of the knob's points are not looked at where only the knob is wanted.
SMALL_RING = 1 << 12


class CannotSwitch(Exception):
    """Why each setting needs a start of its own."""


@dataclass(frozen=True)
class SwitchedServer:
    """The server to start, whose command allows every setting, and the link that opens the knob there."""

    spec: ServerSpec
    link: control.Link


def label_of(setting: Setting) -> str:
    """How a switched setting is named: 0 steps are no baseline there."""
    return NEAR_BASELINE if setting.steps == 0 else setting.label


def prepare(spec: ServerSpec, how: Probing, settings: Sequence[Setting], whole: bool) -> SwitchedServer:
    """Plan a start in which ``settings`` can be switched; ``whole``: with all points, else with the knob's alone.

    Raises CannotSwitch with the reason: engine, version, a tree, another host, an interpreter that loads no runtime.
    """
    if not spec.command or spec.engine is None:
        raise CannotSwitch("a running server was given, and what can be switched is fixed when it is started")
    if how.place is not HERE:
        raise CannotSwitch("the server runs on another host, where knobs are not turned yet")
    name = RECIPE_ENGINES.get(spec.engine, spec.engine)
    try:
        command = engine_named(spec.engine).switched(spec.command, settings)
        reason = control.why_not_up(command)
        if reason:
            raise CannotSwitch(reason)
        only = None if whole else _points(name, how)
        link = prepare_link(
            list(command), engine=name, python=how.python, recipe=how.recipe, knobs=(KNOB,), only=only,
            capacity=None if whole else SMALL_RING,
        )  # fmt: skip
    except SpecmeterError as error:
        raise CannotSwitch(f"{error.what} {error.why}".strip()) from error
    plan = link.plan()
    if not any(knob["name"] == KNOB and knob["open"] for knob in plan.get("knobs") or []):
        refused = [item["reason"] for item in plan.get("knobs_refused") or [] if item["name"] == KNOB]
        control.remove_link(link)
        raise CannotSwitch(f"{plan['engine']} {plan['engine_version']}: {refused[0] if refused else 'no such knob'}")
    return SwitchedServer(replace(spec, command=command), link)


def _points(engine: str, how: Probing) -> set[str]:
    recipe = loader.load(how.recipe) if how.recipe is not None else loader.built_in(engine)
    found = {str(knob["point"]) for knob in recipe.data.get("knob", []) if knob["name"] == KNOB}
    if not found:
        raise CannotSwitch(f"the recipe of {engine} names no number of draft steps that may be changed")
    return found


@dataclass
class Counted:
    """The engine's own count of what ran at one setting; ``told`` is false where it does not count."""

    steps: int
    turns: int = 0
    cycles: int = 0
    drafted: int = 0
    told: bool = True

    def add(self, found: Counters) -> None:
        """Take one stretch in."""
        self.turns += 1
        if found.cycles is None or found.drafted is None:
            self.told = False
            return
        self.cycles += found.cycles
        self.drafted += found.drafted

    def as_json(self, setting: str) -> dict[str, Any]:
        """For the report; ``agrees``: each cycle drafted as many tokens as was set (null: the engine does not tell)."""
        agrees = self.drafted == self.steps * self.cycles if self.told else None
        counts = {"cycles": self.cycles, "drafted_tokens": self.drafted} if self.told else {}
        return {"setting": setting, "steps": self.steps, "turns": self.turns, **counts, "agrees": agrees}


@dataclass
class Switch:
    """Turns the knob of an armed session. ``counted`` has the engine's own counts by setting."""

    running: Session
    counted: dict[str, Counted] = field(default_factory=dict)

    def meet(self, calls: Sequence[Call]) -> None:
        """Send ``calls``, so that the engine's thread passes by; raise CannotSwitch unless the knob is there then."""
        raise_failure(self.running.drive("warm-up", calls).outcomes, "The warm-up failed.")
        until = time.monotonic() + MEET_S
        while True:
            states = control.knob_states(self._link, KNOB)
            refused = [str(state["reason"]) for state in states if state["reason"]]
            if refused:
                raise CannotSwitch(refused[0])
            if any(state["met"] for state in states):
                return
            if time.monotonic() > until:
                raise CannotSwitch("no process of the server came by the place in the source where the number is read")
            time.sleep(POLL_S)

    def drive(
        self, title: str, groups: Sequence[tuple[Setting, Sequence[Call]]], load: Load | None = None
    ) -> list[Outcome]:
        """Each group at its setting, the server empty in between; raises SpecmeterError if a turn is not taken."""
        outcomes: list[Outcome] = []
        before = self.running.server.metrics()
        for number, (setting, calls) in enumerate(groups, 1):
            self._to(setting.steps)
            result = self.running.drive(f"{title} {number}/{len(groups)}", calls, load)
            raise_failure(result.outcomes)
            self._check(setting.steps)
            after = self.running.server.metrics()
            self.counted.setdefault(label_of(setting), Counted(setting.steps)).add(after.since(before))
            before = after
            outcomes += result.outcomes
        return outcomes

    def verified(self) -> list[dict[str, Any]]:
        """For the report: what the engine counted at each setting, and whether that is what was set."""
        return [counted.as_json(name) for name, counted in self.counted.items()]

    @property
    def _link(self) -> control.Link:
        if self.running.link is None:
            raise CannotSwitch("the server was started without the runtime")
        return self.running.link

    def _to(self, steps: int) -> None:
        ack = control.turn(self._link, {KNOB: steps}, TURN_S)
        if ack.silent:
            self.running.check_death()
            raise _not_taken(steps, f"process {ack.silent[0].pid} did not answer")

    def _check(self, steps: int) -> None:
        """Read the number back from the engine, once its thread has passed by."""
        until = time.monotonic() + TURN_S
        while True:
            states = [state for state in control.knob_states(self._link, KNOB) if state["met"]]
            reasons = [state["reason"] for state in states if state["reason"]]
            if reasons:
                raise _not_taken(steps, reasons[0])
            if states and all(state["value"] == steps and not state["pending"] for state in states):
                return
            if time.monotonic() > until:
                raise _not_taken(steps, f"it reads back as {[state['value'] for state in states]}")
            time.sleep(POLL_S)


def _not_taken(steps: int, why: str) -> SpecmeterError:
    return SpecmeterError(
        f"The server did not take {steps} draft steps.", f"{why}.", "--separate gives each setting its own starts.",
        Exit.SERVER_FAILED,
    )  # fmt: skip
